"""Products of few rows against their plain torch twins."""

import pytest
import torch

from kvloom.kernels import reference
from kvloom.kernels.cpu.attention.tile import TILE, score
from kvloom.kernels.cpu.panels import PANEL, panel_product


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("depth", [1, 7, 24, 25, 200])
def test_panel(rows: int, depth: int) -> None:
    torch.manual_seed(rows * depth)
    x, w = torch.randn(rows, depth + 3)[:, :depth], torch.randn(depth, PANEL)
    out = torch.full((rows + 3, PANEL), torch.nan)
    panel_product(out.data_ptr(), x.data_ptr(), x.stride(0) * 4, rows, w.data_ptr(), depth, w.data_ptr())
    torch.testing.assert_close(out[:rows], reference.panel_product(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 4, 63, 64])
@pytest.mark.parametrize("depth", [5, 64, 100])
def test_score(rows: int, count: int, depth: int) -> None:
    torch.manual_seed(rows * count)
    q, k = torch.randn(rows, depth + 3)[:, :depth], torch.randn(count, depth)
    out = torch.full((rows, TILE), torch.nan)
    score(out.data_ptr(), q.data_ptr(), q.stride(0) * 4, k.data_ptr(), count, rows, depth)
    torch.testing.assert_close(out[:, :count], reference.score(q, k), rtol=1e-5, atol=1e-5)

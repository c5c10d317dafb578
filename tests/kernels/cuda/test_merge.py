"""Merging partial attention, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import reference
from kvloom.kernels.cuda.decode import merge


@pytest.mark.parametrize(
    ("splits", "rows", "heads", "head_dim"), [(1, 3, 2, 16), (2, 5, 3, 80), (9, 70, 1, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_like_its_twin(splits: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(splits)
    parts = torch.randn(splits, rows, heads, head_dim).to(dtype)
    lse = torch.randn(splits, rows, heads) * 20
    absent = torch.rand(lse.shape) < 0.3
    lse[absent], parts[absent] = -torch.inf, torch.nan
    lse[:, 0], parts[:, 0] = -torch.inf, torch.nan
    out, out_lse = torch.full((rows, heads, head_dim), torch.nan), torch.full((rows, heads), torch.nan)
    wanted, wanted_lse = out.clone(), out_lse.clone()
    merge(out, parts, lse, out_lse)
    reference.merge(wanted, parts, lse, wanted_lse)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out_lse, wanted_lse, rtol=1e-5, atol=1e-6)
    assert not out[0].any()


def test_parts_of_parts_are_parts_of_the_whole() -> None:
    """Softmax over all tokens is what merging softmaxes over pieces of them gives, in any order."""
    torch.manual_seed(0)
    scores, v = torch.randn(1, 1, 60) * 5, torch.randn(60, 32)
    pieces = [slice(0, 7), slice(7, 8), slice(8, 40), slice(40, 60)]
    parts = torch.stack([scores[..., piece].softmax(-1) @ v[piece] for piece in pieces])
    lse = torch.stack([scores[..., piece].logsumexp(-1) for piece in pieces])
    some, some_lse = torch.empty(2, 1, 1, 32), torch.empty(2, 1, 1)
    merge(some[0], parts[2:], lse[2:], some_lse[0])
    merge(some[1], parts[:2], lse[:2], some_lse[1])
    out = torch.empty(1, 1, 32)
    merge(out, some, some_lse)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)

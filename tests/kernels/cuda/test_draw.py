"""Draws in Triton's interpreter, or on a GPU: the tokens of their twin."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import draw_reference
from kvloom.kernels.cuda.draw import draw
from tests.kernels.test_draw import rows


@pytest.mark.parametrize(
    ("seed", "size", "scale", "digits"),
    [(0, 1, 1.0, 3), (1, 64, 0.0, 0), (2, 200, 2.0, 6), (3, 2500, 3.0, 1), (4, 4096, 0.5, 5)],
)
def test_the_kernel_draws_what_its_twin_does(seed: int, size: int, scale: float, digits: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits, temperature, top_k, top_p, min_p, stream = rows(seed, 12, size, scale, digits)
    logits[5] = -torch.inf
    case = logits, temperature, top_k, top_p, min_p, stream
    found = draw(*(tensor.to(device) for tensor in case)).tolist()
    assert found == draw_reference.draw(*case).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.5)])
def test_of_equal_logits_at_a_threshold_the_lower_ids_stay(top_k: int, top_p: float) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ones, stream = torch.ones(30), torch.from_numpy(draw_reference.streams(range(30), [0] * 30))
    case = torch.zeros(30, 4), ones, torch.full((30,), top_k), ones * top_p, ones * 0, stream
    assert set(draw(*(tensor.to(device) for tensor in case)).tolist()) == {0, 1}

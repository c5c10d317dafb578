"""Products over weights of 16 bits against the same weights in float32."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.cpu.half import HalfPanels, narrow_formats
from kvloom.kernels.cpu.lanes.integers import HAS_BFLOAT16_DOT
from kvloom.kernels.cpu.panels import PANEL
from tests.exec.batches import on_threads

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(64, 32), (192, 256), (96, 64), (100, 61), (7, 5), (1, 1), (65, 2)]


def skip_unless_served(dtype: torch.dtype) -> None:
    if dtype not in narrow_formats():
        pytest.skip(f"this processor does not widen {dtype}")


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded(bias: torch.Tensor, panels: HalfPanels) -> torch.Tensor:
    return torch.nn.functional.pad(bias, (0, panels.count * PANEL - len(bias)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_panels_hold_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    skip_unless_served(dtype)
    weight = random(1, *shape).to(dtype)
    panels = HalfPanels(weight)
    assert panels.dense().equal(weight)
    outputs = torch.arange(shape[0], dtype=torch.int32).flip(0)
    assert panels.rows(outputs).equal(weight.float().flip(0))
    assert panels.rows(outputs[:1]).equal(weight.float()[-1:])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 5, 96, 97, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_panels(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    skip_unless_served(dtype)
    width, depth = shape
    weight, bias = random(rows, *shape).to(dtype), random(2, width)
    x, base = random(3, rows, depth + 3)[:, :depth], random(4, rows, width + 2)[:, :width]
    panels = HalfPanels(weight)
    expected = x.double() @ weight.double().t() + bias.double()
    with on_threads(2):
        plain = panels.product(x, padded(bias, panels))
        onto = panels.product(x, padded(bias, panels), base)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(onto.double(), expected + base.double(), rtol=1e-5, atol=1e-4)


def rounding(weight: torch.Tensor) -> HalfPanels:
    panels = HalfPanels(weight)
    panels.round_inputs()
    if not panels.rounds:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    return panels


@pytest.mark.parametrize("rows", [1, 2, 5, 96, 97, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_rounded_inputs(shape: tuple[int, int], rows: int) -> None:
    width, depth = shape
    panels = rounding(random(rows, *shape).bfloat16())
    x, base, bias = random(3, rows, depth + 3)[:, :depth], random(4, rows, width), random(2, width)
    expected = x.bfloat16().double() @ panels.dense().double().t() + bias.double() + base.double()
    with on_threads(2):
        found = panels.product(x, padded(bias, panels), base)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-4)


def test_which_inputs_are_rounded() -> None:
    """Those of bfloat16 weights alone, once somebody has asked for it, if the processor gains by it."""
    for dtype in HALVES:
        panels = HalfPanels(random(1, 64, 32).to(dtype))
        assert not panels.rounds
        panels.round_inputs()
        assert panels.rounds == (HAS_BFLOAT16_DOT and dtype == torch.bfloat16)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype, rounds: bool) -> None:
    skip_unless_served(dtype)
    panels, x = HalfPanels(random(1, 130, 77).to(dtype)), random(2, 203, 77)
    if rounds:
        panels.round_inputs()
    bias = torch.zeros(panels.count * PANEL)
    whole = panels.product(x, bias)
    for first, count in ((0, 1), (5, 1), (200, 3), (17, 90), (100, 101)):
        assert panels.product(x[first : first + count], bias).equal(whole[first : first + count])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_is_widened_exactly(dtype: torch.dtype) -> None:
    """All 65,536 but infinite ones and those that are none; the least are subnormal."""
    skip_unless_served(dtype)
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    panels = HalfPanels(numbers.view(-1, 64))
    assert panels.rows(torch.arange(panels.width, dtype=torch.int32)).equal(numbers.view(-1, 64).float())
    one = torch.eye(64)
    found = panels.product(one, torch.zeros(panels.count * PANEL))
    assert found.equal(numbers.view(-1, 64).float().t())


def test_a_weight_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        HalfPanels(torch.ones(2, 2))

"""Weights of few bits stand for what their codes, scales and offsets say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvloom.exec.quantized import GROUPS, Bits, QuantizedWeight, put_quantized, quantized
from kvloom.types.errors import ConfigError


@given(
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from(GROUPS),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_codes_stand_for_the_nearest_numbers(bits: Bits, group: int, groups: int, seed: int) -> None:
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, group * groups))).float()
    found = quantized(weight, bits, group)
    assert found.shape == (5, group * groups)
    assert found.group == group
    error = (found.dequantized() - weight).abs().view(5, groups, group)
    assert bool((error <= found.scales.float()[..., None] * 0.501).all())


def test_each_number_is_scaled_by_its_group() -> None:
    codes = torch.arange(8).to(torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).expand(2, 16, 4).reshape(2, 64)
    scales, offsets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.full((2, 2), -0.5)
    weight = QuantizedWeight(4, packed, scales, offsets)
    expected = torch.arange(8).repeat(16).float().expand(2, 128)
    assert weight.dequantized().equal(expected * scales.repeat_interleave(64, dim=1) - 0.5)


def test_a_linear_layer_computes_with_what_they_stand_for() -> None:
    linear = nn.Linear(64, 8)
    module = nn.Sequential(linear)
    weight = quantized(linear.weight.detach(), 8, 32)
    put_quantized(module, {"0": weight})
    x = torch.randn(3, 64)
    assert module(x).equal(nn.functional.linear(x, weight.dequantized(), linear.bias))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_scales_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="finite ones are right"):
        QuantizedWeight(8, torch.zeros(2, 32, dtype=torch.int8), torch.tensor([[1.0], [bad]]))


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="or a whole row are right"):
        QuantizedWeight(8, torch.zeros(2, 96, dtype=torch.int8), torch.ones(2, 2))


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 has shape \[8, 32\] in its files and \[8, 64\] in its config"):
        put_quantized(nn.Sequential(nn.Linear(64, 8)), {"0": quantized(torch.zeros(8, 32), 8, 32)})

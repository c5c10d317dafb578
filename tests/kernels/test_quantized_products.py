"""Products over weights of few bits against those with what the weights stand for, in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvloom.exec.cpu.quantized import PackedQuantizedLinear
from kvloom.exec.quantized import GROUPS, Bits, Multiples, QuantizedWeight, quantized
from kvloom.kernels.cpu.lanes.integers import HAS_VNNI

ROWS = (1, 2, 3, 4, 5, 8, 31, 33, 63, 64, 65, 66, 96)
MANY = (97, 130, 200)


def codes_of(bits: int, shape: tuple[int, int], rng: np.random.Generator) -> Tensor:
    """Random codes of the whole range of 8, 6 or 4 bits."""
    rows, columns = shape
    if bits == 4:
        return torch.from_numpy(rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8))
    most = 1 << bits - 1
    return torch.from_numpy(rng.integers(-most, most, shape).astype(np.int8))


def width_of(bits: int) -> Bits:
    return 4 if bits == 4 else 8


def weight_of(
    bits: int, shape: tuple[int, int], group: int, offsets: bool, half: bool, rng: np.random.Generator
) -> QuantizedWeight:
    """Random codes, scales of both signs and with a zero among them, and offsets."""
    rows, columns = shape
    codes = codes_of(bits, shape, rng)
    factors = torch.from_numpy(rng.normal(size=(2, rows, columns // group))).float()
    factors[0, 0, 0] = 0
    if half:
        factors = factors.half().float()
    return QuantizedWeight(width_of(bits), codes, factors[0], factors[1] * 8 if offsets else None)


def multiples_of(
    bits: int, shape: tuple[int, int], group: int, offsets: bool, rng: np.random.Generator
) -> QuantizedWeight:
    """The same with scales and offsets that are integers times what 256 numbers share."""
    rows, columns = shape

    def factors() -> Multiples:
        numbers = torch.from_numpy(rng.integers(-128, 128, (rows, columns // group)).astype(np.int8))
        return Multiples(numbers, torch.from_numpy(rng.normal(size=(rows, columns // 256))).half())

    codes = codes_of(bits, shape, rng)
    return QuantizedWeight(width_of(bits), codes, factors(), factors() if offsets else None)


def products(linear: PackedQuantizedLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """With inputs as they are, and rounded."""
    linear.exact = True
    whole = linear(x)
    linear.exact = False
    return whole, linear(x)


def rounded_inputs(x: Tensor, unit: int) -> Tensor:
    """What the inputs become: bytes with a scale for each unit."""
    units = torch.nn.functional.pad(x, (0, -x.shape[1] % unit)).view(len(x), -1, unit)
    tops = units.abs().amax(-1, keepdim=True)
    codes = (units * torch.where(tops > 0, torch.full_like(tops, 127).div(tops), 0)).round()
    found: Tensor = (codes * (tops / 127)).flatten(1)[:, : x.shape[1]]
    return found


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from((4, 6, 8)),
    group=st.sampled_from((*GROUPS, 44, 96)),
    groups=st.integers(1, 4),
    outputs=st.integers(1, 70),
    rows=st.sampled_from(ROWS + MANY),
    offsets=st.booleans(),
    half=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_are_those_with_what_codes_stand_for(
    bits: int,
    group: int,
    groups: int,
    outputs: int,
    rows: int,
    offsets: bool,
    half: bool,
    bias: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    shape = outputs, group * (groups if group in GROUPS else 1)
    weight = weight_of(bits, shape, group, offsets, half, rng)
    check_products(weight, rows, bias, rng)


@settings(deadline=None, max_examples=30)
@given(
    bits=st.sampled_from((4, 6, 8)),
    group=st.sampled_from((16, 32)),
    blocks=st.integers(1, 3),
    outputs=st.integers(1, 70),
    rows=st.sampled_from(ROWS + MANY),
    offsets=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_with_scales_that_have_common_factors(
    bits: int, group: int, blocks: int, outputs: int, rows: int, offsets: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = multiples_of(bits, (outputs, 256 * blocks), group, offsets, rng)
    check_products(weight, rows, False, rng)
    held = PackedQuantizedLinear([weight], None).panels[0]
    assert held.dequantized().equal(weight.dequantized())  # to the bit
    factors = (256 // group + 2) * (1 + offsets)
    assert held.held[0].nbytes == 32 * blocks * (256 * bits // 8 + factors)


def check_products(weight: QuantizedWeight, rows: int, bias: bool, rng: np.random.Generator) -> None:
    outputs, columns = weight.shape
    x = torch.from_numpy(rng.normal(size=(rows, columns))).float()
    added = torch.from_numpy(rng.normal(size=outputs)).float() if bias else None
    linear = PackedQuantizedLinear([weight], added)
    torch.testing.assert_close(linear.dequantized(), weight.dequantized(), rtol=1e-6, atol=1e-4)
    whole, rounded = products(linear, x)
    unit = 16 if weight.group == 16 else 32
    for found, inputs in ((whole, x), (rounded, rounded_inputs(x, unit))):
        expected = inputs.double() @ weight.dequantized().double().T + (0 if added is None else added)
        size = inputs.double().abs() @ weight.dequantized().double().abs().T
        assert found.shape == (rows, outputs)
        assert bool(((found - expected).abs() <= 1e-5 * size + 1e-3).all())


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_row_is_the_same_bits_beside_any_others(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = weight_of(bits, (96, 128), 32, bits == 4, False, np.random.default_rng(bits))
    linear = PackedQuantizedLinear([weight], None)
    x = torch.randn(150, 128, generator=generator)
    for exact, most in ((True, 96), (False, 150)):
        linear.exact = exact
        alone = torch.cat([linear(row[None]) for row in x[:most]])
        for rows in (2, 3, 64, 67, most):
            assert linear(x[:rows]).equal(alone[:rows])


def test_weights_of_several_forms_are_one_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    forms: list[tuple[int, Bits, int]] = [(40, 4, 32), (24, 4, 32), (7, 8, 16), (33, 4, 64)]
    weights = [quantized(torch.randn(n, 64, generator=generator), bits, group) for n, bits, group in forms]
    whole = torch.cat([one.dequantized() for one in weights])
    bias, x = torch.randn(len(whole), generator=generator), torch.randn(99, 64, generator=generator)
    linear = PackedQuantizedLinear(weights, bias)
    assert len(linear.panels) == 3
    torch.testing.assert_close(linear.dequantized(), whole, rtol=1e-6, atol=1e-6)
    for rows in (1, 6, 99):
        expected = torch.nn.functional.linear(x[:rows], whole, bias)
        linear.exact = True
        torch.testing.assert_close(linear(x[:rows]), expected, rtol=1e-5, atol=1e-4)
        linear.exact = False
        torch.testing.assert_close(linear(x[:rows]), expected, rtol=0.05, atol=0.5)


def test_threads_change_nothing() -> None:
    linear = PackedQuantizedLinear([quantized(torch.randn(256, 128), 4, 32)], None, exact=False)
    x, threads = torch.randn(9, 128), torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(linear(x))
    torch.set_num_threads(threads)
    assert found[0].equal(found[1])


def test_zeros_and_strange_numbers_stay_what_they_are() -> None:
    linear = PackedQuantizedLinear([quantized(torch.randn(32, 64), 8, 32)], None, exact=False)
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 40] = torch.nan, torch.inf
    found = linear(x)
    assert found[0].equal(torch.zeros(32))
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize("bits", [4, 8])
def test_one_zero_for_all_needs_no_offsets(bits: Bits) -> None:
    weight = quantized(torch.randn(32, 128), 8, 32)
    codes = weight.codes if bits == 8 else torch.randint(256, (32, 64), dtype=torch.uint8)
    scales = weight.scales.float().half().float()
    plain = PackedQuantizedLinear([QuantizedWeight(bits, codes, scales)], None)
    shifted = QuantizedWeight(bits, codes, scales, scales * -8)
    linear = PackedQuantizedLinear([shifted], None)
    assert linear.panels[0].held.nbytes == plain.panels[0].held.nbytes == 32 * 128 * bits // 8 + 32 * 4 * 2
    assert linear.dequantized().equal(shifted.dequantized())


_PATH = """
import json, sys, torch
from kvloom.exec.cpu.quantized import PackedQuantizedLinear
from kvloom.exec.quantized import QuantizedWeight, quantized
from kvloom.kernels.cpu.lanes.integers import HAS_VNNI
found = []
for bits in (8, 6, 4):
    generator = torch.Generator().manual_seed(bits)
    weight = quantized(torch.randn(48, 96, generator=generator), 4 if bits == 4 else 8, 32)
    if bits == 6:
        weight = QuantizedWeight(8, weight.codes >> 2, weight.scales)
    linear = PackedQuantizedLinear([weight], None, exact=False)
    assert linear.panels[0].bits == bits
    x = torch.randn(7, 96, generator=generator)
    found += [linear(x).tolist(), linear(x[:1]).tolist()]
print(json.dumps([HAS_VNNI, found]))
"""


def on_another_processor(**environment: str) -> tuple[bool, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PATH],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    vnni, found = json.loads(done.stdout)
    return vnni, found


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has the ordinary path alone")
def test_the_path_without_vnni_has_the_same_sums(tmp_path: Any) -> None:
    plain = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2"}
    here, expected = on_another_processor()
    there, found = on_another_processor(NUMBA_CACHE_DIR=str(tmp_path), **plain)
    assert here
    assert not there
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-6, atol=1e-6)
    assert found == expected

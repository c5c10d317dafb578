"""Products over weights of few bits, and rows rounded to FP8, in Triton's interpreter: each against its
twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom.kernels.cuda import reference
from kvloom.kernels.cuda.quantized import quantized_product, round_rows, scaled_product
from tests.kernels.cuda.fp8 import NEEDS_FP8

DTYPES = torch.float32, torch.float16


def drawn(
    bits: int, outputs: int, columns: int, groups: int, *, factors: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scales and offsets."""
    if bits == 4:
        codes = torch.randint(0, 256, (outputs, columns // 2)).to(torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, columns)).to(torch.int8)
    scales, offsets = torch.rand(outputs, groups) / 2**bits, torch.randn(outputs, groups) / 4
    return codes, scales.to(factors), offsets.to(factors)


def close(got: Tensor, wanted: Tensor) -> None:
    loose = 4e-3 if wanted.dtype == torch.float16 else 2e-5
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=loose, atol=loose * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 30, 50, 140])
def test_few_rows_and_many(rows: int, bits: int, dtype: torch.dtype) -> None:
    """Each of the shapes that tiles have, with outputs that fill no whole tile."""
    torch.manual_seed(rows)
    x, (codes, scales, offsets) = torch.randn(rows, 128).to(dtype), drawn(bits, 150, 128, 4)
    wanted = reference.quantized_product(x, codes, scales, offsets, None)
    close(quantized_product(x, codes, scales, offsets, None), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("columns", "groups"), [(48, 3), (96, 3), (192, 3), (384, 3), (64, 1), (20, 1), (200, 1), (256, 1)]
)
def test_groups(columns: int, groups: int, bits: int, dtype: torch.dtype) -> None:
    """Of 16 to 128 inputs, and whole rows; some fill no whole tile."""
    torch.manual_seed(columns)
    codes, scales, offsets = drawn(bits, 40, columns, groups, factors=torch.float32)
    for rows in (3, 70):
        x = torch.randn(rows, columns).to(dtype)
        wanted = reference.quantized_product(x, codes, scales, offsets, None)
        close(quantized_product(x, codes, scales, offsets, None), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_offsets_with_a_bias_and_of_a_part_of_wider_rows(dtype: torch.dtype) -> None:
    codes, scales, _ = drawn(4, 36, 64, 2)
    x, bias = torch.randn(5, 90).to(dtype)[:, 16:80], torch.randn(36).to(dtype)
    wanted = reference.quantized_product(x, codes, scales, None, bias)
    close(quantized_product(x, codes, scales, None, bias), wanted)
    assert quantized_product(x[:0], codes, scales, None, bias).shape == (0, 36)


@NEEDS_FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 200])
def test_codes_that_are_floats(columns: int, dtype: torch.dtype) -> None:
    codes, scales = (torch.randn(40, columns) * 9).to(torch.float8_e4m3fn), torch.rand(40, 1)
    for rows in (3, 70):
        x = torch.randn(rows, columns).to(dtype)
        wanted = reference.quantized_product(x, codes, scales, None, None)
        close(quantized_product(x, codes, scales, None, None), wanted)


@NEEDS_FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 100, 5000])
def test_rounding_rows(columns: int, dtype: torch.dtype) -> None:
    """Small ones and large ones, one of zeros, and a part of wider rows."""
    sizes = torch.tensor([[1e-3], [1.0], [0.0], [3e4], [2.0]])
    x = (torch.randn(5, columns + 7) * sizes).clamp(-6e4, 6e4).to(dtype)[:, 3 : columns + 3]
    (codes, scales), (wanted, factors) = round_rows(x), reference.round_rows(x)
    apart = (codes.float() - wanted.float()).abs()  # on a GPU, whose quotients differ in their last bit
    assert not (apart > wanted.float().abs() / 7).any()
    assert float((apart > 0).float().mean()) < 0.01
    torch.testing.assert_close(scales, factors, rtol=1e-6, atol=0)
    assert codes.float().abs().amax(-1).tolist() == [448, 448, 0, 448, 448]


@NEEDS_FP8
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_visible(strange: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = strange
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    for product in (scaled_product, reference.scaled_product):
        out = product(x, codes, torch.ones(32, 1), None)
        assert out.isfinite().all(-1).tolist() == [True, False, True]


@NEEDS_FP8
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaled_products(dtype: torch.dtype) -> None:
    """torch's own, over rows that the kernel has rounded."""
    torch.manual_seed(4)
    x, bias = torch.randn(9, 64).to(dtype), torch.randn(48).to(dtype)
    codes, scales = (torch.randn(48, 64) * 50).to(torch.float8_e4m3fn), torch.rand(48, 1) / 50
    wanted = reference.scaled_product(x, codes, scales, bias)
    loose = 1.6e-2 if dtype == torch.bfloat16 else 4e-3  # GPUs sum products of FP8 in fewer bits than 24
    torch.testing.assert_close(scaled_product(x, codes, scales, bias), wanted, rtol=loose, atol=loose)


def test_what_does_not_fit_is_refused() -> None:
    codes, scales, offsets = drawn(4, 8, 64, 2)
    x = torch.randn(3, 64)
    with pytest.raises(ValueError, match="codes: want"):
        quantized_product(x, codes[:, 1:], scales, offsets, None)
    with pytest.raises(ValueError, match="offsets: want float16 or float32"):
        quantized_product(x, codes, scales, offsets[:4], None)
    with pytest.raises(ValueError, match="scales: groups of 24 inputs"):
        quantized_product(torch.randn(3, 48), codes[:, :24].contiguous(), scales, offsets, None)

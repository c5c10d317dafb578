"""Norms, the rotary embedding and activations, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda.elementwise import add_rms_norm, gated, rms_norm, rotate

DTYPES = torch.float32, torch.float16


def close(got: Tensor, wanted: Tensor) -> None:
    loose = 2e-3 if wanted.dtype == torch.float16 else 2e-6
    torch.testing.assert_close(got, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 100), (5, 768), (40, 64), (2, 4100)])
def test_norm(rows: int, size: int, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, residual = (torch.randn(2, rows, size + 5) * 3).to(dtype)[..., :size]
    weight = torch.randn(size).to(dtype)
    close(rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))
    got, total = add_rms_norm(x, residual, weight, 1e-5, offset)
    wanted, wanted_total = reference.add_rms_norm(x, residual, weight, 1e-5, offset)
    close(got, wanted)
    assert total.equal(wanted_total)


def test_norm_of_heads_in_wider_rows() -> None:
    fused = torch.randn(7, 9, 24)
    q, weight = fused[:, 2:6], torch.randn(24)
    close(rms_norm(q, weight, 1e-6), reference.rms_norm(q, weight, 1e-6))


def test_norm_keeps_what_is_small_or_large() -> None:
    x = torch.randn(3, 64) * torch.tensor([[1e-6], [1.0], [1e6]])
    close(rms_norm(x, torch.ones(64), 1e-12), reference.rms_norm(x, torch.ones(64), 1e-12))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "size", "heads", "kv_heads"), [(16, 16, 2, 2), (80, 32, 7, 1), (12, 6, 1, 3)]
)
def test_rotate(head_dim: int, size: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    fused = torch.randn(5, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.randn(5, size + 3)[:, :size] * 9
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = fused.clone()
    for x in (wanted[:, :heads], wanted[:, heads : heads + kv_heads]):
        reference.rotate(x, cos, sin)
    rotate(fused[:, :heads], fused[:, heads : heads + kv_heads], cos, sin)
    close(fused, wanted)
    assert fused[:, heads + kv_heads :].equal(wanted[:, heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (4, 1030)])
def test_gated(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, 2 * size + 7) * 2).to(dtype)[:, : 2 * size]
    x[0, :2] = torch.tensor([-60.0, 60.0])
    close(gated(x, "silu"), reference.gated(x, "silu"))
    close(gated(x, "gelu"), reference.gated(x, "gelu"))
    close(gated(x, "gelu_tanh"), reference.gated(x, "gelu_tanh"))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match="even number of columns, gates first, got 5"):
        gated(x, "silu")
    with pytest.raises(ValueError, match="weight: want float32 \\[5\\]"):
        rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="even size up to 8"):
        rotate(x[:, None, :].repeat(1, 1, 2)[..., :8], x[:, None, :].repeat(1, 1, 2)[..., :8], x, x)

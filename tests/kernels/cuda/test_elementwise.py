"""The kernels around a layer's products, in Triton's interpreter: each against its twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda import reference as cuda_reference
from kvloom.kernels.cuda.elementwise import add_rms_norm, advance, gated, rms_norm, rotate, write_kv
from tests.kernels.paged import paged

DTYPES = torch.float32, torch.float16


def close(got: Tensor, wanted: Tensor) -> None:
    loose = 2e-3 if wanted.dtype == torch.float16 else 2e-6
    torch.testing.assert_close(got, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 100), (5, 768), (40, 64), (2, 4100)])
def test_norm(rows: int, size: int, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = (torch.randn(rows, size + 5) * 3).to(dtype)[:, :size]
    weight = torch.randn(size).to(dtype)
    close(rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 100), (5, 768), (40, 64), (2, 4100)])
def test_norm_of_a_sum(rows: int, size: int, offset: float, dtype: torch.dtype) -> None:
    """The sum is there to the last bit; it is what `rms_norm` would have been given."""
    torch.manual_seed(rows)
    wide = (torch.randn(2, rows, size + 5) * 3).to(dtype)
    residual, weight = wide[1, :, :size], torch.randn(size).to(dtype)
    before = wide.clone()
    mine, theirs = wide.clone()[0, :, :size], wide.clone()[0, :, :size]
    got = add_rms_norm(mine, residual, weight, 1e-5, offset)
    wanted = cuda_reference.add_rms_norm(theirs, residual, weight, 1e-5, offset)
    close(got, wanted)
    assert mine.equal(theirs)
    assert got.equal(rms_norm(mine, weight, 1e-5, offset))
    assert wide.equal(before)


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


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "rows"), [(16, 2, 0), (16, 2, 1), (80, 3, 40), (256, 1, 19)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_write(head_dim: int, kv_heads: int, rows: int, kind: torch.dtype) -> None:
    p = paged(rows, [rows + 5], head_dim=head_dim, kv_heads=kv_heads, waste=100, dtype=torch.float16)
    fused = torch.randn(rows, 4 * kv_heads, head_dim).to(kind)
    k, v = fused[:, : 2 * kv_heads : 2], fused[:, -kv_heads:]
    slots = torch.randperm(rows + 5)[:rows]
    tokens = p.arena.shape[2]
    slot_page, slot_offset = p.tables[0][slots // tokens], (slots % tokens).int()
    slot_page[::3] = -1
    whole = p.arena.as_strided((p.arena.shape[0], p.arena.stride(0)), (p.arena.stride(0), 1))
    before = whole.nan_to_num_().clone()
    write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    got = whole.clone()
    whole.copy_(before)
    reference.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    assert got.equal(whole)
    assert got.equal(before) == (rows <= 1)


@pytest.mark.parametrize(("batch", "rows", "page_tokens"), [(1, 1, 8), (5, 8, 3), (130, 192, 32)])
def test_advance(batch: int, rows: int, page_tokens: int) -> None:
    """Some rows go over to their next page; rows of padding stay."""
    pages = 6
    tables = torch.randperm(batch * pages).view(batch, pages).int()
    positions = torch.arange(rows) % (pages * page_tokens - 1)
    given = [
        torch.zeros(rows, dtype=torch.int64),
        positions,
        (positions + 1).int(),
        torch.full((rows,), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
    ]
    ids = torch.randint(1, 1000, (batch,))

    def after(by: object) -> list[Tensor]:
        inputs = [one.clone() for one in given]
        by(ids, *inputs, tables, page_tokens)  # type: ignore[operator]
        return inputs

    found, wanted = after(advance), after(reference.advance)
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))
    tokens, _, _, slot_page, slot_offset = found
    assert tokens[:batch].equal(ids)
    assert (slot_page[batch:] == -1).all()
    at = positions[:batch] + 1
    assert (slot_page[:batch] == tables[torch.arange(batch), at // page_tokens]).all()
    assert (slot_offset[:batch] == at % page_tokens).all()


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match="even number of columns, gates first, got 5"):
        gated(x, "silu")
    with pytest.raises(ValueError, match="weight: want float32 \\[5\\]"):
        rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="residual: want float32 \\[3, 5\\]"):
        add_rms_norm(x, torch.ones(3, 4), torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match="even size up to 8"):
        rotate(x[:, None, :].repeat(1, 1, 2)[..., :8], x[:, None, :].repeat(1, 1, 2)[..., :8], x, x)

"""K and V that the pool keeps in FP8, in Triton's interpreter: what writes them, and what attends over them,
against the twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvloom.kernels import reference
from kvloom.kernels.cuda.decode import decode_attention, workspace
from kvloom.kernels.cuda.elementwise import write_kv
from kvloom.kernels.cuda.prefill import prefill_attention
from tests.kernels.cuda.fp8 import NEEDS_FP8
from tests.kernels.paged import paged

pytestmark = NEEDS_FP8
KEPT = torch.float8_e4m3fn
DTYPES = torch.float32, torch.float16
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, 0), (80, 1, 30), (128, 7, 0)])
def test_decode(head_dim: int, group: int, window: int, dtype: torch.dtype) -> None:
    p = paged(head_dim, [0, 1, 40, 150], head_dim=head_dim, kv_heads=2, group=group, dtype=KEPT)
    q = p.queries(4).to(dtype)
    room = workspace(q, p.lengths, 2, 4, 150, window)
    out, wanted = torch.full_like(q, torch.nan), torch.empty_like(q)
    decode_attention(out, q, *p.cache, p.lengths, 0.1, window, workspace=room)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, 0.1, window)
    torch.testing.assert_close(out, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, 0), (80, 1, 30), (128, 7, 0)])
def test_prefill(head_dim: int, group: int, window: int, dtype: torch.dtype) -> None:
    p = paged(group, [75, 130, 9], head_dim=head_dim, kv_heads=1, group=group, tokens=13, dtype=KEPT)
    new = torch.tensor([75, 20, 1], dtype=torch.int32)
    begins = F.pad(new.cumsum(0), (1, 0)).int()
    q = p.queries(96).to(dtype)
    out, wanted = torch.full_like(q, torch.nan), torch.empty_like(q)
    prefill_attention(out, q, *p.cache, p.lengths - new, begins, 0.1, window)
    reference.prefill_attention(wanted, q, *p.cache, p.lengths - new, begins, 0.1, window)
    torch.testing.assert_close(out, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_rounds_and_does_not_overflow(dtype: torch.dtype) -> None:
    """What is larger than the format's largest number becomes that; what is no number stays none."""
    p = paged(3, [20], head_dim=24, kv_heads=3, dtype=KEPT)
    found, wanted = p.arena.clone(), p.arena.clone()
    k, v = (torch.randn(4, 3, 24) * torch.tensor([1e-3, 1.0, 300.0, 2e4])[:, None, None] for _ in range(2))
    v[0, 0, 0] = torch.nan
    k, v = k.to(dtype), v.to(dtype)
    pages, offsets = p.tables[0, [0, 1, 1, 0]], torch.tensor([3, 0, 7, 1], dtype=torch.int32)
    for write, arena in ((write_kv, found), (reference.write_kv, wanted)):
        write(arena, p.page_map, 1, k, v, pages, offsets)
    assert found.view(torch.uint8).equal(wanted.view(torch.uint8))
    held = found[p.page_map[pages.long(), 1].long(), 0, offsets.long()[:, None]].float()
    assert float(held.abs().max()) == 448

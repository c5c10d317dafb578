"""Writing K and V into the pool, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import reference
from kvloom.kernels.cuda.write import write_kv
from tests.kernels.cuda.paged import paged


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "rows"), [(16, 2, 0), (16, 2, 1), (80, 3, 40), (256, 1, 19)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_like_its_twin(head_dim: int, kv_heads: int, rows: int, kind: torch.dtype) -> None:
    p = paged(rows, [rows + 5], head_dim=head_dim, kv_heads=kv_heads, waste=100, dtype=torch.float16)
    fused = torch.randn(rows, 4 * kv_heads, head_dim).to(kind)
    k, v = fused[:, : 2 * kv_heads : 2], fused[:, -kv_heads:]
    slots = torch.randperm(rows + 5)[:rows]
    slot_page, slot_offset = p.tables[0][slots // 8], (slots % 8).int()
    slot_page[::3] = -1
    whole = p.arena.as_strided((p.arena.shape[0], p.arena.stride(0)), (p.arena.stride(0), 1))
    before = whole.nan_to_num_().clone()
    write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    got = whole.clone()
    whole.copy_(before)
    reference.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    assert got.equal(whole)
    assert got.equal(before) == (rows <= 1)

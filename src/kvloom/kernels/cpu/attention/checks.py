"""The check that both attention kernels make of their tensors."""

from __future__ import annotations

from torch import Tensor

from kvloom.kernels.cpu.elementwise import FLOAT, INT, check_pages
from kvloom.kernels.reference import check


def check_attention(
    out: Tensor, q: Tensor, arena: Tensor, page_map: Tensor, layer: int, tables: Tensor, batch: int
) -> int:
    """Returns the number of KV heads. Raises ValueError if out and q [N, heads, D], the pool (see
    `check_pages`) or tables [batch, pages] have another form, or query heads are no multiple of KV heads."""
    rows, heads, head_dim = q.shape
    kv_heads = check_pages(arena, page_map, layer, head_dim)
    check("q", q, rows, heads, head_dim, dtypes=FLOAT)
    check("out", out, rows, heads, head_dim, dtypes=FLOAT)
    check("tables", tables, batch, tables.shape[-1], dtypes=INT)
    if heads % kv_heads:
        raise ValueError(f"q: want a multiple of {kv_heads} heads, got {heads}")
    return kv_heads

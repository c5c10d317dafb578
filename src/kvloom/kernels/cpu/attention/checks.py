"""The checks that both attention kernels make of their tensors."""

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


def terms_of(heads: int, sinks: Tensor | None, slopes: Tensor | None) -> tuple[int, int]:
    """Returns the addresses of what scores have beside q · k, 0 for none. Raises ValueError if one is not
    float32 [heads]."""
    for name, given in (("sinks", sinks), ("slopes", slopes)):
        if given is not None:
            check(name, given, heads, dtypes=FLOAT)
    return (0 if sinks is None else sinks.data_ptr()), (0 if slopes is None else slopes.data_ptr())

"""A pool with what a job attends to, scattered over blocks, and NaN wherever nobody should look: other models
use those bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.kernels.reference import block_view, from_rows, row_width, to_rows

Cache = tuple[Tensor, Tensor, int, Tensor]


@dataclass(frozen=True)
class Paged:
    """arena [blocks, 2, T, D]; page_map [pages, layers, kv_heads]; tables [B, P]; lengths [B]. Layer 1 is in
    use. Tables are wrong where their sequence has no tokens."""

    arena: Tensor
    page_map: Tensor
    tables: Tensor
    lengths: Tensor
    group: int
    head_dim: int

    @property
    def cache(self) -> Cache:
        return self.arena, self.page_map, 1, self.tables

    @property
    def heads(self) -> int:
        return self.page_map.shape[2] * self.group

    def queries(self, rows: int) -> Tensor:
        """[rows, heads, D], a part of wider rows; float32 for an arena of 8 bits."""
        wide = torch.randn(rows, self.heads + 3, self.head_dim)
        wide = wide if self.arena.itemsize == 1 else wide.to(self.arena.dtype)
        return wide[:, 1 : 1 + self.heads]

    def dense(self, b: int) -> tuple[Tensor, Tensor]:
        """K and V [heads, length, D] of a sequence, float32, each KV head repeated for its queries."""
        length, tokens = int(self.lengths[b]), self.arena.shape[2]
        k, v = (
            torch.stack(
                [self._at(b, position // tokens)[:, part, position % tokens] for position in range(length)], 1
            )
            for part in (0, 1)
        )
        return k.repeat_interleave(self.group, 0), v.repeat_interleave(self.group, 0)

    def _at(self, b: int, page: int) -> Tensor:
        return from_rows(self.arena[self.page_map[int(self.tables[b, page]), 1].long()], self.head_dim)


def paged(
    seed: int,
    lengths: list[int],
    *,
    head_dim: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    tokens: int = 8,
    waste: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    torch.manual_seed(seed)
    token_bytes = 2 * row_width(head_dim, dtype) * dtype.itemsize
    block_bytes = -(-(tokens * token_bytes + waste) // 64) * 64
    tokens = block_bytes // token_bytes  # what is wasted may hold some more
    layers, row = 2, max(1, -(-max(lengths) // tokens))
    pages = len(lengths) * row + 1
    blocks = pages * layers * kv_heads + 3
    if dtype.is_floating_point:
        values = torch.full((blocks * block_bytes // dtype.itemsize,), torch.nan).to(dtype)
    else:  # each scale is no number
        values = torch.full((blocks * block_bytes,), -1, dtype=dtype)
    arena = block_view(values.view(torch.uint8), block_bytes, head_dim, dtype)
    tables = torch.randperm(pages)[: len(lengths) * row].view(len(lengths), row).int()
    used = (torch.tensor(lengths)[:, None] + tokens - 1) // tokens
    tables[torch.arange(row)[None] >= used] = 1 << 30
    page_map = torch.randperm(blocks)[: pages * layers * kv_heads].view(pages, layers, kv_heads).int()
    for b, length in enumerate(lengths):
        for page in range(-(-length // tokens)):
            held = page_map[int(tables[b, page]), 1].long()
            shape = kv_heads, 2, min(tokens, length - page * tokens), head_dim
            arena[held, :, : shape[2]] = to_rows(torch.randn(shape), dtype)
    return Paged(arena, page_map, tables, torch.tensor(lengths, dtype=torch.int32), group, head_dim)

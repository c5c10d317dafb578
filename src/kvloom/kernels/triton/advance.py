"""A decode step's inputs become the next one's, without the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.triton.launch import CHANGING, Launch, check

_ROWS = 128  # a program


@triton.jit(do_not_specialize=CHANGING)
def _advance(  # type: ignore[no-untyped-def]
    ids,
    tokens,
    positions,
    lengths,
    slot_page,
    slot_offset,
    tables,
    rows,
    table_row,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS sequences."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    tl.store(tokens + row, tl.load(ids + row, mask=here), mask=here)
    position = tl.load(positions + row, mask=here, other=0) + 1
    tl.store(positions + row, position, mask=here)
    tl.store(lengths + row, tl.load(lengths + row, mask=here, other=0) + 1, mask=here)
    page = tl.load(tables + row.to(tl.int64) * table_row + position // PAGE_TOKENS, mask=here)
    tl.store(slot_page + row, page, mask=here)
    tl.store(slot_offset + row, (position % PAGE_TOKENS).to(tl.int32), mask=here)


def advance_launch(
    ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
    tables: Tensor,
    page_tokens: int,
) -> Launch:
    """How `advance` is launched."""
    rows = ids.shape[0]
    check("ids", ids, rows, dtypes=(torch.int64,))
    check("tables", tables, rows, -1, dtypes=(torch.int32,))
    inputs = {
        "tokens": (tokens, torch.int64),
        "positions": (positions, torch.int64),
        "lengths": (lengths, torch.int32),
        "slot_page": (slot_page, torch.int32),
        "slot_offset": (slot_offset, torch.int32),
    }
    for name, (tensor, kind) in inputs.items():
        check(name, tensor[:rows], rows, dtypes=(kind,))
    arguments = {
        **{"ids": ids, "tables": tables, "rows": rows, "table_row": tables.stride(0)},
        **{name: tensor for name, (tensor, _) in inputs.items()},
        **{"PAGE_TOKENS": page_tokens, "ROWS": _ROWS},
    }
    return Launch(_advance, (triton.cdiv(rows, _ROWS),), arguments)


def advance(
    ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
    tables: Tensor,
    page_tokens: int,
) -> None:
    """In place: each of the first B rows appends the token that it has drawn, ids [B] int64, one position on.

    tokens, positions int64 and lengths, slot_page, slot_offset int32 have B rows or more, of which the rest,
    a graph's padding, stays; tables [B, P] int32 has the page of the new position, of page_tokens tokens.
    """
    advance_launch(ids, tokens, positions, lengths, slot_page, slot_offset, tables, page_tokens).run()

"""The memory plan of one forward, which the accounting makes once and every layer reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.types.geometry import I32, I64
from kvloom.types.transfer import PageCopies


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of the first `tokens` tokens of page `source` to page `target`, in all layers and heads."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The pages that a forward reads and writes. B sequences append N tokens in all."""

    model: str
    sequences: tuple[int, ...]  # B ids, in batch order
    appends: I64  # [B] tokens that each sequence appends; their sum is N
    starts: I64  # [B] tokens that each sequence already holds
    page_map: I32  # [pages, layers, kv_heads] blocks; the rows of these sequences do not change meanwhile
    tables: I32  # [B, P] page ids, padded with 0
    positions: I64  # [N] position of each new token in its sequence
    slot_page: I32  # [N] page to which the K and V of each new token go
    slot_offset: I32  # [N] place in that page
    copies: tuple[PageCopy, ...] = ()  # done before any layer runs (copy on write)
    sends: tuple[PageCopies, ...] = ()  # done after each layer's write
    # [pages] a number that changes with a page's row of page_map, for a holder of a copy; None: not counted
    versions: I64 | None = None
    ahead: int = 0  # tokens that `tables` has pages for in each sequence, if more than it appends

    @staticmethod
    def none(model: str, page_map: I32) -> ForwardPlan:
        """Returns the plan of a forward without sequences."""
        words, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return ForwardPlan(model, (), words, words, page_map, ids.reshape(0, 1), words, ids, ids)


@dataclass(frozen=True, slots=True)
class PageMove:
    """A copy of the first tokens[i] tokens of page home[i] to page lent[i] of a loan, in all layers and
    heads; the way back if not `out`. All arrays are [n]."""

    home: I32
    lent: I32
    tokens: I32
    out: bool


@dataclass(frozen=True, slots=True)
class OffloadedRows:
    """The rows of a decode step, after those at home, for which another unit attends."""

    plan: ForwardPlan
    """The plan over the loan's blocks; each sequence appends one token."""
    moves: tuple[PageMove, ...] = ()
    """Copies that come before the step, in this order."""

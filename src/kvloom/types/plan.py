"""One forward's memory plan: made once by the accounting, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.types.geometry import I32, I64
from kvloom.types.transfer import PlannedSend


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `tokens` tokens of page `source` to page `target`, in all layers and heads."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a forward reads and writes. B sequences append N tokens in all.

    sequences: B ids, in batch order.
    appends:   [B] tokens each appends; sum N.
    starts:    [B] tokens each already holds.
    page_map:  [pages, layers, kv_heads] blocks; the rows of these sequences' pages do not change meanwhile.
    tables:    [B, P] page ids, padded with 0.
    positions: [N] position of each new token in its sequence.
    slot_page, slot_offset: [N] where its K and V go.
    copies:    to be done before any layer runs (copy on write).
    sends:     to be done after each layer's write.
    versions:  [pages] another number after each change of a page's row of page_map, for who keeps a copy of
               it; None where nobody counts.
    ahead:     tokens of each sequence that `tables` has pages for, where that may be more than it appends.
    """

    model: str
    sequences: tuple[int, ...]
    appends: I64
    starts: I64
    page_map: I32
    tables: I32
    positions: I64
    slot_page: I32
    slot_offset: I32
    copies: tuple[PageCopy, ...] = ()
    sends: tuple[PlannedSend, ...] = ()
    versions: I64 | None = None
    ahead: int = 0

    @staticmethod
    def none(model: str, page_map: I32) -> Plan:
        """Of no sequence."""
        words, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return Plan(model, (), words, words, page_map, ids.reshape(0, 1), words, ids, ids)


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

    plan: Plan
    """The plan over the loan's blocks; each sequence appends one token."""
    moves: tuple[PageMove, ...] = ()
    """Copies that come before the step, in this order."""

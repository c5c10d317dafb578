"""Finds what the rows of a decode step share: pages of a common prefix, at the beginning of their tables, or
all pages if they are tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.types.geometry import I32, I64, Bools


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The rows of a batch in an order in which those with a common prefix are neighbours."""

    order: I32  # [B] rows of the batch
    common: I64  # [B] tokens that order[i] shares with order[i - 1], in whole pages; common[0] is 0
    joined: Bools  # [B] whether order[i] is a token of the sequence of order[i - 1]


def shared_prefixes(tables: I32, lengths: I64, page_tokens: int) -> SharedPrefixes | None:
    """Returns what rows share of tables [B, P] whose first lengths[b] tokens, rounded down to whole pages,
    nobody writes to; None if they share nothing. Rows with the same pages throughout are tokens of one
    sequence: whoever appends to a page has it to itself."""
    batch, pages = tables.shape
    if batch < 2 or len(set(tables[:, 0].tolist())) == batch:
        return None
    # Rows compared as bytes: any order of numbers does, if equal beginnings are neighbours.
    whole = np.ascontiguousarray(tables)
    order = np.argsort(whole.view(np.dtype((np.void, whole.itemsize * pages)))[:, 0])
    ranked, full = whole[order], lengths[order] // page_tokens
    unlike = ranked[1:] != ranked[:-1]
    same = np.where(unlike.any(1), unlike.argmax(1), pages)
    common = np.zeros(batch, np.int64)
    common[1:] = np.minimum(same, np.minimum(full[1:], full[:-1])) * page_tokens
    joined = np.zeros(batch, np.bool_)
    joined[1:] = ~unlike.any(1)
    if not (common.any() or joined.any()):
        return None
    return SharedPrefixes(order.astype(np.int32), common, joined)

"""Says how a decode step's rows are dealt with if some begin with the same pages: which rows go through which
tokens together.

A run is what one thread does of a KV head: rows that share a prefix, or part of them if there are many, or a
row by itself. Its segments go through its tokens in order; a segment is of neighbours that see the same pages
there, so that prefixes may branch (a tree of them, as in ChunkAttention, Ye et al. 2024, section 3).

Tokens of one sequence are rows of one run, whatever they share: each sees what those before it append, and a
run's rows append before any of them attends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from kvloom.types.geometry import I32

END: Final = -1  # of a segment that goes on to the end of its one row
MOST_QUERIES: Final = 128  # of a run's rows in one KV head: what scratch has room for in a core's cache
_LEAST_ROWS = 8  # that a run is not cut below: K and V are read as often as there are runs


@dataclass(frozen=True, slots=True)
class RowRuns:
    """The runs of a step, those of more rows first. Kernels take the addresses."""

    order: I32  # [B] rows of the batch
    runs: I32  # [R, 4] the first of its rows in `order`, their number, its first segment, the number of those
    segments: I32  # [S, 4] the first of its rows in `order`, their number, first token, end or END
    longest: int  # rows of a run at most


def row_runs(
    order: I32,
    common: ArrayLike,
    kv_heads: int,
    group: int,
    threads: int,
    joined: ArrayLike | None = None,
) -> RowRuns:
    """Returns the runs of rows order[i], each of which shares its first common[i] tokens with the one before
    it. group: query heads of a KV head. joined: whether order[i] is a token of the sequence of the one before
    it; None if none is."""
    shared, batch = np.asarray(common).tolist(), len(order)
    stays = [False] * batch if joined is None else np.asarray(joined).tolist()
    wanted = -(-batch * kv_heads // (4 * threads))  # rows of a run, so that each thread has some
    limit = max(1, min(max(wanted, _LEAST_ROWS), MOST_QUERIES // group))
    edges = [i for i in range(batch) if not shared[i] and not stays[i]] + [batch]
    spans = [cut for a, b in pairwise(edges) for cut in _cuts(a, b, limit, stays)]
    runs = list[tuple[int, int, int, int]]()
    segments = list[tuple[int, int, int, int]]()
    for first, end in sorted(spans, key=lambda span: span[0] - span[1]):
        own = list(_segments(first, end, shared))
        runs.append((first, end - first, len(segments), len(own)))
        segments += own
    return RowRuns(
        order,
        np.array(runs, np.int32),
        np.array(segments, np.int32),
        max(end - first for first, end in spans),
    )


def _cuts(first: int, end: int, limit: int, stays: list[bool]) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs of `limit` at most, all of about one size. A row that `stays` with the one before
    it makes a run longer."""
    parts, begun = -(-(end - first) // limit), first
    for part in range(1, parts + 1):
        cut = first + (end - first) * part // parts
        while cut < end and stays[cut]:
            cut += 1
        if cut > begun:
            yield begun, cut
            begun = cut


def _segments(first: int, end: int, shared: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields the segments of rows [first, end), each row's in the order of its tokens."""
    open_spans = [(first, end, 0)]
    while open_spans:
        first, end, token = open_spans.pop()
        if end - first == 1:
            yield first, 1, token, END
            continue
        until = min(shared[first + 1 : end])
        if until > token:
            yield first, end - first, token, until
        branches = [first, *(i for i in range(first + 1, end) if shared[i] == until), end]
        open_spans += [(a, b, until) for a, b in pairwise(branches)]

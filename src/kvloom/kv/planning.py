"""From sequences that have grown to the plan that their forward's layers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvloom.core.arrays import I64
from kvloom.core.plan import PageCopy, Plan
from kvloom.kv.sequences import SequenceTable


def make_plan(
    model: str,
    table: SequenceTable,
    sequences: Sequence[int],
    appends: Sequence[int],
    copies: tuple[PageCopy, ...],
    ahead: int = 0,
) -> Plan:
    """The sequences have their pages for `appends[i]` more tokens each, or for `ahead`."""
    helds = [table.held[sequence] for sequence in sequences]
    counts: I64 = np.asarray(appends, dtype=np.int64)
    starts: I64 = np.asarray([held.length for held in helds], dtype=np.int64)
    rows = np.asarray([held.row for held in helds])
    tables = table.tables[rows, : max(held.pages for held in helds)]
    firsts = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
    batch = np.repeat(np.arange(len(helds)), counts)
    edge, offset = np.divmod(positions, table.width)
    sends = tuple(
        send.planned(table.row(held), held.length, held.length + count, table.width)
        for held, count in zip(helds, appends, strict=True)
        for send in held.sends
        if send.begin < held.length + count
    )
    return Plan(
        model=model,
        sequences=tuple(sequences),
        appends=counts,
        starts=starts,
        page_map=table.pages.map,
        tables=tables,
        positions=positions,
        slot_page=tables[batch, edge],
        slot_offset=offset.astype(np.int32),
        copies=copies,
        sends=sends,
        versions=table.pages.versions,
        ahead=ahead,
    )

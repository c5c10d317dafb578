"""What a model's sequences send to peers, accounting side: what is to be put, and the pages that copies read
from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvloom.kv.sequences import MarkedSend, SequenceTable
from kvloom.types.transfer import KVAddress, PlannedSend, Shipment


class Outgoing:
    """held: pages that shipments copy from, by `hold`. Errors are as of `ModelCache`."""

    def __init__(self, table: SequenceTable) -> None:
        self.held: Counter[int] = Counter()
        self._table = table
        self._geometry = table.pages.geometry

    def planned(
        self, sequence: int, address: KVAddress, shipment: Shipment, begin: int, end: int
    ) -> PlannedSend:
        """What to put for tokens [begin, end), which are valid; `hold` keeps their pages when it is gone."""
        held = self._table.idle(sequence)
        if end > held.length:
            raise ValueError(f"cannot send up to {end}: sequence {sequence} holds {held.length} tokens")
        marked = self._marked(address, shipment, begin, end)
        held.ships = True
        return marked.planned(self._table.row(held), begin, end, self._table.width)

    def mark(self, sequence: int, address: KVAddress, shipment: Shipment, begin: int, end: int) -> None:
        """From the next forward on, each that computes some of the tokens [begin, end) plans to send those.
        They are none of the sequence's valid tokens, which `planned` is for."""
        held = self._table.idle(sequence)
        if begin < held.length:
            raise ValueError(f"tokens from {begin} on: {held.length} are computed already")
        held.sends.append(self._marked(address, shipment, begin, end))
        held.ships = True

    def hold(self, sequence: int, begin: int, end: int) -> list[int]:
        """Keep the pages of tokens [begin, end), as far as the sequence has them, until `let_go`, whatever
        becomes of it: shipments copy from them. With them those that it shipped from before it had a copy
        of its own."""
        held = self._table.idle(sequence)
        end = min(end, held.length)
        first = begin // self._table.width
        pages = self._table.page_list(held)[first : self._geometry.pages(end)] if begin < end else []
        self._table.pages.retain(pages)
        pages += held.left
        held.left = []
        self.held.update(pages)
        return pages

    def let_go(self, pages: Sequence[int]) -> None:
        """Undo `hold` for these pages."""
        if not Counter(pages) <= self.held:
            raise ValueError("a page was let go that no shipment holds")
        self.held -= Counter(pages)
        self._table.pages.release(pages)

    def _marked(self, address: KVAddress, shipment: Shipment, begin: int, end: int) -> MarkedSend:
        return MarkedSend.to(address, shipment, begin, end, model=self._table.model, geometry=self._geometry)

"""What a sequence owes a peer, page by page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core.address import KVAddress
from kvloom.core.arrays import I32
from kvloom.core.geometry import Geometry
from kvloom.core.shipment import PlannedSend, Shipment


@dataclass(frozen=True, slots=True)
class MarkedSend:
    """Tokens [begin, end) go to `targets` [pages, layers, kv_heads]: the peer's blocks for the sequence's
    pages from `first_page` on."""

    shipment: Shipment
    targets: I32
    first_page: int
    begin: int
    end: int

    @staticmethod
    def to(
        address: KVAddress, shipment: Shipment, begin: int, end: int, *, model: str, geometry: Geometry
    ) -> MarkedSend:
        """Raises ValueError where the address does not take [begin, end) of this model, and BadRequest where
        it is not whole."""
        form = address.form
        theirs = (address.model, form.layers, form.kv_heads, form.tokens_per_block)
        if theirs != (model, geometry.layers, geometry.kv_heads, geometry.tokens_per_block):
            raise ValueError(f"an address of {theirs} is none for {model}")
        if not address.begin <= begin < end <= address.end:
            raise ValueError(
                f"[{begin}, {end}) is not within the address, which takes [{address.begin}, {address.end})"
            )
        return MarkedSend(shipment, address.block_map, address.first_page, begin, end)

    def planned(self, row: I32, begin: int, end: int, tokens: int) -> PlannedSend:
        """The part of it in [begin, end). row: [pages] of the sequence; tokens: of one page."""
        begin, end = max(begin, self.begin), min(end, self.end)
        edges: I32 = np.arange(begin // tokens, -(-end // tokens), dtype=np.int32)
        starts = np.maximum(begin - edges * tokens, 0)
        stops = np.minimum(end - edges * tokens, tokens)
        targets = self.targets[edges - self.first_page]
        return PlannedSend(self.shipment, row[edges], targets, starts, stops - starts)

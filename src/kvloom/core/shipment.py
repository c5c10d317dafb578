"""Tokens on their way from one unit's arena into another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvloom.core.arrays import I32


@dataclass(frozen=True, slots=True)
class Parcel:
    """Copies of one shipment that may begin at once: for each i, tokens [offsets[i], offsets[i] + counts[i])
    of K and of V of own block own[i] into the peer's block peer[i]. All four are [n]."""

    own: I32
    peer: I32
    offsets: I32
    counts: I32


class Shipment(Protocol):
    """Tokens on their way into a peer's arena. Whoever has one awaits `arrived` or calls `abandon`."""

    def put(self, parcel: Parcel) -> None:
        """Copy this, on the transport's thread. Callable from any thread; never waits, never raises: what
        goes wrong, `arrived` tells."""

    async def arrived(self) -> None:
        """After the last `put`: wait for all copies and for what was claimed before this, and tell the
        receiver's ledger. Raises Unavailable where the peer is gone, BadRequest where its reservation is."""

    def abandon(self) -> None:
        """Copy no more, and let others claim these tokens. At most one piece is copied after it, milliseconds
        long. Without effect once `arrived` has returned."""


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """What a forward owes a shipment after each layer's write: for each i, tokens [offsets[i],
    offsets[i] + counts[i]) of our page pages[i] go to the peer's blocks targets[i].

    pages, offsets, counts: [n]; targets: [n, layers, kv_heads].
    """

    shipment: Shipment
    pages: I32
    targets: I32
    offsets: I32
    counts: I32

    def parcel(self, page_map: I32, layer: int) -> Parcel:
        """One layer's part. page_map: [pages, layers, kv_heads]."""
        return self._parcel(page_map[self.pages, layer], self.targets[:, layer])

    def whole(self, page_map: I32) -> Parcel:
        """All layers at once, for pages that are computed already."""
        heads = self.targets.shape[2]
        return self._parcel(
            page_map[self.pages].reshape(-1, heads), self.targets.reshape(-1, heads), self.targets.shape[1]
        )

    def _parcel(self, own: I32, peer: I32, layers: int = 1) -> Parcel:
        each = layers * own.shape[1]
        offsets, counts = np.repeat(self.offsets, each), np.repeat(self.counts, each)
        return Parcel(own.ravel(), peer.ravel(), offsets, counts)

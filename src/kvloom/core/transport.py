"""The KV plane as the control plane sees it: a unit's arena, written by its peers without its doing."""

from __future__ import annotations

from typing import Protocol

from kvloom.core.address import Endpoint, KVAddress, Ticket
from kvloom.core.shipment import Shipment


class Transport(Protocol):
    """One unit's end of the plane. Its methods are called on one event loop, and none of them waits."""

    @property
    def endpoint(self) -> Endpoint: ...

    # receiving

    def open(self, begin: int) -> Ticket:
        """A reservation begins, with nothing arrived past token `begin`. Raises QueueFull where there are too
        many."""

    def received(self, ticket: Ticket) -> int:
        """The position up to which everything has arrived. Raises BadRequest where the ticket is closed."""

    def close(self, ticket: Ticket) -> bool:
        """From here on no sender begins to write for this ticket, and what has not arrived never does. True:
        nobody is writing either, and its blocks may be used again. False: a sender is, for milliseconds (for
        as long as its grant where it cannot be asked); ask again."""

    # sending

    def ship(self, peer: Endpoint, address: KVAddress, begin: int, end: int) -> Shipment:
        """Claim tokens [begin, end) of the address: the next ones that nobody has claimed. Raises BadRequest
        where the address is forged, not open (any more), or another send has claimed them; Unavailable where
        the peer cannot be reached. What only the peer can tell, the shipment's `arrived` raises instead."""

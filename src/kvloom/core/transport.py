"""The KV plane as the control plane sees it: a unit's arena, written by its peers without its doing."""

from __future__ import annotations

from typing import Protocol

from kvloom.core.address import Endpoint, KVAddress, Ticket
from kvloom.core.shipment import Shipment


class Transport(Protocol):
    """One unit's end of the plane. Its methods are called on the event loop."""

    @property
    def endpoint(self) -> Endpoint: ...

    # receiving

    def open(self, begin: int) -> Ticket:
        """A reservation begins, with nothing arrived past token `begin`. Raises QueueFull where there are too
        many."""

    def received(self, ticket: Ticket) -> int:
        """The position up to which everything has arrived."""

    def close(self, ticket: Ticket) -> bool:
        """True: nobody will write for this ticket any more, and its blocks may be used again. False: a
        sender is writing right now; ask again."""

    # sending

    def ship(self, peer: Endpoint, address: KVAddress, begin: int, end: int) -> Shipment:
        """Claim tokens [begin, end) of the address. Raises BadRequest where the address is forged, not open
        (any more), or another send has claimed them; Unavailable where the peer cannot be reached."""

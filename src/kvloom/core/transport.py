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

    def open(self, begin: int, digest: int) -> Ticket:
        """A reservation begins, with nothing arrived past token `begin`, for whoever shows `digest`, that of
        its address, this endpoint and the prompt. Raises QueueFull where there are too many, Unavailable
        where nothing can arrive any more."""

    def received(self, ticket: Ticket) -> int:
        """The position up to which everything has arrived. Raises BadRequest where the ticket is closed."""

    def close(self, ticket: Ticket) -> bool:
        """From here on no sender begins to write for this ticket, and what has not arrived never does. True:
        nobody is writing either, and its blocks may be used again. False: a sender is, for milliseconds (for
        as long as its grant where it cannot be asked); ask again."""

    # sending

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Shipment:
        """Claim tokens [begin, end) of the address: the next ones that nobody has claimed. digest: of the
        address, `peer` and the prompt that is sent. Raises BadRequest where that is not the reservation's, so
        that one of them is another than at `open`, where the reservation is over, and where another send
        has claimed the tokens; Unavailable where the peer cannot be reached, or nothing can be sent any more.
        What only the peer can tell, the shipment's `arrived` raises instead; nothing is written before."""

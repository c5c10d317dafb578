"""What transports have in common whose receivers keep a ledger that senders map."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvloom.transport.ledger import Ledger
from kvloom.transport.peer import PeerProcess
from kvloom.transport.plane import Plane
from kvloom.types.errors import Unavailable
from kvloom.types.transfer import Endpoint, Ticket


class Peers:
    """Mapped once each, until the unit comes with another endpoint, is forgotten, or its process ends."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._known: dict[str, tuple[PeerProcess, asyncio.AbstractEventLoop]] = {}

    def known(self, endpoint: Endpoint) -> PeerProcess | None:
        """Raises Unavailable where it has ended."""
        known = self._known.get(endpoint.unit)
        if known is None or known[0].endpoint != endpoint:
            return None
        try:
            known[0].refuse_gone()
        except Unavailable:
            self.forget(endpoint.unit)
            raise
        return known[0]

    def add(self, peer: PeerProcess) -> None:
        unit, loop = peer.endpoint.unit, asyncio.get_running_loop()
        self.forget(unit)
        loop.add_reader(peer.process, self.forget, unit)
        self._known[unit] = peer, loop
        self._plane.greet(peer)

    def forget(self, unit: str) -> None:
        """Let go of a peer's memory, once its shipments have arrived or failed."""
        known = self._known.pop(unit, None)
        if known is not None:
            peer, loop = known
            with suppress(RuntimeError):  # the loop is closed
                loop.remove_reader(peer.process)

    def forget_all(self) -> None:
        for unit in list(self._known):
            self.forget(unit)


class FencedTransport:
    """The receiving end, and what ends it. To be used on one event loop."""

    def __init__(self, slots: int) -> None:
        self._ledger = Ledger(slots)
        self._plane = Plane()
        self._peers = Peers(self._plane)

    def open(self, begin: int, digest: int) -> Ticket:
        return self._ledger.open(begin, digest)

    def received(self, ticket: Ticket) -> int:
        return self._ledger.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        return self._ledger.close(ticket)

    def forget(self, unit: str) -> None:
        """Let go of a peer's memory, once its shipments have arrived or failed."""
        self._peers.forget(unit)

    def close_all(self) -> None:
        """Fail what has not arrived and end the thread. Peers see this unit gone when its process ends."""
        self._plane.close()
        self._peers.forget_all()
        self._ledger.release()

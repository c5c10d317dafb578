"""The KV plane on one host: the sender maps the receiver's arena and copies into it; the receiver's process
does nothing for it."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import msgspec

from kvloom.core.address import Endpoint, KVAddress, Ticket
from kvloom.core.errors import Unavailable
from kvloom.kv.arena import Arena
from kvloom.transport.ledger import Ledger
from kvloom.transport.peer import Memory, Peer, Where
from kvloom.transport.plane import Plane, ShmShipment
from kvloom.transport.room import Room


class ShmTransport:
    """Implements Transport. To be used on one event loop."""

    def __init__(self, unit: str, arena: Arena, *, slots: int = 4096) -> None:
        self._arena = arena
        self._ledger = Ledger(slots)
        where = Where(
            os.getpid(),
            Memory.of(arena.fd),
            Memory.of(self._ledger.fd),
            arena.blocks,
            arena.block_bytes,
            slots,
        )
        self._endpoint = Endpoint(unit=unit, kind="shm", where=msgspec.msgpack.encode(where))
        self._plane = Plane(arena.bytes.numpy())
        self._peers: dict[str, tuple[Peer, asyncio.AbstractEventLoop]] = {}

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def open(self, begin: int, digest: int) -> Ticket:
        return self._ledger.open(begin, digest)

    def received(self, ticket: Ticket) -> int:
        return self._ledger.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        return self._ledger.close(ticket)

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> ShmShipment:
        self._plane.refuse_over()
        reached = self._reach(peer)
        room = Room.of(address, begin, end, own=self._arena, peer=reached)
        reached.ledger.claim(address.ticket, digest, begin, end)
        return ShmShipment(self._plane, reached, room, address.ticket, begin, end)

    def forget(self, unit: str) -> None:
        """Let go of a peer's memory, once its shipments have arrived or failed."""
        known = self._peers.pop(unit, None)
        if known is not None:
            peer, loop = known
            with suppress(RuntimeError):  # the loop is closed
                loop.remove_reader(peer.process)

    def close_all(self) -> None:
        """Fail what has not arrived and end the thread. Peers see this unit gone when its process ends."""
        self._plane.close()
        for unit in list(self._peers):
            self.forget(unit)
        self._ledger.release()

    def _reach(self, endpoint: Endpoint) -> Peer:
        """Mapped once, until the unit comes with another endpoint, is forgotten, or its process ends."""
        known = self._peers.get(endpoint.unit)
        if known is not None and known[0].endpoint == endpoint:
            try:
                known[0].refuse_gone()
            except Unavailable:
                self.forget(endpoint.unit)
                raise
            return known[0]
        peer, loop = Peer(endpoint), asyncio.get_running_loop()
        self.forget(endpoint.unit)
        loop.add_reader(peer.process, self.forget, endpoint.unit)
        self._peers[endpoint.unit] = peer, loop
        self._plane.greet(peer)
        return peer

"""The KV plane on one host: the sender maps the receiver's arena and copies into it; the receiver's process
does nothing for it."""

from __future__ import annotations

import os

import msgspec

from kvloom.kv.arena import Arena
from kvloom.transport.fenced import FencedTransport
from kvloom.transport.peer import Memory, Peer, Where
from kvloom.transport.plane import ShmShipment
from kvloom.transport.room import Room
from kvloom.types.transfer import Endpoint, KVAddress


class ShmTransport(FencedTransport):
    """Implements Transport. To be used on one event loop."""

    def __init__(self, unit: str, arena: Arena, *, slots: int = 4096) -> None:
        super().__init__(slots)
        self._arena = arena
        where = Where(
            os.getpid(),
            Memory.of(arena.fd),
            Memory.of(self._ledger.fd),
            arena.blocks,
            arena.block_bytes,
            slots,
        )
        self._endpoint = Endpoint(unit=unit, kind="shm", where=msgspec.msgpack.encode(where))
        self._source = arena.bytes.numpy()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> ShmShipment:
        self._plane.refuse_over()
        reached = self._reach(peer)
        room = Room.of(address, begin, end, own=self._arena, peer=reached)
        reached.ledger.claim(address.ticket, digest, begin, end)
        return ShmShipment(self._source, self._plane, reached, room, address.ticket, begin, end)

    def _reach(self, endpoint: Endpoint) -> Peer:
        known = self._peers.known(endpoint)
        if isinstance(known, Peer):
            return known
        peer = Peer(endpoint)
        self._peers.add(peer)
        return peer

"""The KV plane between hosts, over NIXL (the extra `kvloom[cluster]`): one-sided writes, and messages for
what shared memory would tell."""

from __future__ import annotations

import time

import msgspec

from kvloom.kv.arena import Store
from kvloom.transport.agent import Agent
from kvloom.transport.grants import Grants
from kvloom.transport.nixl_plane import Clock, NixlPlane
from kvloom.transport.nixl_shipment import NixlShipment, Where
from kvloom.transport.place import Place
from kvloom.transport.room import Room
from kvloom.types.errors import BadRequest
from kvloom.types.transfer import Endpoint, KVAddress, Ticket


class NixlTransport:
    """Implements Transport. grant: seconds for which a sender may write without being heard of; the same at
    all units. That a reservation is over, or its tokens are claimed, `arrived` tells, not `ship`."""

    def __init__(
        self,
        unit: str,
        arena: Store,
        place: Place,
        *,
        slots: int = 4096,
        grant: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """place: where the arena's bytes lie. Raises ConfigError where NIXL is not installed, or cannot use
        them."""
        self._arena = arena
        self._place = place
        self._clock = clock
        address = arena.bytes.data_ptr()
        place.enter()
        agent = Agent(unit, address, arena.bytes.numel(), place)
        where = Where(agent.name, agent.metadata, place.index, address, arena.blocks, arena.block_bytes)
        self._endpoint = Endpoint(unit=unit, kind=place.kind, where=msgspec.msgpack.encode(where))
        self._grants = Grants(unit, slots, grant)
        self._plane = NixlPlane(agent, place, address, self._grants, grant, clock)
        self._agents: dict[str, str] = {}  # by unit

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def open(self, begin: int, digest: int) -> Ticket:
        self._plane.refuse_over()
        return self._grants.open(begin, digest)

    def received(self, ticket: Ticket) -> int:
        return self._grants.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        closed, letters = self._grants.close(ticket, self._clock())
        self._plane.post(letters)
        return closed

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> NixlShipment:
        self._plane.refuse_over()
        where = self._read(peer)
        room = Room.of(address, begin, end, own=self._arena, peer=where)
        if self._agents.get(peer.unit) != where.agent:
            self.forget(peer.unit)
            self._agents[peer.unit] = where.agent
        shipment = NixlShipment(
            self._plane.submit, self._place, peer, where, room, address.ticket, digest, begin, end
        )
        self._plane.start(shipment)
        return shipment

    def forget(self, unit: str) -> None:
        """Part from a unit's agent; its shipments fail."""
        agent = self._agents.pop(unit, None)
        if agent is not None:
            self._plane.part(agent)

    def close_all(self) -> None:
        """Fail what has not arrived, end the thread and leave NIXL."""
        self._plane.close()

    def _read(self, peer: Endpoint) -> Where:
        kind = self._endpoint.kind
        if peer.kind != kind:
            raise BadRequest(f"peer: {peer.unit} moves K and V by {peer.kind}, this unit by {kind}")
        try:
            return msgspec.msgpack.decode(peer.where, type=Where)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"peer: the endpoint of {peer.unit} cannot be read: {error}") from error

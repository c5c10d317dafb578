"""The KV plane between hosts, over NIXL (the extra `kvloom[cluster]`): one-sided writes, and messages for
what shared memory would tell."""

from __future__ import annotations

import time

import msgspec

from kvloom.kv.arena import ArenaMemory
from kvloom.transfer.grants import Grants
from kvloom.transfer.nixl_agent import Agent, ArenaPlace
from kvloom.transfer.nixl_plane import Clock, NixlEndpoint, NixlPlane, NixlTransfer
from kvloom.transfer.plane import address_of
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.transfer import TransferMeter


class NixlTransport:
    """Implements `Transport`. If a reservation is over, or its tokens are claimed, a transfer's `arrived`
    raises that, not `claim`."""

    def __init__(
        self,
        unit: str,
        arena: ArenaMemory,
        place: ArenaPlace,
        *,
        slots: int = 4096,
        grant: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """place: the memory of the arena's bytes. grant: seconds for which a sender may write unheard, the
        same at all units. Raises ConfigError if NIXL is not installed, or cannot use the bytes."""
        self._arena = arena
        self._place = place
        self._clock = clock
        address = arena.bytes.data_ptr()
        place.enter()
        agent = Agent(unit, address, arena.bytes.numel(), place)
        where = NixlEndpoint(
            agent.name, agent.metadata, place.index, address, arena.blocks, arena.block_bytes
        )
        self.endpoint = Endpoint(unit=unit, kind=place.kind, where=msgspec.msgpack.encode(where))
        self._grants = Grants(unit, slots, grant)
        self._plane = NixlPlane(agent, place, address, self._grants, grant, clock)
        self._agents: dict[str, str] = {}  # by unit

    @property
    def meter(self) -> TransferMeter:
        return self._plane.meter

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        self._plane.refuse_over()
        return self._grants.open(begin, digest)

    def received(self, ticket: Ticket) -> int:
        return self._grants.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        closed, letters = self._grants.close(ticket, self._clock())
        if letters:
            self._plane.order(letters)
        return closed

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> NixlTransfer:
        self._plane.refuse_over()
        where = address_of(peer, self.endpoint.kind, NixlEndpoint)
        target = WriteTarget.of(address, begin, end, own=self._arena, peer=where)
        if self._agents.get(peer.unit) != where.agent:
            self.forget(peer.unit)
            self._agents[peer.unit] = where.agent
        transfer = NixlTransfer(
            self._plane.submit, self._place, peer, where, target, address, digest, begin, end
        )
        self._plane.order(transfer)  # the peer is asked at once, before there is anything to write
        return transfer

    def forget(self, unit: str) -> None:
        """Parts from a unit's agent; its transfers fail."""
        agent = self._agents.pop(unit, None)
        if agent is not None:
            self._plane.order(agent)

    def close_all(self) -> None:
        """Fails what has not arrived, ends the thread and leaves NIXL."""
        self._plane.close()

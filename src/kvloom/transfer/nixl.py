"""The KV plane between hosts, over NIXL (the extra `cluster`): one-sided writes, and messages for
what shared memory would tell."""

from __future__ import annotations

import time
from concurrent.futures import Future

import msgspec
import numpy as np

from kvloom.kv.arena import ArenaMemory
from kvloom.transfer.grants import Grants
from kvloom.transfer.nixl_agent import Agent, ArenaPlace, NixlEndpoint, NixlProbe
from kvloom.transfer.nixl_plane import Clock, NixlPlane, NixlTransfer
from kvloom.transfer.plane import address_of
from kvloom.transfer.staging import SINK, Staging, StagingCosts
from kvloom.transfer.target import WritableBytes, WriteTarget
from kvloom.transfer.tcp_link import PEER_TIMEOUT, grow
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import I64
from kvloom.types.transfer import TransferMeter


class NixlTransport:
    """Implements `Transport`. If a reservation is over, or its tokens are claimed, a transfer's `arrived`
    raises that, not `claim`."""

    def __init__(
        self,
        unit: str,
        arena: ArenaMemory,
        place: ArenaPlace,
        host: str = "",
        *,
        slots: int = 4096,
        grant: float = 2.0,
        clock: Clock = time.monotonic,
        costs: StagingCosts | None = None,
    ) -> None:
        """place: the memory of the arena's bytes. host: the address at which peers reach this one; empty:
        NIXL offers them all that the host has. grant: seconds for which a sender may write unheard, the
        same at all units. costs: what staging is taken to save and cost with each peer; None: what `measure`
        finds, and nothing is staged before. Raises ConfigError if NIXL is not installed, or cannot use the
        bytes."""
        self._arena = arena
        self._assumed = costs
        self._staging: Staging | None = None
        self._place = place
        self._clock = clock
        address = arena.bytes.data_ptr()
        place.enter()
        memory = [(address, arena.bytes.numel())]
        if place.segment == "DRAM":  # a GPU's blocks would be gathered by a kernel of its own
            self._staging = Staging(arena.bytes.numpy(), 2 * place.piece)
            memory.append((self._staging.address, self._staging.size))
        staging = self._staging
        agent = Agent(unit, memory, place, host)
        where = NixlEndpoint(
            agent.name,
            agent.metadata,
            place.index,
            address,
            arena.blocks,
            arena.block_bytes,
            staging.address if staging else 0,
            staging.half if staging else 0,
        )
        self.endpoint = Endpoint(unit=unit, kind=place.kind, where=msgspec.msgpack.encode(where))
        self._grants = Grants(unit, slots, grant, staging)
        self._plane = NixlPlane(agent, place, address, self._grants, grant, clock, staging)
        self._agents: dict[str, str] = {}  # by unit

    @property
    def meter(self) -> TransferMeter:
        return self._plane.meter

    def open(self, begin: int, digest: int, blocks: bytes = b"", ticket: Ticket | None = None) -> Ticket:
        self._plane.refuse_over()
        return self._grants.open(begin, digest, WritableBytes(blocks, self._arena.block_bytes), ticket)

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
            if self._assumed is not None:
                self._plane.costs[where.agent] = self._assumed
        transfer = NixlTransfer(
            self._plane.submit, self._place, peer, where, target, address, digest, begin, end
        )
        self._plane.order(transfer)  # the peer is asked at once, before there is anything to write
        return transfer

    def measure(self, peer: Endpoint) -> float:
        """Finds out, too, what staging saves and costs with this peer."""
        where = address_of(peer, self.endpoint.kind, NixlEndpoint)
        rate = grow(lambda size: self._probe(where, np.full(max(1, size // SINK), min(size, SINK))))
        if self._staging is not None and self._assumed is None:
            block = min(self._arena.block_bytes, SINK // 2)
            one, many = np.array([SINK]), np.full(SINK // block, block)
            seconds = [min(self._probe(where, sizes) for _ in range(3)) for sizes in (one, many)]
            descriptor = max(0.0, seconds[1] - seconds[0]) / (len(many) - 1)
            self._plane.costs[where.agent] = StagingCosts(descriptor, self._staging.copy_seconds(block))
        return rate

    def staging_costs(self, peer: Endpoint) -> StagingCosts | None:
        """Returns what staging saves and costs with a peer, as far as that is known."""
        return self._plane.costs.get(address_of(peer, self.endpoint.kind, NixlEndpoint).agent)

    def _probe(self, where: NixlEndpoint, sizes: I64) -> float:
        """Writes descriptors of these sizes into the peer's sink, and returns the seconds. Raises
        Unavailable."""
        self._plane.refuse_over()
        done: Future[None] = Future()
        began = time.perf_counter()
        self._plane.order(NixlProbe(where, sizes, done))
        try:
            done.result(PEER_TIMEOUT)
        except TimeoutError as error:
            done.cancel()
            raise Unavailable(f"NIXL has not written to {where.agent} in {PEER_TIMEOUT:g} s") from error
        return time.perf_counter() - began

    def forget(self, unit: str) -> None:
        """Parts from a unit's agent; its transfers fail."""
        agent = self._agents.pop(unit, None)
        if agent is not None:
            self._plane.order(agent)

    def close_all(self) -> None:
        """Fails what has not arrived, ends the thread and leaves NIXL."""
        self._plane.close()

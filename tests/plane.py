"""A KV plane made of arithmetic: copies between the arenas of modelled executors, each some turns long."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvloom.core.address import Endpoint, KVAddress, Ticket, other_address
from kvloom.core.arrays import AnyArray
from kvloom.core.errors import BadRequest, KvloomError, QueueFull, Unavailable
from kvloom.core.shipment import Parcel

_SLOTS = 32


class Numbers(Protocol):
    """An arena [blocks, tokens of a block] in which one number stands for K and V of a token."""

    arena: AnyArray
    blocks: int


@dataclass
class Entry:
    """One ticket in a receiver's ledger. copying: copies for it that are under way."""

    ticket: Ticket
    digest: int
    claimed: int
    received: int
    closing: bool = False
    copying: int = 0


@dataclass
class Plane:
    """Who can be reached. Endpoints of a unit that has started anew are new ones."""

    seed: int = 0
    members: dict[bytes, ModelledTransport] = field(default_factory=dict)
    names: itertools.count[int] = field(default_factory=itertools.count)

    def join(self, unit: str, executor: Numbers) -> ModelledTransport:
        endpoint = Endpoint(unit=unit, kind="modelled", where=f"{unit}/{next(self.names)}".encode())
        member = self.members[endpoint.where] = ModelledTransport(self, endpoint, executor)
        return member

    def kill(self, member: ModelledTransport) -> None:
        del self.members[member.endpoint.where]


class ModelledTransport:
    """Satisfies `Transport`."""

    def __init__(self, plane: Plane, endpoint: Endpoint, executor: Numbers) -> None:
        self.endpoint = endpoint
        self.executor = executor
        self.plane = plane
        self.ledger: dict[int, Entry] = {}
        self.random = random.Random(f"{plane.seed}/{endpoint.where!r}")
        self._generations = itertools.count(1)

    def open(self, begin: int, digest: int) -> Ticket:
        free = [slot for slot in range(_SLOTS) if slot not in self.ledger]
        if not free:
            raise QueueFull("too many reservations")
        ticket = Ticket(free[0], next(self._generations))
        self.ledger[ticket.slot] = Entry(ticket, digest, begin, begin)
        return ticket

    def received(self, ticket: Ticket) -> int:
        return self.ledger[ticket.slot].received

    def close(self, ticket: Ticket) -> bool:
        entry = self.ledger[ticket.slot]
        assert entry.ticket == ticket, "a ticket was closed twice"
        entry.closing = True
        if entry.copying:
            return False
        del self.ledger[ticket.slot]
        return True

    def entry(self, ticket: Ticket) -> Entry:
        found = self.ledger.get(ticket.slot)
        if found is None or found.ticket != ticket or found.closing:
            raise BadRequest(f"address: the reservation at {self.endpoint.unit} is over", param="address")
        return found

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> ModelledShipment:
        target = self.plane.members.get(peer.where)
        if target is None:
            raise Unavailable(f"{peer.unit} cannot be reached")
        if address.block_map.size and int(address.block_map.max()) >= target.executor.blocks:
            raise BadRequest("address: a block is outside the peer's arena", param="address")
        entry = target.entry(address.ticket)
        if entry.digest != digest:
            raise BadRequest(other_address(peer.unit), param="address")
        if entry.claimed != begin:
            raise BadRequest(f"address: claimed up to {entry.claimed}, not {begin}", param="address")
        entry.claimed = end
        return ModelledShipment(self, target, address.ticket, begin, end)


class ModelledShipment:
    """Satisfies `Shipment`. One copy at a time, in order; a copy's content is read when it ends."""

    def __init__(
        self, source: ModelledTransport, target: ModelledTransport, ticket: Ticket, begin: int, end: int
    ) -> None:
        self._source = source
        self._target = target
        self._ticket = ticket
        self._first = begin
        self._end = end
        self._parcels: deque[Parcel] = deque()
        self._entry: Entry | None = None  # while a copy is under way
        self._error: KvloomError | None = None
        self._done = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        if self._quiet.is_set():
            self._quiet.clear()
            self._wait(self._begin)

    def _wait(self, then: Callable[[], None]) -> None:
        turns = self._source.random.randint(0, 3)
        loop = asyncio.get_running_loop()

        def step(left: int) -> None:
            if left:
                loop.call_soon(step, left - 1)
            else:
                then()

        loop.call_soon(step, turns)

    def _begin(self) -> None:
        try:
            if self._error is None:
                if self._target.endpoint.where not in self._target.plane.members:
                    raise Unavailable(f"{self._target.endpoint.unit} is gone")
                self._entry = self._target.entry(self._ticket)
                self._entry.copying += 1
        except KvloomError as error:
            self._error = error
        if self._error is not None:
            self._parcels.clear()
            self._quiet.set()
        else:
            self._wait(self._finish)

    def _finish(self) -> None:
        assert self._entry is not None
        parcel = self._parcels.popleft()
        own, peer = self._source.executor.arena, self._target.executor.arena
        rows = zip(parcel.own, parcel.peer, parcel.offsets, parcel.counts, strict=True)
        for source, target, offset, count in rows:
            peer[target, offset : offset + count] = own[source, offset : offset + count]
        self._entry.copying -= 1
        self._entry = None
        if self._parcels:
            self._wait(self._begin)
        else:
            self._quiet.set()

    async def arrived(self) -> None:
        await self._quiet.wait()
        if self._done:
            return
        if self._error is None and self._target.endpoint.where not in self._target.plane.members:
            self._error = Unavailable(f"{self._target.endpoint.unit} is gone")
        if self._error is None:
            try:
                self._target.entry(self._ticket).received = self._end
            except KvloomError as error:
                self._error = error
        if self._error is not None:
            self._give_back()
            raise self._error
        self._done = True

    def _give_back(self) -> None:
        entry = self._target.ledger.get(self._ticket.slot)
        if entry is not None and entry.ticket == self._ticket and entry.claimed == self._end:
            entry.claimed = self._first

    def abandon(self) -> None:
        if self._error is None and not self._done:
            self._error = Unavailable("the send was given up")

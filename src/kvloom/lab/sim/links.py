"""A KV plane made of links: who can reach whom, in what time, and the same fences as the real ones."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvloom.types.address import Endpoint, KVAddress, Ticket, other_address
from kvloom.types.errors import BadRequest, KvloomError, QueueFull, Unavailable
from kvloom.types.geometry import AnyArray
from kvloom.types.transfer import BlockCopies, Transfer, TransferMeter, TransferState

SLOTS: Final = 4096  # reservations that a unit may have open


class Link(Protocol):
    """A unit's way out."""

    def wait(self, size: int, then: Callable[[], None]) -> None:
        """Calls `then` when `size` bytes have gone out; 0 for what only takes its turn."""


class TimedLink:
    """Satisfies `Link` with a fixed bandwidth and latency; copies go out one after the other."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        """bandwidth: bytes a second, which all copies of the unit share. latency: seconds."""
        self._bandwidth = bandwidth
        self._latency = latency
        self._free_at = 0.0

    def wait(self, size: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if not size:
            loop.call_soon(then)
            return
        self._free_at = max(self._free_at, loop.time()) + size / self._bandwidth
        loop.call_at(self._free_at + self._latency, then)


@dataclass(slots=True)
class Entry:
    """One ticket in a receiver's ledger."""

    ticket: Ticket
    digest: int
    claimed: int
    received: int
    closing: bool = False
    copying: int = 0
    """Copies for it that are under way."""


@dataclass
class ModelledPlane:
    """The members that can be reached. Endpoints of a unit that has started anew are new ones."""

    members: dict[bytes, ModelledTransport] = field(default_factory=dict)
    link_between: Callable[[str, str], Link | None] = lambda *_: None
    """Returns the way from one unit to another, if it is not the first one's own."""
    apart: Callable[[str, str], bool] = lambda *_: False
    """Returns whether nothing goes from one unit to another now."""
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def join(
        self, unit: str, blocks: int, link: Link, *, arena: AnyArray | None = None, slots: int = SLOTS
    ) -> ModelledTransport:
        """Returns a new member. blocks: of the unit's arena. arena: [blocks, tokens of a block], one number
        for K and V of a token; None if nobody looks at what is sent."""
        endpoint = Endpoint(unit=unit, kind="modelled", where=f"{unit}/{next(self._names)}".encode())
        member = ModelledTransport(self, endpoint, blocks, link, arena, slots)
        self.members[endpoint.where] = member
        return member

    def kill(self, member: ModelledTransport) -> None:
        """Ends a member: nobody reaches it, and what it was about to write is never written."""
        del self.members[member.endpoint.where]

    def reaches(self, member: ModelledTransport) -> bool:
        return member.endpoint.where in self.members


class ModelledTransport:
    """Satisfies `Transport`."""

    def __init__(
        self,
        plane: ModelledPlane,
        endpoint: Endpoint,
        blocks: int,
        link: Link,
        arena: AnyArray | None,
        slots: int,
    ) -> None:
        self.endpoint = endpoint
        self.meter = TransferMeter()
        self.plane = plane
        self.blocks = blocks
        self.link = link
        self.arena = arena
        self.ledger: dict[int, Entry] = {}
        self._slots = range(slots)
        self._generations = itertools.count(1)

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        free = next((slot for slot in self._slots if slot not in self.ledger), None)
        if free is None:
            raise QueueFull("too many reservations")
        ticket = Ticket(free, next(self._generations))
        self.ledger[ticket.slot] = Entry(ticket, digest, begin, begin)
        return ticket

    def received(self, ticket: Ticket) -> int:
        return self.ledger[ticket.slot].received

    def close(self, ticket: Ticket) -> bool:
        entry = self.ledger[ticket.slot]
        if entry.ticket != ticket:
            raise ValueError(f"{self.endpoint.unit}: ticket {ticket} was closed before")
        entry.closing = True
        if entry.copying:
            return False
        del self.ledger[ticket.slot]
        return True

    def close_all(self) -> None:
        self.plane.kill(self)

    def entry(self, ticket: Ticket) -> Entry:
        found = self.ledger.get(ticket.slot)
        if found is None or found.ticket != ticket or found.closing:
            raise BadRequest(f"address: the reservation at {self.endpoint.unit} is over", param="address")
        return found

    def claim(
        self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int
    ) -> ModelledTransfer:
        target = self.plane.members.get(peer.where)
        if target is None:
            raise Unavailable(f"{peer.unit} cannot be reached")
        if address.block_map.size and int(address.block_map.max()) >= target.blocks:
            raise BadRequest("address: a block is outside the peer's arena", param="address")
        entry = target.entry(address.ticket)
        if entry.digest != digest:
            raise BadRequest(other_address(peer.unit), param="address")
        if entry.claimed != begin:
            raise BadRequest(f"address: claimed up to {entry.claimed}, not {begin}", param="address")
        entry.claimed = end
        return ModelledTransfer(self, target, address, begin, end)


class ModelledTransfer(Transfer):
    """Makes one copy at a time, in order; a copy's content is read when it ends."""

    def __init__(
        self, source: ModelledTransport, target: ModelledTransport, address: KVAddress, begin: int, end: int
    ) -> None:
        super().__init__(target.endpoint, address, begin, end)
        self.become(TransferState.CLAIMED)
        self._source = source
        self._target = target
        way = source.plane.link_between(source.endpoint.unit, target.endpoint.unit)
        self._link = source.link if way is None else way
        self._token_bytes = address.form.block_bytes // address.form.tokens_per_block
        self._copies: deque[BlockCopies] = deque()
        self._entry: Entry | None = None  # while a copy is under way
        self._error: KvloomError | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    def put(self, copies: BlockCopies) -> None:
        self._copies.append(copies)
        if self._quiet.is_set():
            self._quiet.clear()
            self._link.wait(0, self._begin)

    def _begin(self) -> None:
        try:
            self._check()
            self._entry = self._target.entry(self.address.ticket)
        except KvloomError as error:
            self._error = error
            self._copies.clear()
            self._quiet.set()
            return
        self._entry.copying += 1
        if self.state is TransferState.CLAIMED:
            self.become(TransferState.COPYING)
        size = int(self._copies[0].counts.sum()) * self._token_bytes
        self._link.wait(size, self._finish)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for end in (self._source, self._target):
            if not end.plane.reaches(end):
                raise Unavailable(f"{end.endpoint.unit} is gone")
        units = self._source.endpoint.unit, self._target.endpoint.unit
        if self._source.plane.apart(*units):
            raise Unavailable(f"{units[1]} does not answer")

    def _finish(self) -> None:
        assert self._entry is not None
        copies = self._copies.popleft()
        own, peer = self._source.arena, self._target.arena
        if own is not None and peer is not None and self._source.plane.reaches(self._source):
            rows = zip(copies.own, copies.peer, copies.offsets, copies.counts, strict=True)
            for source, target, offset, count in rows:
                peer[target, offset : offset + count] = own[source, offset : offset + count]
        self._entry.copying -= 1
        self._entry = None
        if self._copies:
            self._link.wait(0, self._begin)
        else:
            self._quiet.set()

    async def arrived(self) -> None:
        await self._quiet.wait()
        if self.state is TransferState.ARRIVED:
            return
        try:
            self._check()
            self._target.entry(self.address.ticket).received = self.end
        except KvloomError as error:
            self._error = error
            self._give_back()
            if not self.over:
                self.become(TransferState.FAILED)
            raise
        self.become(TransferState.ARRIVED)

    def _give_back(self) -> None:
        """Gives the claim back, unless nobody is left to do it."""
        if not self._source.plane.reaches(self._source):
            return
        entry = self._target.ledger.get(self.address.ticket.slot)
        if entry is not None and entry.ticket == self.address.ticket and entry.claimed == self.end:
            entry.claimed = self.begin

    def abandon(self) -> None:
        if self._error is None and not self.over:
            self._error = Unavailable("the send was given up")

"""Grants: the reservations of a receiver for senders that share no memory with it. They ask, and write while
granted.

The messages are what two units' transports tell each other. `number` is the sender's own name for a transfer;
the network tells whom a message is from.

A grant holds for `grant` seconds from when its sender asked and is renewed by asking again; the sender counts
from before it asked and stops by itself, the receiver counts from after it heard and adds GRACE for the piece
that was under way. So the clocks need only run alike, and a reservation whose sender is silent can be closed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from kvloom.transfer.staging import Staging, free_window
from kvloom.transfer.target import WritableBytes
from kvloom.types.address import Digest, Position, Ticket, other_address
from kvloom.types.errors import BadRequest, QueueFull

GRACE = 0.5  # seconds
_OVER = "this reservation is over"

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class WriteClaim(Struct, frozen=True, array_like=True, tag=True):
    """Asks whether tokens [begin, end) may be written."""

    number: Number
    ticket: Ticket
    digest: Digest  # of the address, peer and prompt that the sender was given
    begin: Position
    end: Position
    metadata: bytes  # how to reach the sender, as NIXL says it
    stages: bool = False  # whether it can use a window of the receiver's staging buffer


class ClaimRenewal(Struct, frozen=True, array_like=True, tag=True):
    """Asks for more time to write."""

    number: Number


class Staged(Struct, frozen=True, array_like=True, tag=True):
    """Says that half a window of the receiver's staging buffer holds what is to lie in these spans of its
    arena; it is answered by Scattered."""

    number: Number
    half: int
    spans: bytes
    """[n, 2] little-endian int64: the byte of the arena at which each begins, and its size."""


class WritesDone(Struct, frozen=True, array_like=True, tag=True):
    """Says that everything is written, and nothing more will be."""

    number: Number


class Quit(Struct, frozen=True, array_like=True, tag=True):
    """Says that nothing more will be written, and nothing counts."""

    number: Number


class Granted(Struct, frozen=True, array_like=True, tag=True):
    """Allows to write for the agreed time from when the sender asked."""

    number: Number
    window: int = -1  # of the receiver's staging buffer, which is the sender's meanwhile; -1: none


class Scattered(Struct, frozen=True, array_like=True, tag=True):
    """Says that half a window may be written anew."""

    number: Number
    half: int


class ClaimRefused(Struct, frozen=True, array_like=True, tag=True):
    """Forbids to write, or to go on writing; the sender answers with Quit."""

    number: Number
    reason: str


class Delivered(Struct, frozen=True, array_like=True, tag=True):
    """Says that everything has arrived, with all tokens before it."""

    number: Number


FromSender = WriteClaim | ClaimRenewal | Staged | WritesDone | Quit
FromReceiver = Granted | ClaimRefused | Scattered | Delivered
Message = FromSender | FromReceiver

Key = tuple[str, int]  # the sender's agent, and its number for the transfer
Letter = tuple[str, FromReceiver]  # to this agent


@dataclass(slots=True)
class _Claimed:
    """The tokens that one sender has claimed."""

    begin: int
    end: int
    until: float | None
    """When the sender has stopped for sure; None: it has said so, and all is there."""
    window: int = -1
    """Its window of the staging buffer, for as long as this claim is known."""


@dataclass(slots=True)
class _Reservation:
    digest: int
    claimed: int
    received: int
    writable: WritableBytes | None
    """None: nothing is scattered for it."""
    closing: bool = False
    sends: dict[Key, _Claimed] = field(default_factory=dict)

    def forget(self, key: Key) -> None:
        """Undoes a claim, unless another has followed."""
        gone = self.sends.pop(key)
        if self.claimed == gone.end:
            self.claimed = gone.begin

    def expire(self, now: float) -> None:
        for key in [k for k, send in self.sends.items() if send.until is not None and send.until <= now]:
            self.forget(key)

    def deliver(self) -> list[Letter]:
        """Moves `received` over what is there."""
        letters: list[Letter] = []
        while ready := [k for k, s in self.sends.items() if s.until is None and s.begin <= self.received]:
            self.received = max(self.received, self.sends.pop(ready[0]).end)
            letters.append((ready[0][0], Delivered(ready[0][1])))
        return letters


class Grants:
    """A receiver's reservations, on any thread. `now` is a monotonic clock's."""

    def __init__(self, unit: str, most: int, grant: float, staging: Staging | None = None) -> None:
        """staging: None grants no windows."""
        self._unit = unit
        self._staging = staging
        self._most = most
        self._grant = grant
        self._generation = 0
        self._open: dict[Ticket, _Reservation] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        begin: int,
        digest: int,
        writable: WritableBytes | None = None,
        ticket: Ticket | None = None,
    ) -> Ticket:
        """ticket: one that another ledger has given out; None: a new one."""
        with self._lock:
            if len(self._open) >= self._most:
                raise QueueFull(f"{self._most} reservations are open already", retry_after=1)
            self._generation += 1
            ticket = ticket or Ticket(0, self._generation)
            self._open[ticket] = _Reservation(digest, begin, begin, writable)
            return ticket

    def received(self, ticket: Ticket) -> int:
        with self._lock:
            if ticket not in self._open:
                raise BadRequest(_OVER)
            return self._open[ticket].received

    def close(self, ticket: Ticket, now: float) -> tuple[bool, list[Letter]]:
        """Returns whether it is closed, and whom to tell that it closes."""
        with self._lock:
            reservation = self._open.get(ticket)
            if reservation is None:
                return True, []
            reservation.expire(now)
            letters: list[Letter] = []
            if not reservation.closing:
                reservation.closing = True
                letters = [(agent, self._over(number)) for agent, number in reservation.sends]
            if any(send.until is not None for send in reservation.sends.values()):
                return False, letters
            del self._open[ticket]
            return True, letters

    def hear(self, agent: str, message: FromSender, now: float) -> list[Letter]:
        """Returns what to answer, to whom."""
        key = agent, message.number
        with self._lock:
            if isinstance(message, WriteClaim):
                return [(agent, self._claim(key, message, now))]
            found = next((r for r in self._open.values() if key in r.sends), None)
            if found is not None:
                return self._hear(found, key, message, now)
            return [] if isinstance(message, Quit) else [(agent, self._over(message.number))]

    def _hear(
        self,
        reservation: _Reservation,
        key: Key,
        message: ClaimRenewal | Staged | WritesDone | Quit,
        now: float,
    ) -> list[Letter]:
        match message:
            case Staged():
                return [(key[0], self._scatter(key, reservation, message, now))]
            case Quit():
                reservation.forget(key)
                return []
            case WritesDone():
                reservation.sends[key].until = None
                return [] if reservation.closing else reservation.deliver()
            case ClaimRenewal():
                return [(key[0], self._renew(key, reservation, now))]

    def _claim(self, key: Key, claim: WriteClaim, now: float) -> FromReceiver:
        reservation = self._open.get(claim.ticket)
        if reservation is None or reservation.closing:
            return self._over(claim.number)
        if reservation.digest != claim.digest:
            return ClaimRefused(claim.number, other_address(self._unit))
        reservation.expire(now)
        if reservation.claimed != claim.begin:
            return ClaimRefused(
                claim.number,
                f"begin: tokens up to {reservation.claimed} of this reservation at {self._unit} are claimed; "
                f"the next send begins there, not at {claim.begin}",
            )
        reservation.claimed = claim.end
        window = self._free_window() if claim.stages and reservation.writable is not None else -1
        reservation.sends[key] = _Claimed(claim.begin, claim.end, now + self._grant + GRACE, window)
        return Granted(claim.number, window)

    def _free_window(self) -> int:
        sends = (send for reservation in self._open.values() for send in reservation.sends.values())
        return -1 if self._staging is None else free_window({send.window for send in sends})

    def _scatter(self, key: Key, reservation: _Reservation, staged: Staged, now: float) -> FromReceiver:
        """Copies what was staged to where it belongs, under the lock: so the reservation is not closed
        meanwhile."""
        send, writable = reservation.sends[key], reservation.writable
        if reservation.closing or send.until is None or send.until <= now:
            return self._over(key[1])
        spans = np.frombuffer(staged.spans[: len(staged.spans) // 16 * 16], "<i8").astype(np.int64)
        starts, sizes = spans.reshape(-1, 2).T
        if self._staging is None or send.window < 0 or writable is None or not writable.hold(starts, sizes):
            return ClaimRefused(key[1], f"what was staged for {self._unit} is not in its blocks")
        try:
            self._staging.scatter(send.window, staged.half, starts, sizes)
        except BadRequest as error:
            return ClaimRefused(key[1], error.message)
        return Scattered(key[1], staged.half)

    def _renew(self, key: Key, reservation: _Reservation, now: float) -> FromReceiver:
        if reservation.closing:
            return self._over(key[1])
        send = reservation.sends[key]
        if send.until is not None:
            send.until = now + self._grant + GRACE
        return Granted(key[1])

    def _over(self, number: int) -> ClaimRefused:
        return ClaimRefused(number, f"the reservation at {self._unit} is over")

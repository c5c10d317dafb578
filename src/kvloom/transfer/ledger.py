"""The ledger: a receiver's reservations, in shared memory, so that senders claim, are fenced and deliver
without it.

A slot is a row of words that outlives its reservations; generations tell those apart. Two bytes of the
ledger's file stand for each slot, as ranges to lock: senders hold the first, shared, while they write into
the slot's blocks, and the second, alone, while they claim. Locks belong to an open file description
(F_OFD_SETLK), each process has its own, and the kernel drops them when it dies, however it dies. Whoever
holds the first alone knows that nobody is writing, and one that starts later sees that the generation has
ended. A sender in the middle of a claim writes into the row only: the slot waits for it, and the blocks do
not.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvloom.kv.arena import create_memfd, seal_memfd
from kvloom.types.address import Ticket, other_address
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from kvloom.types.geometry import I64

ROW_BYTES = 32
_GENERATION, _CLAIMED, _RECEIVED, _DIGEST = range(4)  # a row's words; an ended generation is negative
_TRIES = 64  # of a lock that others hold for microseconds


class Ledger:
    """The receiver's end, on one thread. It decides by its own generations and open tickets, which no
    sender can touch; senders write how far they have claimed and delivered, and nothing else."""

    def __init__(self, slots: int = 4096) -> None:
        self.slots = slots
        self.fd = create_memfd("ledger")
        os.ftruncate(self.fd, slots * ROW_BYTES)
        seal_memfd(self.fd)
        self._rows = _rows(self.fd, slots)
        self._free = deque(range(slots))
        self._generations = [0] * slots
        self._open: set[Ticket] = set()

    def open(self, begin: int, digest: int) -> Ticket:
        """Raises QueueFull if every slot is taken."""
        slot = self._free_slot()
        self._generations[slot] += 1
        ticket = Ticket(slot, self._generations[slot])
        row = self._rows[slot]
        row[_CLAIMED] = row[_RECEIVED] = begin
        row[_DIGEST] = digest
        row[_GENERATION] = ticket.generation
        self._open.add(ticket)
        return ticket

    def received(self, ticket: Ticket) -> int:
        """Raises BadRequest if the ticket is closed."""
        if ticket not in self._open:
            raise BadRequest("this reservation is over")
        return int(self._rows[ticket.slot, _RECEIVED])

    def close(self, ticket: Ticket) -> bool:
        """Lets nobody begin to write from here on. Returns whether nobody is writing either."""
        if ticket not in self._open:
            return True
        self._rows[ticket.slot, _GENERATION] = -ticket.generation
        if not self._alone(2 * ticket.slot):
            return False
        self._open.remove(ticket)
        self._free.append(ticket.slot)
        return True

    def _free_slot(self) -> int:
        """Returns a slot in whose row nobody is claiming."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if self._alone(2 * slot + 1):
                return slot
            self._free.append(slot)
        raise QueueFull(f"{self.slots} reservations are open already", retry_after=1)

    def _alone(self, byte: int) -> bool:
        """Returns whether nobody has the byte locked at this moment."""
        if not _lock(self.fd, fcntl.F_WRLCK, byte):
            return False
        _lock(self.fd, fcntl.F_UNLCK, byte)
        return True

    def release(self) -> None:
        """Gives the memory up; peers that map it keep it until they see that this process has ended."""
        os.close(self.fd)


class PeerLedger:
    """A sender's end of the ledger of `unit`. Claims may come from any thread, writing from one."""

    def __init__(self, unit: str, fd: int, slots: int) -> None:
        """fd: an open file description of this process alone; the caller closes it."""
        self._unit = unit
        self._fd = fd
        self._rows = _rows(fd, slots)
        self._mine = threading.Lock()  # one description's locks do not keep its own threads apart

    def claim(self, ticket: Ticket, digest: int, begin: int, end: int) -> None:
        """Claims tokens [begin, end), which are the caller's to send from then on. Raises BadRequest if the
        reservation is over, was opened with another digest, or these are not the next ones, Unavailable if
        others do not stop claiming."""
        with self._claiming(ticket) as row:
            self._refuse_ended(ticket)
            if row[_DIGEST] != digest:
                raise BadRequest(other_address(self._unit))
            if row[_CLAIMED] != begin:
                raise BadRequest(
                    f"begin: tokens up to {row[_CLAIMED]} of this reservation at {self._unit} are claimed; "
                    f"the next send begins there, not at {begin}"
                )
            row[_CLAIMED] = end

    def give_back(self, ticket: Ticket, begin: int, end: int) -> None:
        """Undoes a claim of which nothing will be written any more, unless another has followed."""
        with self._claiming(ticket) as row:
            if row[_GENERATION] == ticket.generation and row[_CLAIMED] == end:
                row[_CLAIMED] = begin

    def deliver(self, ticket: Ticket, begin: int, end: int) -> bool:
        """Tells that tokens [begin, end) are there. False: those before `begin` are not; ask again."""
        with self.writing(ticket):
            row = self._rows[ticket.slot]
            if row[_RECEIVED] < begin:
                return False
            row[_RECEIVED] = max(end, row[_RECEIVED])  # it is past `begin` if nothing was sent
            return True

    @contextmanager
    def writing(self, ticket: Ticket) -> Iterator[None]:
        """Keeps the ticket's blocks from becoming anything else, for milliseconds; it is not to be
        nested. Raises BadRequest if the reservation is over."""
        if not _lock(self._fd, fcntl.F_RDLCK, 2 * ticket.slot):
            raise self._ended()  # only who closes it takes the byte alone
        try:
            self._refuse_ended(ticket)
            yield
        finally:
            _lock(self._fd, fcntl.F_UNLCK, 2 * ticket.slot)

    @contextmanager
    def _claiming(self, ticket: Ticket) -> Iterator[I64]:
        self._refuse_forged(ticket)
        with self._mine:
            self._lock_claims(ticket)
            try:
                yield self._rows[ticket.slot]
            finally:
                _lock(self._fd, fcntl.F_UNLCK, 2 * ticket.slot + 1)

    def _lock_claims(self, ticket: Ticket) -> None:
        for _ in range(_TRIES):
            if _lock(self._fd, fcntl.F_WRLCK, 2 * ticket.slot + 1):
                return
            os.sched_yield()
        raise Unavailable(f"others are claiming tokens of this reservation at {self._unit}; try again")

    def _refuse_forged(self, ticket: Ticket) -> None:
        if ticket.slot >= len(self._rows):
            raise BadRequest(f"address: {self._unit} has {len(self._rows)} slots, and no slot {ticket.slot}")

    def _refuse_ended(self, ticket: Ticket) -> None:
        if self._rows[ticket.slot, _GENERATION] != ticket.generation:
            raise self._ended()

    def _ended(self) -> BadRequest:
        return BadRequest(f"the reservation at {self._unit} is over")


def _rows(fd: int, slots: int) -> I64:
    """Returns [slots, 4] words, mapped for as long as the array lives."""
    words: I64 = np.frombuffer(mmap.mmap(fd, slots * ROW_BYTES), np.int64)
    return words.reshape(slots, ROW_BYTES // 8)


def _lock(fd: int, kind: int, byte: int) -> bool:
    """Locks, or unlocks, a byte for this open file description, without waiting. Returns False if another
    holds it."""
    flock = struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
    except (BlockingIOError, PermissionError):
        return False
    return True

"""Transfers to peers of this host that keep a ledger, which senders map and whose locks fence each piece.

What is common to arenas in the host's memory (`shared_memory.py`) and on its GPUs (`cuda_ipc.py`).
"""

from __future__ import annotations

import asyncio
import os
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from queue import Empty
from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvloom.kv.arena import ArenaMemory, memfd_link
from kvloom.transfer.ledger import Ledger, PeerLedger
from kvloom.transfer.plane import PlaneTransfer, TransferWorker
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.clock import has_ended
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.transfer import BlockCopies, TransferMeter, TransferState

Count = Annotated[int, Meta(ge=0, lt=1 << 48)]

_RETRY = 0.002  # seconds until a transfer that is ahead of another asks again


class Memory(Struct, frozen=True, array_like=True):
    """A memfd by its number in its process; an inode number is never used twice while the system runs."""

    fd: Count
    device: int
    inode: int
    size: Count

    @staticmethod
    def of(fd: int) -> Memory:
        found = os.fstat(fd)
        return Memory(fd, found.st_dev, found.st_ino, found.st_size)


class PeerProcess:
    """Another process of this host and its ledger, mapped for as long as this object lives. The peer's end
    ends nothing here."""

    def __init__(
        self, endpoint: Endpoint, pid: int, ledger: Memory, slots: int, blocks: int, block_bytes: int
    ) -> None:
        """blocks, block_bytes: of its arena. Raises Unavailable for a process that is gone."""
        self.endpoint = endpoint
        self.blocks, self.block_bytes = blocks, block_bytes
        try:
            self.process = os.pidfd_open(pid)
            """A pidfd, readable once the peer has ended."""
            weakref.finalize(self, os.close, self.process)
            self.ledger = PeerLedger(endpoint.unit, self.open(pid, "ledger", ledger), slots)
        except OSError as error:
            raise self._unreached(error) from error

    def populate(self) -> bool:
        """Makes the next part of its memory ready to be copied to. False: all of it is."""
        return False

    def refuse_gone(self) -> None:
        """Raises Unavailable if the peer's process has ended."""
        if has_ended(self.process):
            raise self._gone()

    def open(self, pid: int, what: str, memory: Memory) -> int:
        """Returns an open file description of our own, which lives as long as this object, of the peer's
        memfd, and of nothing else: `pid` may have become another process', and a process may hold what
        another one made. Raises Unavailable if it is another, OSError if there is none."""
        path = f"/proc/{pid}/fd/{memory.fd}"
        if os.readlink(path) != memfd_link(what, pid):
            raise self._not_its(what, pid, memory)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        if msgspec.structs.replace(Memory.of(fd), fd=memory.fd) != memory:
            raise self._not_its(what, pid, memory)
        return fd

    def _not_its(self, what: str, pid: int, memory: Memory) -> Unavailable:
        return Unavailable(
            f"{self.endpoint.unit} is gone: descriptor {memory.fd} of process {pid} is no {what} that this "
            "process has made for this endpoint"
        )

    def _unreached(self, error: OSError) -> Unavailable:
        return Unavailable(f"{self.endpoint.unit} cannot be reached: {error.strerror}")

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self.endpoint.unit} is gone: the process of this endpoint has ended")


class FencedTransfer(PlaneTransfer):
    """A transfer whose tokens are claimed already in the ledger of `process`, the peer's."""

    PIECE: ClassVar[int]
    """Bytes that are copied between two looks at the ledger."""

    def __init__(
        self,
        plane: FencedPlane,
        process: PeerProcess,
        target: WriteTarget,
        address: KVAddress,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(plane.submit, process.endpoint, address, begin, end)
        self.process = process
        self.target = target
        self._meter = plane.meter
        self.become(TransferState.CLAIMED)

    def copy(self, copies: BlockCopies) -> None:
        """Copies in pieces, a fence before each; waits first for as long as the blocks are being computed,
        and holds no lock meanwhile."""
        try:
            if copies.after is not None:
                self._wait(copies)
            self.target.check(copies)
            rows = max(1, self.PIECE // self.target.block_bytes)
            for first in range(0, len(copies.own), rows):
                if self.failure is not None:
                    return
                self._copy(copies.part(slice(first, first + rows)))
        except KvloomError as error:
            self.fail(error)
        except (OSError, ValueError) as error:
            self.fail(self.failed(error))

    def _wait(self, copies: BlockCopies) -> None:
        try:
            assert copies.after is not None
            copies.after.wait()
        except RuntimeError as error:
            raise self.not_computed(error) from error

    def _copy(self, piece: BlockCopies) -> None:
        self.process.refuse_gone()
        with self.process.ledger.writing(self.address.ticket):
            if self.state is TransferState.CLAIMED:
                self.become(TransferState.COPYING)
            with self._meter.copying(self.target.size(piece)):
                self._write(piece)

    @abstractmethod
    def _write(self, piece: BlockCopies) -> None:
        """Copies these blocks; they are there when it returns."""

    def finish(self) -> bool:
        """Tells the ledger and the sender that nothing more is copied. Returns False if what goes before is
        still on its way."""
        failure = self.failure
        try:
            if failure is None:
                self.process.refuse_gone()
                if not self.process.ledger.deliver(self.address.ticket, self.begin, self.end):
                    return False
        except KvloomError as error:
            failure = error
        except OSError as error:
            failure = self.failed(error)
        if failure is None:
            self.settle(None)
        else:
            self.refuse(failure)
        return True

    def refuse(self, error: KvloomError) -> None:
        try:
            with suppress(KvloomError, OSError):
                self.process.ledger.give_back(self.address.ticket, self.begin, self.end)
        finally:
            super().refuse(error)

    def failed(self, error: Exception) -> Unavailable:
        return Unavailable(f"copying to {self.peer.unit} failed: {error}")


class FencedPlane(TransferWorker[PeerProcess]):
    """Makes copies in the order in which they were put, whatever transfer they are of. A peer that it is
    given is prepared for copies while there is nothing else to do."""

    def __init__(self) -> None:
        super().__init__("kv-plane")
        self._ended: list[FencedTransfer] = []  # all put, but not told: what goes before is on its way
        self._new: list[PeerProcess] = []  # not yet wholly in the page table
        self._start()

    def _step(self) -> None:
        """Does one task. No variable here holds a peer's memory while the thread waits."""
        match self._next():
            case PeerProcess() as peer:
                self._new.append(peer)
            case FencedTransfer() as transfer, None:
                self._ended.append(transfer)
            case FencedTransfer() as transfer, BlockCopies() as copies:
                transfer.copy(copies)
        for transfer in list(self._ended):
            if transfer.finish():
                self._ended.remove(transfer)

    def _next(self) -> tuple[PlaneTransfer, BlockCopies | None] | PeerProcess | None:
        """Returns the next task; None if nothing came."""
        try:
            return self._queue.get(timeout=0 if self._new else _RETRY if self._ended else None)
        except Empty:
            self._new = [peer for peer in self._new if peer.populate()]
            return None

    def _left(self) -> list[PlaneTransfer]:
        left: list[PlaneTransfer] = [*self._ended]
        self._ended, self._new = [], []
        return left


Peer = TypeVar("Peer", bound=PeerProcess)


class FencedTransport(ABC, Generic[Peer]):
    """A `Transport` whose receivers keep a ledger that senders map, on one event loop. Peers are mapped once
    each, until the unit comes with another endpoint, is forgotten, or its process ends."""

    endpoint: Endpoint

    def __init__(self, arena: ArenaMemory, slots: int) -> None:
        self._arena = arena
        self._ledger = Ledger(slots)
        self._plane = FencedPlane()
        self._peers: dict[str, tuple[Peer, asyncio.AbstractEventLoop]] = {}  # by unit

    @property
    def meter(self) -> TransferMeter:
        return self._plane.meter

    @abstractmethod
    def peer(self, endpoint: Endpoint) -> Peer:
        """Returns another unit, mapped for as long as what is returned lives. Raises BadRequest for an
        endpoint that never was one, Unavailable for one that is gone."""

    @abstractmethod
    def _transfer(
        self, peer: Peer, target: WriteTarget, address: KVAddress, begin: int, end: int
    ) -> FencedTransfer: ...

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        return self._ledger.open(begin, digest)

    def received(self, ticket: Ticket) -> int:
        return self._ledger.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        return self._ledger.close(ticket)

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> FencedTransfer:
        self._plane.refuse_over()
        reached = self._reach(peer)
        target = WriteTarget.of(address, begin, end, own=self._arena, peer=reached)
        reached.ledger.claim(address.ticket, digest, begin, end)
        return self._transfer(reached, target, address, begin, end)

    def _reach(self, endpoint: Endpoint) -> Peer:
        unit = endpoint.unit
        if unit in self._peers and self._peers[unit][0].endpoint == endpoint:
            known = self._peers[unit][0]
            try:
                known.refuse_gone()
            except Unavailable:
                self.forget(unit)
                raise
            return known
        peer, loop = self.peer(endpoint), asyncio.get_running_loop()
        self.forget(unit)
        loop.add_reader(peer.process, self.forget, unit)
        self._peers[unit] = peer, loop
        self._plane.order(peer)
        return peer

    def forget(self, unit: str) -> None:
        """Lets go of a peer's memory, once its transfers have arrived or failed."""
        known = self._peers.pop(unit, None)
        if known is not None:
            peer, loop = known
            with suppress(RuntimeError):  # the loop is closed
                loop.remove_reader(peer.process)

    def close_all(self) -> None:
        """Fails what has not arrived and ends the thread. Peers see this unit gone when its process ends."""
        self._plane.close()
        for unit in list(self._peers):
            self.forget(unit)
        self._ledger.release()

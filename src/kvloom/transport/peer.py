"""Another process of this host, its ledger and its arena, mapped into this one."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvloom.kv import arena as memfd
from kvloom.transport.ledger import ROW_BYTES, PeerLedger
from kvloom.types.clock import has_ended
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.transfer import Endpoint

Count = Annotated[int, Meta(ge=0, lt=1 << 48)]

_POPULATE_READ = 22  # MADV_POPULATE_READ (Linux 5.14): sixteen times fewer faults than by writing
_CHUNK = 16 << 20  # about a millisecond of it


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


class Where(Struct, frozen=True, array_like=True):
    """An endpoint of kind `shm`: arena is blocks × block_bytes bytes, ledger slots × ROW_BYTES."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    arena: Memory
    ledger: Memory
    blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=64, lt=1 << 31)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]


class PeerProcess:
    """Another process of this host and its ledger, mapped for as long as this object lives; the peer's end
    ends nothing here, but `process` tells of it.

    process: a pidfd, readable once the peer has ended.
    """

    def __init__(self, endpoint: Endpoint, pid: int, ledger: Memory, slots: int) -> None:
        """Raises Unavailable for a process that is gone."""
        self.endpoint = endpoint
        try:
            self.process = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self.process)
            self.ledger = PeerLedger(endpoint.unit, self.open(pid, "ledger", ledger), slots)
        except OSError as error:
            raise self._unreached(error) from error

    def populate(self) -> bool:
        """Make the next part of its memory ready to be copied to. False: all of it is."""
        return False

    def refuse_gone(self) -> None:
        """Raises Unavailable where the peer's process has ended."""
        if has_ended(self.process):
            raise self._gone()

    def open(self, pid: int, what: str, memory: Memory) -> int:
        """An open file description of our own, which lives as long as this, of the peer's memfd, and of
        nothing else: `pid` may have become another process', and a process may hold what another one made.
        Raises Unavailable where it is another, OSError where there is none."""
        path = f"/proc/{pid}/fd/{memory.fd}"
        if os.readlink(path) != memfd.link(what, pid):
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


class Peer(PeerProcess):
    """With its arena. memory: [blocks · block_bytes]."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises BadRequest for an endpoint that never was one, Unavailable for one that is gone."""
        where = _decode(endpoint)
        super().__init__(endpoint, where.pid, where.ledger, where.slots)
        self.blocks, self.block_bytes = where.blocks, where.block_bytes
        try:
            self._map = mmap.mmap(self.open(where.pid, "arena", where.arena), where.arena.size)
        except OSError as error:
            raise self._unreached(error) from error
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._populated = 0
        self.refuse_gone()

    def populate(self) -> bool:
        """Enter the next part of the arena into this process's page table, so that copies fault less. False:
        all of it is, or the system cannot."""
        if self._populated >= len(self._map):
            return False
        size = min(_CHUNK, len(self._map) - self._populated)
        try:
            self._map.madvise(_POPULATE_READ, self._populated, size)
        except OSError:
            self._populated = len(self._map)
            return False
        self._populated += size
        return True


def _decode(endpoint: Endpoint) -> Where:
    if endpoint.kind != "shm":
        raise BadRequest(f"peer: {endpoint.unit} moves K and V by {endpoint.kind}, this unit by shm")
    try:
        where = msgspec.msgpack.decode(endpoint.where, type=Where)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} cannot be read: {error}") from error
    if where.arena.size != where.blocks * where.block_bytes or where.ledger.size != where.slots * ROW_BYTES:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")
    return where

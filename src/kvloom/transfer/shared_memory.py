"""The KV plane between processes of one host: the sender maps the receiver's arena and copies into it; the
receiver's process does nothing for it."""

from __future__ import annotations

import mmap
import os
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.kv.arena import Arena
from kvloom.kv.memory import POPULATE_READ
from kvloom.transfer.fenced import FencedPlane, FencedTransfer, FencedTransport, Memory, PeerProcess
from kvloom.transfer.ledger import ROW_BYTES
from kvloom.transfer.plane import address_of
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress
from kvloom.types.errors import BadRequest
from kvloom.types.transfer import BlockCopies

PIECE = 4 << 20  # bytes copied between two looks at the ledger: a millisecond or less
_CHUNK = 16 << 20  # bytes, about a millisecond of it


class ShmEndpoint(Struct, frozen=True, array_like=True):
    """The address of an endpoint of kind `shm`. The arena has blocks × block_bytes bytes, the ledger slots ×
    ROW_BYTES."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    arena: Memory
    ledger: Memory
    blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=64, lt=1 << 31)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]


class ShmPeer(PeerProcess):
    """Another process with its arena."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises BadRequest for an endpoint that never was one, Unavailable for one that is gone."""
        where = _decode(endpoint)
        super().__init__(endpoint, where.pid, where.ledger, where.slots, where.blocks, where.block_bytes)
        try:
            self._map = mmap.mmap(self.open(where.pid, "arena", where.arena), where.arena.size)
        except OSError as error:
            raise self._unreached(error) from error
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        """[blocks · block_bytes]"""
        self._populated = 0
        self.refuse_gone()

    def populate(self) -> bool:
        """Enters the next part of the arena into this process's page table, so that copies fault less. False:
        all of it is, or the system cannot."""
        if self._populated >= len(self._map):
            return False
        size = min(_CHUNK, len(self._map) - self._populated)
        try:
            self._map.madvise(POPULATE_READ, self._populated, size)
        except OSError:
            self._populated = len(self._map)
            return False
        self._populated += size
        return True


class ShmTransfer(FencedTransfer):
    """A transfer into another process' arena."""

    PIECE: ClassVar[int] = PIECE

    def __init__(
        self,
        source: npt.NDArray[np.uint8],
        plane: FencedPlane,
        peer: ShmPeer,
        target: WriteTarget,
        address: KVAddress,
        begin: int,
        end: int,
    ) -> None:
        """source: all bytes of this unit's arena."""
        super().__init__(plane, peer, target, address, begin, end)
        self._source = source
        self._memory = peer.memory

    def _write(self, piece: BlockCopies) -> None:
        copy_blocks(
            self._source,
            self._memory,
            piece.own,
            piece.peer,
            piece.offsets,
            piece.counts,
            block_bytes=self.target.block_bytes,
            page_tokens=self.target.page_tokens,
            token_bytes=self.target.token_bytes,
        )


class ShmTransport(FencedTransport[ShmPeer]):
    """Implements `Transport`."""

    def __init__(self, unit: str, arena: Arena, *, slots: int = 4096) -> None:
        super().__init__(arena, slots)
        memory, ledger = Memory.of(arena.fd), Memory.of(self._ledger.fd)
        where = ShmEndpoint(os.getpid(), memory, ledger, arena.blocks, arena.block_bytes, slots)
        self.endpoint = Endpoint(unit=unit, kind="shm", where=msgspec.msgpack.encode(where))
        self._source = arena.bytes.numpy()

    def peer(self, endpoint: Endpoint) -> ShmPeer:
        return ShmPeer(endpoint)

    def _transfer(
        self, peer: ShmPeer, target: WriteTarget, address: KVAddress, begin: int, end: int
    ) -> ShmTransfer:
        return ShmTransfer(self._source, self._plane, peer, target, address, begin, end)


def _decode(endpoint: Endpoint) -> ShmEndpoint:
    where = address_of(endpoint, "shm", ShmEndpoint)
    if where.arena.size != where.blocks * where.block_bytes or where.ledger.size != where.slots * ROW_BYTES:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")
    return where

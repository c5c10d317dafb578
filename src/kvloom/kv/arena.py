"""The arena: the pool's bytes, in shared memory, so that a peer can write into it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvloom.kv.memory import enter_pages, whole_pages
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I32, SCALED, row_bytes


def create_memfd(what: str) -> int:
    """Returns a descriptor of an empty memory that this process alone has; it is not inherited. It is to be
    sealed (`seal_memfd`) once it has its size."""
    return os.memfd_create(_name(what, os.getpid()), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_memfd(fd: int) -> None:
    """Fixes the size, whoever else opens the memory: a peer that made it smaller would end each process that
    touches what is gone."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def memfd_link(what: str, pid: int) -> str:
    """Returns the target of the link in /proc/PID/fd for a memory named `what` that process `pid` has
    made."""
    return f"/memfd:{_name(what, pid)} (deleted)"


def _name(what: str, pid: int) -> str:
    return f"kvloom-{what}-{pid}"


class ArenaMemory(Protocol):
    """An arena, on whichever device its bytes are."""

    blocks: int
    block_bytes: int
    bytes: Tensor
    """Flat, `blocks` × `block_bytes` of them at least."""

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(slots=True)
class ArenaPart:
    """The blocks of one rank in the arena of a unit of several: those behind the blocks of the ranks before
    it."""

    blocks: int
    block_bytes: int
    bytes: Tensor
    """Flat, `blocks` × `block_bytes` of them."""

    @staticmethod
    def of(memory: Tensor, rank: int, blocks: int, block_bytes: int) -> ArenaPart:
        """memory: flat, all bytes of the arena. blocks: of each rank."""
        size = blocks * block_bytes
        return ArenaPart(blocks, block_bytes, memory[rank * size : (rank + 1) * size])

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the part as `Arena.view` does the whole."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)


class Arena:
    """`blocks` × `block_bytes` bytes of anonymous POSIX shared memory (a memfd): peers on the host map it by
    descriptor, and it vanishes with its last holder, however that one dies. The descriptor is closed when
    nobody refers to the arena any more; the bytes stay as long as a tensor of them does. A full /dev/shm does
    not touch it. The ranks of a unit have one arena together, each a part of it (`ArenaPart`), so that peers
    need to know of one memory.
    """

    def __init__(self, blocks: int, block_bytes: int, *, committed: bool = True) -> None:
        """committed: all pages have memory from the start, so that a job can never fault for want of it, and
        are entered into this process's page table (`enter_pages`). Otherwise they get memory as they are
        written, because weights have the same memory at other times."""
        self.blocks = blocks
        self.block_bytes = block_bytes
        size = blocks * block_bytes
        self.fd = create_memfd("arena")
        try:
            os.posix_fallocate(self.fd, 0, size) if committed else os.ftruncate(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise ConfigError(
                f"kv_memory: the system gives no {size:,} bytes of shared memory ({name})"
            ) from error
        weakref.finalize(self, os.close, self.fd)  # A process may have one arena after the other.
        seal_memfd(self.fd)
        self._map = mmap.mmap(self.fd, size)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if committed:
            enter_pages(self.bytes.data_ptr(), size)

    @property
    def path(self) -> str:
        """The file by which the unit's other processes map it (`map_arena`), for as long as this one
        lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def discard(self, blocks: I32) -> None:
        """Gives the memory of these blocks, which are in ascending order, back to the system, as far as they
        are whole pages of its memory."""
        edges = np.flatnonzero(np.diff(blocks) != 1) + 1
        for run in np.split(blocks, edges) if blocks.size else ():
            begin, end = whole_pages(int(run[0]) * self.block_bytes, (int(run[-1]) + 1) * self.block_bytes)
            if begin < end:
                self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the arena as one model sees it: [blocks, 2, tokens, head_dim]; see `view_blocks`."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)


def map_arena(path: str) -> Tensor:
    """Returns all bytes of the arena that another process of the unit has made. Raises OSError if that
    process has ended."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def view_blocks(memory: Tensor, block_bytes: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns flat bytes as [blocks, 2, tokens, head_dim]; 0 is K, 1 is V. Bytes at a block's end that hold
    no whole token are skipped. The last dimension of int8 is as long as a row with its scale."""
    scaled = str(dtype).removeprefix("torch.") in SCALED
    width = row_bytes(head_dim, dtype.itemsize, scaled) // dtype.itemsize
    row = block_bytes // dtype.itemsize
    blocks, tokens = memory.numel() // block_bytes, row // (2 * width)
    shape, stride = (blocks, 2, tokens, width), (row, tokens * width, width, 1)
    return memory.view(dtype).as_strided(shape, stride)

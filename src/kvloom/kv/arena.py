"""The arena: the pool's bytes, in shared memory, so that a peer can write into it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from kvloom.types.errors import ConfigError


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


class Arena:
    """`blocks` × `block_bytes` bytes of anonymous POSIX shared memory (a memfd): peers on the host map it by
    descriptor, and it vanishes with its last holder, however that one dies. A full /dev/shm does not
    touch it. All pages are committed here, so that a job can never fault for want of memory.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        size = blocks * block_bytes
        self.fd = create_memfd("arena")
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            os.close(self.fd)
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise ConfigError(
                f"kv_memory: the system gives no {size:,} bytes of shared memory ({name})"
            ) from error
        seal_memfd(self.fd)
        self._map = mmap.mmap(self.fd, size)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the arena as one model sees it: [blocks, 2, tokens, head_dim]; see `view_blocks`."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)


def view_blocks(memory: Tensor, block_bytes: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns flat bytes as [blocks, 2, tokens, head_dim]; 0 is K, 1 is V. Bytes at a block's end that hold
    no whole token are skipped."""
    blocks, tokens = memory.numel() // block_bytes, block_bytes // (2 * head_dim * dtype.itemsize)
    row = block_bytes // dtype.itemsize
    shape, stride = (blocks, 2, tokens, head_dim), (row, tokens * head_dim, head_dim, 1)
    return memory.view(dtype).as_strided(shape, stride)

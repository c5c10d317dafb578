"""The host's memory as if it were a device's."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.kv.arena import Arena
from kvloom.transfer.cuda_ipc import DeviceMemory
from kvloom.transfer.nixl_agent import HostPlace
from kvloom.transfer.target import WriteTarget
from kvloom.types.errors import Unavailable
from kvloom.types.transfer import BlockCopies, DeviceEvent


class Done:
    """A point before which all is done."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class _Shared:
    """Exported tensors lie in memory that has a descriptor here."""

    def map(self, handle: bytes) -> Tensor:
        pid, number, size = msgspec.msgpack.decode(handle, type=tuple[int, int, int])
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise Unavailable(f"the peer's arena cannot be mapped: {error}") from error
        try:
            return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        finally:
            os.close(fd)

    def mark(self) -> DeviceEvent:
        return Done()

    def copy(self, source: Tensor, target: Tensor, copies: BlockCopies, room: WriteTarget) -> None:
        lists = (copies.own, copies.peer, copies.offsets, copies.counts)
        copy_blocks(
            source.numpy(),
            target.numpy(),
            *lists,
            block_bytes=room.block_bytes,
            page_tokens=room.page_tokens,
            token_bytes=room.token_bytes,
        )


class HostMemory(_Shared):
    """Satisfies DeviceMemory for an arena in shared memory."""

    def __init__(self, arena: Arena) -> None:
        self._fd = arena.fd

    def export(self, memory: Tensor) -> bytes:
        return msgspec.msgpack.encode((os.getpid(), self._fd, memory.numel()))


class SharedMemory(_Shared):
    """Satisfies DeviceMemory for whatever tensors of this host: exported, they lie in shared memory."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, Tensor]] = {}

    def export(self, memory: Tensor) -> bytes:
        storage = memory.untyped_storage()
        storage.share_memory_()
        fd, size = storage._share_fd_cpu_()
        self._files[fd] = size, memory
        return msgspec.msgpack.encode((os.getpid(), fd, memory.numel()))


class GatedMemory:
    """Calls `passing` before each copy."""

    def __init__(self, memory: DeviceMemory, passing: Callable[[], None]) -> None:
        self._memory = memory
        self._passing = passing
        self.export, self.map, self.mark = memory.export, memory.map, memory.mark

    def copy(self, source: Tensor, target: Tensor, copies: BlockCopies, room: WriteTarget) -> None:
        self._passing()
        self._memory.copy(source, target, copies, room)


class LikeAGpu(HostPlace):
    """The host's memory for NIXL as a GPU's is: who computes says when that is done, and what comes is seen
    by the plane's own thread alone."""

    progress = False

    def mark(self) -> DeviceEvent:
        return SoonDone()


class SoonDone:
    """Not when asked for the first time."""

    def __init__(self) -> None:
        self._asked = False

    def wait(self) -> None:
        raise NotImplementedError  # over NIXL nobody waits

    def done(self) -> bool:
        asked, self._asked = self._asked, True
        return asked

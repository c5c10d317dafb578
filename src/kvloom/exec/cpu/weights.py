"""Weights that sleep: each model's lie in a file of its own, mapped at the very addresses at which they were
loaded. A model that sleeps has no page of it in memory; the system's page cache may keep some.

So a model need not know that it sleeps, and never computes anything wrong because of it: a page that is read
too early comes from the file by itself, only late.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from kvloom.kv.arena import Arena
from kvloom.kv.memory import POPULATE_READ, advise, whole_pages
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I32

_LEAST: Final = 16 << 10  # bytes of a tensor that is worth a mapping
_PART: Final = 64 << 20  # bytes that one call of `wake` reads
_FIXED: Final = 0x10  # MAP_FIXED
_DEAD_ENDS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


@dataclass(frozen=True, slots=True)
class _Span:
    """Whole pages of this process's memory."""

    address: int
    size: int


class SleepingModel:
    """One model's weights, in a file that has no name and vanishes with this process."""

    def __init__(self, roots: Sequence[object], folder: Path) -> None:
        """Moves all large tensors that can be reached from `roots` into a file in `folder`. The model is
        asleep then. Raises OSError if there is no room for it."""
        self._spans = _spans(roots)
        self.bytes = sum(span.size for span in self._spans)
        self._read = 0  # spans, from the first on
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, max(self.bytes, 1))
            offset = 0
            for span in self._spans:
                _move(span, file, offset)
                offset += span.size

    def read_part(self) -> bool:
        """Brings the next part into memory, the first layers' weights first. Returns whether that was the
        last. Raises OSError if it cannot be read."""
        left = _PART
        while self._read < len(self._spans) and left > 0:
            span = self._spans[self._read]
            _populate(span)
            self._read += 1
            left -= span.size
        return self._read == len(self._spans)

    def let_go(self) -> None:
        """Lets go of all pages."""
        self._read = 0
        for span in self._spans:
            advise(span.address, span.size, mmap.MADV_DONTNEED)


class CpuWeights:
    """The weights of a unit on cores. It satisfies `WeightMemory`."""

    def __init__(self, models: Mapping[str, SleepingModel], arena: Arena) -> None:
        self._models = models
        self._arena = arena
        self._reader = ThreadPoolExecutor(1, "weights")
        self.blocks = {name: -(-model.bytes // arena.block_bytes) for name, model in models.items()}

    def make_room(self, blocks: I32) -> None:
        self._arena.discard(blocks)

    def take_back(self, blocks: I32) -> None:
        """Does nothing: the system gives pages memory when they are written to."""

    def wake(self, model: str) -> asyncio.Future[bool]:
        return asyncio.get_running_loop().run_in_executor(self._reader, self._models[model].read_part)

    def sleep(self, model: str) -> None:
        self._models[model].let_go()

    def close(self) -> None:
        """Waits for a part that is being read, and ends the thread."""
        self._reader.shutdown()


def put_to_sleep(name: str, roots: Sequence[object], folder: Path) -> SleepingModel:
    """Returns a model's weights, which sleep from now on. Raises ConfigError if the folder has no room."""
    try:
        return SleepingModel(roots, folder)
    except OSError as error:
        raise ConfigError(
            f"sleep_dir: {folder} cannot hold the weights of {name} while they sleep ({error.strerror}); "
            "a folder on a disk with room for all models is right"
        ) from error


def _spans(roots: Sequence[object]) -> list[_Span]:
    """Returns the whole pages of all tensors that can be reached, in the order in which a model names them,
    so that those of the first layers are first."""
    found: list[_Span] = []
    taken: list[tuple[int, int]] = []
    for begin, end in _extents(roots):
        low, high = whole_pages(begin, end)
        if high - low >= _LEAST and not any(low < b and a < high for a, b in taken):
            taken.append((low, high))
            found.append(_Span(low, high - low))
    return found


def _extents(roots: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yields the addresses between which the tensors lie that can be reached from the roots."""
    seen: set[int] = set()
    stack: list[Any] = list(reversed(roots))
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, _DEAD_ENDS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.numel() and (extent := _extent(one)):
                yield extent
        elif isinstance(one, np.ndarray) and not isinstance(one.base, np.ndarray) and one.nbytes:
            yield one.ctypes.data, one.ctypes.data + one.nbytes
        # the collector visits a list from its end
        stack += reversed(one if isinstance(one, list | tuple) else gc.get_referents(one))


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the addresses between which a tensor's elements lie; None if it has no memory here."""
    if tensor.device.type != "cpu":
        return None
    if tensor.is_mkldnn:
        begin = int(torch.ops.mkldnn.data_ptr(tensor))
        return begin, begin + int(torch.ops.mkldnn._nbytes(tensor))
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _move(span: _Span, file: IO[bytes], offset: int) -> None:
    """Writes pages to the file, and maps that part of it in their place."""
    memory = memoryview((ctypes.c_char * span.size).from_address(span.address)).cast("B")
    done = 0
    while done < span.size:
        done += os.pwrite(file.fileno(), memory[done:], offset + done)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    got = libc.mmap(
        ctypes.c_void_p(span.address),
        ctypes.c_size_t(span.size),
        protection,
        flags,
        file.fileno(),
        ctypes.c_long(offset),
    )
    if got != span.address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _populate(span: _Span) -> None:
    """Maps all pages. Kernels before 5.14 do it as each page is touched."""
    try:
        advise(span.address, span.size, POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        bytes(memoryview((ctypes.c_char * span.size).from_address(span.address)).cast("B")[:: mmap.PAGESIZE])

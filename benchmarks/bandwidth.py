"""What a decode step reads of weights, and how fast this machine reads memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numba import carray
from torch import nn

from kvloom.exec.cpu.linear import HalfLinear, PackedLinear, TiedLinear
from kvloom.exec.cpu.quantized import PackedQuantizedLinear
from kvloom.exec.fuse import MergedLinearPart
from kvloom.kernels.cpu.lanes.floats import LANES, add, load, splat, store
from kvloom.kernels.cpu.memory import LINE, fetch_add, prefetch
from kvloom.kernels.cpu.parallel import kernel

_READ: Final = 1 << 30  # bytes: several times what caches hold
_PART: Final = 1 << 18  # bytes that a thread takes at once
_AHEAD: Final = 4 << 10  # bytes; nearer and farther ones are no quicker
_VECTOR: Final = LANES * 4  # bytes
_STEP: Final = 4 * max(_VECTOR, LINE)  # bytes


class _SumArguments(ctypes.Structure):
    _fields_ = [("counter", ctypes.c_int64), ("at", ctypes.c_int64), ("parts", ctypes.c_int64)]


@kernel(_SumArguments)
def _sum(arguments):  # type: ignore[no-untyped-def]
    """Adds up float32. What is read next is fetched meanwhile, without which two cores read a tenth less."""
    this = carray(arguments, 1)[0]
    s0 = s1 = s2 = s3 = splat(0.0)
    while True:
        part = fetch_add(this.counter, 1)
        if part >= this.parts:
            break
        first = this.at + part * _PART
        for step in range(first, first + _PART, _STEP):
            for line in range(0, _STEP, LINE):
                prefetch(step + _AHEAD + line)
            for at in range(step, step + _STEP, 4 * _VECTOR):
                s0, s1 = add(s0, load(at)), add(s1, load(at + _VECTOR))
                s2, s3 = add(s2, load(at + 2 * _VECTOR)), add(s3, load(at + 3 * _VECTOR))
    store(this.counter + LINE, add(add(s0, s1), add(s2, s3)))  # else nothing need be read


class MemoryReader:
    """Memory that no cache holds."""

    def __init__(self, size: int = _READ) -> None:
        self._memory = torch.ones(size // 4)
        self._space = np.zeros(4 * LINE, np.uint8)  # for the counter, and a sum beside it

    def bandwidth(self) -> float:
        """Returns how many bytes a second all threads of torch read of it: the best of three turns."""
        return max(self._turn() for _ in range(3))

    def _turn(self) -> float:
        self._space[:] = 0
        parts = self._memory.nbytes // _PART
        arguments = _SumArguments(self._space.ctypes.data, self._memory.data_ptr(), parts)
        begun = time.perf_counter()
        _sum(arguments, torch.get_num_threads())
        return parts * _PART / (time.perf_counter() - begun)


def weight_bytes(model: nn.Module) -> int:
    """Returns how many bytes of matrices a decode step reads: those of all linear layers, the head's with
    them. Of an embedding it reads a row for each request."""
    return sum(sum(_sizes(one)) for one in _products(model))


def _products(model: nn.Module) -> set[nn.Module]:
    """Returns the products, of which several layers may share one."""
    return {one.product if isinstance(one, MergedLinearPart) else one for one in model.modules()}


def _sizes(product: Any) -> Iterator[int]:
    if isinstance(product, PackedLinear):
        yield torch.ops.mkldnn._nbytes(product.packed)
    elif isinstance(product, HalfLinear):
        yield product.panels.count * product.panels.stride
    elif isinstance(product, PackedQuantizedLinear):
        yield from (one.held.nbytes for one in product.panels)
    elif isinstance(product, TiedLinear):
        yield product.weight.nbytes

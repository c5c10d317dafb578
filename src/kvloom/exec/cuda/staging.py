"""The way of a job's inputs from the host to the device: one buffer and one copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.cuda.device import GpuDevice
from kvloom.types.geometry import I32, AnyArray

_ALIGNED: Final = 64  # bytes; kernels read 16 at once
_LEAST: Final = 1 << 16
_COLUMNS: Final = 16
_KINDS: Final = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Layout:
    """Arrays side by side in `size` bytes."""

    def __init__(self, arrays: Mapping[str, AnyArray]) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self.size = 0
        for name, array in arrays.items():
            self._places[name] = self.size, array.nbytes, _KINDS[array.dtype.name], array.shape
            self.size += -(-array.nbytes // _ALIGNED) * _ALIGNED

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the arrays in `memory`, [size] bytes or more."""
        return {
            name: memory[at : at + size].view(dtype).view(shape)
            for name, (at, size, dtype, shape) in self._places.items()
        }


@dataclass(frozen=True, slots=True)
class SentInputs:
    """The inputs of a job on the device."""

    memory: Tensor  # the bytes in which the arrays lie, in the order in which they were given
    arrays: dict[str, Tensor]


class Staging:
    """The host's memory of one job at a time: it is written again only once the job has ended."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._inputs = device.pinned(_LEAST)
        self._outputs = deque(device.pinned(_LEAST) for _ in range(2))  # a step's, and the next one's

    def send(self, arrays: Mapping[str, AnyArray]) -> SentInputs:
        """Sends arrays by the current stream, in one copy."""
        layout = Layout(arrays)
        if self._inputs.numel() < layout.size:
            self._inputs = self._device.pinned(2 * layout.size)
        for name, view in layout.views(self._inputs).items():
            view.numpy()[...] = arrays[name]
        memory = torch.empty(layout.size, dtype=torch.uint8, device=self._device.torch)
        memory.copy_(self._inputs[: layout.size], non_blocking=True)
        return SentInputs(memory, layout.views(memory))

    def fetch(self, values: Tensor) -> Tensor:
        """Returns values [n] int64 in the host's memory. They are right once the current stream has done its
        work up to here, and stay until the next call but one."""
        size = values.numel() * values.itemsize
        self._outputs.rotate()
        if self._outputs[0].numel() < size:
            self._outputs[0] = self._device.pinned(2 * size)
        host = self._outputs[0][:size].view(values.dtype)
        host.copy_(values, non_blocking=True)
        return host


def padded(values: AnyArray, size: int, fill: int = 0) -> AnyArray:
    """Returns values [n, ...] with rows of `fill` up to `size`."""
    short = size - len(values)
    return (
        np.pad(values, [(0, short), *[(0, 0)] * (values.ndim - 1)], constant_values=fill) if short else values
    )


def widened(tables: I32) -> I32:
    """Returns tables [B, P], filled up with columns of 0 to a multiple of 16, or kernels would be compiled
    anew for odd rows."""
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % _COLUMNS)))


class Slot:
    """A thread for one job at a time, with memory of its own to send from and fetch to."""

    def __init__(self, number: int, device: GpuDevice) -> None:
        self.thread = ThreadPoolExecutor(1, f"gpu-job-{number}")
        self.staging = Staging(device)


class Slots:
    """The slots of one thread, as many as there have been jobs at the same time."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._every: list[Slot] = []
        self._idle: list[Slot] = []

    def take(self) -> Slot:
        if not self._idle:
            self._every.append(Slot(len(self._every), self._device))
            self._idle.append(self._every[-1])
        return self._idle.pop()

    def give_back(self, slot: Slot) -> None:
        self._idle.append(slot)

    def close(self) -> None:
        """Waits for running jobs and ends the threads."""
        for slot in self._every:
            slot.thread.shutdown()

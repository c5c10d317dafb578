"""Weights that sleep, on a GPU: each model's lie in a range of addresses of their own, which recorded graphs
hold, and give their memory to the pool while they sleep. A copy of them stays in the host's pinned memory.

A model is woken by copies of 64 MiB in a stream of their own, beside jobs of others. What a model needs at
once lies first: embeddings, norms and head, then layer after layer. So a prefill may begin when the first
chunk is there: before each layer its stream waits, on the device, for the chunks in which that one lies. A
decode step, which is recorded, waits for all of them.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from kvloom.exec.cuda.device import GpuDevice, PartitionLane, StreamEvent
from kvloom.exec.cuda.granules import GranuleArena, Granules
from kvloom.kernels.driver import DriverError
from kvloom.types.geometry import I32

CHUNK: Final = 64 << 20  # bytes; a power of two, which is what torch makes of pinned memory
_ALIGNED: Final = 512  # bytes, as torch's own allocator aligns
_AHEAD: Final = 1  # chunks that the stream has beside the one that is waited for


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor's place in the bytes of a range, and its shape there."""

    tensor: Tensor
    offset: int  # in bytes
    size: torch.Size
    stride: tuple[int, ...]

    def drop(self) -> None:
        """Lets go of the tensor's memory."""
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)

    def take(self, memory: Tensor) -> None:
        """Makes these bytes the tensor's memory, for all who hold it."""
        with torch.inference_mode(self.tensor.is_inference()):
            empty = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
            place = memory.untyped_storage(), self.offset // self.tensor.itemsize
            self.tensor.data = empty.set_(*place, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of a module's tensors in one range of bytes, each storage once."""

    forms: list[_Form]
    ends: list[int]  # up to which layer i needs the bytes, for each layer; empty if names tell of none
    size: int
    host: list[Tensor]  # the bytes, a chunk each

    @classmethod
    def of(cls, module: nn.Module, device: GpuDevice) -> _Layout:
        named = [*module.named_buffers(), *module.named_parameters()]
        ordered = sorted(((_layer(name), tensor) for name, tensor in named), key=lambda one: one[0])
        places: dict[int, int] = {}
        storages: list[tuple[int, Tensor]] = []
        forms: list[_Form] = []
        ends: dict[int, int] = {}
        size = 0
        for layer, tensor in ordered:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            if storage.data_ptr() not in places:
                places[storage.data_ptr()] = size
                storages.append((size, _flat(tensor)))
                size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
            offset = places[storage.data_ptr()] + int(tensor.storage_offset()) * tensor.itemsize
            forms.append(_Form(tensor, offset, tensor.shape, tensor.stride()))
            ends[layer] = size
        ends.pop(-1, None)
        counted = list(ends) == list(range(len(ends)))
        host = [device.pinned(min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
        for at, flat in storages:
            _spread(flat, at, host)
        return cls(forms, list(ends.values()) if counted else [], size, host)


def _layer(name: str) -> int:
    """Returns the layer whose weight has this name; −1 for a weight that is in no layer, and may be needed at
    once."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _flat(tensor: Tensor) -> Tensor:
    """Returns all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _spread(source: Tensor, at: int, host: Sequence[Tensor]) -> None:
    """Copies bytes to their places, from `at` on, in chunks of the host."""
    done = 0
    while done < source.numel():
        number, begin = divmod(at + done, CHUNK)
        size = min(source.numel() - done, CHUNK - begin)
        host[number][begin : begin + size].copy_(source[done : done + size])
        done += size


class SleepingWeights:
    """One model's weights. They are asleep at first."""

    def __init__(self, module: nn.Module, granules: Granules, device: GpuDevice) -> None:
        """Moves all parameters and buffers to the host, and lets go of the memory that torch has for them.
        Raises ConfigError if the device cannot map memory for them."""
        layout = _Layout.of(module, device)
        self.granules: Final = max(1, -(-layout.size // granules.size))
        self._host = layout.host
        self._ends = layout.ends
        self._stock = granules
        self._lane = device.beside()
        for form in layout.forms:
            form.drop()
        device.trim()
        self._range = granules.reserve(self.granules)
        with granules.lent(self._range) as memory:
            self._bytes = memory
        for form in layout.forms:
            form.take(self._bytes)
        self._marks: list[StreamEvent] = []  # of the chunks that the stream was asked for
        self._there = 0  # chunks
        self._lock = threading.Lock()

    @property
    def is_there(self) -> bool:
        """True while all weights are in memory."""
        return self._there == len(self._host)

    def read_part(self) -> bool:
        """Waits until the next chunk is there. Returns whether that was the last. Raises OSError, with the
        weights asleep, if there is no memory for them."""
        with self._lock:
            if self.is_there:
                return True
            if not self._range.is_held:
                self._stock.supply(self._range, range(self.granules))
            self._ask(min(self._there + 1 + _AHEAD, len(self._host)))
            mark = self._marks[self._there]
        mark.wait()
        with self._lock:
            self._there += 1
            return self.is_there

    def follow(self, lane: PartitionLane, layer: int | None = None) -> None:
        """Lets later work of the lane wait, on the device, for the weights up to and with a layer's, or for
        all. It is called when the first part has been read."""
        if self.is_there:
            return
        with self._lock:
            self._ask(len(self._host))  # all: who reads the parts may stop while this job runs
            known = layer is not None and layer < len(self._ends)
            end = self._ends[layer] if known and layer is not None else len(self._host) * CHUNK
            lane.stream.follow(self._marks[-(-end // CHUNK) - 1])

    def let_go(self) -> None:
        """Gives the memory up, after copies that were asked for. No job of the model runs."""
        with self._lock:
            if self._marks:
                self._marks[-1].wait()
            self._marks.clear()
            self._there = 0
            if self._range.is_held:
                self._stock.withdraw(self._range, range(self.granules))

    def _ask(self, count: int) -> None:
        """Asks the stream for the first `count` chunks, as far as it was not asked yet."""
        with self._lane.entered():
            for i in range(len(self._marks), count):
                host = self._host[i]
                self._bytes[i * CHUNK :][: host.numel()].copy_(host, non_blocking=True)
                self._marks.append(self._lane.mark())


class GpuWeights:
    """The weights of a unit on a GPU. It satisfies `WeightMemory`, as long as blocks are given and taken by
    whole granules."""

    def __init__(self, models: Mapping[str, SleepingWeights], arena: GranuleArena, device: GpuDevice) -> None:
        self._models = models
        self._arena = arena
        self._device = device
        self._reader = ThreadPoolExecutor(1, "weights", device.enter)
        self.blocks = {name: model.granules * arena.per_granule for name, model in models.items()}

    def make_room(self, blocks: I32) -> None:
        self._arena.discard(blocks)

    def take_back(self, blocks: I32) -> None:
        self._arena.restore(blocks)

    def wake(self, model: str) -> asyncio.Future[bool]:
        return asyncio.get_running_loop().run_in_executor(self._reader, self._models[model].read_part)

    def sleep(self, model: str) -> None:
        self._models[model].let_go()

    def follow(self, model: str, lane: PartitionLane, layer: int | None = None) -> None:
        """Lets a lane wait for a model's weights; see `SleepingWeights.follow`."""
        self._models[model].follow(lane, layer)

    @contextmanager
    def awake(self, model: str) -> Iterator[None]:
        """A context in which a model's weights are in memory, in the place of the pool's last blocks, before
        there are jobs."""
        blocks = np.arange(self._arena.blocks - self.blocks[model], self._arena.blocks, dtype=np.int32)
        self.make_room(blocks)
        while not self._models[model].read_part():
            pass
        yield
        self._device.settle()
        self.sleep(model)
        self.take_back(blocks)

    def close(self) -> None:
        """Waits for a part that is being read, ends the thread, and gives all memory back, the pool's too."""
        self._reader.shutdown()
        with suppress(DriverError, RuntimeError):  # a device that has failed; its process is ending
            self._device.settle()
            self._arena.close()

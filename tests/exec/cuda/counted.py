"""A device whose memory is counted tensor by tensor: the CPU, or no device at all, whose tensors have shapes
alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvloom.exec.cuda.device import GpuDevice, HostStream, PartitionLane, Partitions
from tests.exec.cuda.devices import COMPUTE

_aten: Any = torch.ops.aten


@dataclass
class MemoryCount:
    """The bytes of the device's tensors, on all threads that are watched. It says that memory is out where
    they would be more than `total`."""

    total: int = 1 << 62
    live: int = 0
    peak: int = 0
    """The most that were live since `trim`: what an allocator keeps."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _here: threading.local = field(default_factory=threading.local)

    def add(self, size: int) -> None:
        with self._lock:
            if self.live + size > self.total:
                raise torch.OutOfMemoryError(f"{self.live:,} of {self.total:,} bytes are taken")
            self.live += size
            self.peak = max(self.peak, self.live)

    def drop(self, size: int) -> None:
        with self._lock:
            self.live -= size

    def trim(self) -> None:
        self.peak = self.live

    def watch(self, device: torch.device) -> None:
        """Watches this thread from here on."""
        if not hasattr(self._here, "mode"):
            self._here.mode = _Counting(self, device)
            self._here.mode.__enter__()

    @contextmanager
    def watching(self, device: torch.device) -> Iterator[None]:
        """Watches this thread meanwhile."""
        self.watch(device)
        try:
            yield
        finally:
            self._here.mode.__exit__(None, None, None)
            del self._here.mode


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operators take for their results. What their kernels take and give back is not
    seen. A tensor that has a shape alone is read as zeros."""

    def __init__(self, count: MemoryCount, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what is made of other operators comes as these
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        found = _read(func, args, kwargs)
        if found is NotImplemented:
            found = func(*args, **kwargs)
        for one in tree_iter(found):
            if isinstance(one, Tensor) and one.device.type == self._device.type:
                storage = one.untyped_storage()
                if storage._cdata not in given and not hasattr(storage, "counted"):
                    self._count.add(storage.nbytes())
                    storage.counted = True  # type: ignore[attr-defined]
                    weakref.finalize(storage, self._count.drop, storage.nbytes())
        return found


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what an operator gives that reads numbers of a tensor that has none; NotImplemented if it is
    another one."""
    if func is _aten.allclose.default and args[0].is_meta:
        return True
    if func in (_aten.item.default, _aten._local_scalar_dense.default) and args[0].is_meta:
        return 1.0 if args[0].is_floating_point() else 1
    if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
        return args[0].zero_()
    if func is _aten._to_copy.default and args[0].is_meta and str(kwargs.get("device")) == "cpu":
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return NotImplemented


@dataclass(frozen=True, slots=True)
class CountedDevice(GpuDevice):
    """It keeps what it has used until it is trimmed, as torch's allocator of a GPU does."""

    count: MemoryCount

    def free(self) -> tuple[int, int]:
        return self.count.total - self.count.peak, self.count.total

    def held(self) -> int:
        return self.count.peak

    def trim(self) -> None:
        self.count.trim()

    def pinned(self, size: int) -> Tensor:
        """Returns memory of the host, which does not count."""
        made = torch.from_numpy(np.zeros(size, dtype=np.uint8))
        made.untyped_storage().counted = True  # type: ignore[attr-defined]
        return made

    def enter(self) -> None:
        self.count.watch(self.torch)


def counted_device(count: MemoryCount, device: str = "cpu", *, pairs: int = 1) -> CountedDevice:
    """Returns a device with so many pairs of partitions."""
    halves = [
        (PartitionLane(COMPUTE // 2, HostStream()), PartitionLane(COMPUTE // 2, HostStream()))
        for _ in range(pairs)
    ]
    partitions = Partitions(PartitionLane(COMPUTE, HostStream()), halves)
    return CountedDevice(torch.device(device), COMPUTE, partitions, count)

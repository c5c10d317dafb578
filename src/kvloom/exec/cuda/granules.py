"""A device's memory in granules: addresses that stay, over memory that comes and goes.

Recorded graphs and tensors hold addresses. By CUDA's virtual memory management (driver API, section "Virtual
Memory Management") these are reserved once, and granules of physical memory are mapped there and taken away
again, as kvcached (Xu et al., 2025) and vAttention (Prabhu et al., ASPLOS 2025) do for K and V. All granules
are made at the start, so while serving none can be lacking because another process was faster.

Memory that is mapped so cannot be exported by CUDA IPC.
"""

from __future__ import annotations

import ctypes
import errno
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from kvloom.kernels.driver import DriverError
from kvloom.kv.arena import view_blocks
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I32, I64


class DriverCalls(Protocol):
    """The CUDA driver; see `kernels.driver.Driver`."""

    api: Any

    def enter(self, index: int) -> None: ...

    def __call__(self, name: str, *arguments: Any) -> Any: ...


@dataclass(slots=True, eq=False)
class AddressRange:
    """Reserved addresses, of so many granules as `held` is long."""

    address: int
    size: int  # of a granule, in bytes
    held: list[Any]
    """The granule at each place; None if the place has none, and then nobody may touch its bytes."""

    @property
    def is_held(self) -> bool:
        """True if some place has a granule."""
        return any(one is not None for one in self.held)


@dataclass(slots=True, eq=False)
class _Addressed:
    """Bytes at an address of a device, as torch takes them."""

    __cuda_array_interface__: dict[str, Any]


class Granules:
    """The physical memory of a unit. Granules that no range has are `idle`. Threads may share it."""

    def __init__(self, driver: DriverCalls, device: torch.device, block_bytes: int) -> None:
        """block_bytes: of which granules hold a whole number. Raises ConfigError if the device cannot map
        memory so."""
        self._driver = driver
        self._device = device
        self._index = device.index or 0
        self._idle: list[Any] = []
        self._ranges: list[AddressRange] = []
        self._lock = threading.Lock()
        api = driver.api
        self._kind = api.CUmemAllocationProp()
        self._kind.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = self._index
        self._access = api.CUmemAccessDesc()
        self._access.location = self._kind.location
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        try:
            driver.enter(self._index)
            least = int(driver("cuMemGetAllocationGranularity", self._kind, smallest))
        except DriverError as error:
            raise ConfigError(f"memory: {device} cannot map memory by granules: {error}") from error
        self.size: Final = math.lcm(least, block_bytes)

    @property
    def idle(self) -> int:
        """Granules that no range has."""
        return len(self._idle)

    def create(self, count: int) -> None:
        """Makes so many more granules, which are idle. Raises ConfigError, with none made, if the device has
        too little memory."""
        made: list[Any] = []
        self._driver.enter(self._index)
        try:
            for _ in range(count):
                made.append(self._driver("cuMemCreate", self.size, self._kind, 0))
        except DriverError as error:
            for handle in made:
                self._driver("cuMemRelease", handle)
            raise ConfigError(
                f"memory: {self._device} gives {len(made):,} of {count:,} more pieces of {self.size:,} bytes "
                f"({error}); less is right"
            ) from error
        with self._lock:
            self._idle += made

    def reserve(self, count: int) -> AddressRange:
        """Returns new addresses of so many granules, with none of them there. Raises ConfigError."""
        self._driver.enter(self._index)
        try:
            address = int(self._driver("cuMemAddressReserve", count * self.size, 0, 0, 0))
        except DriverError as error:
            raise ConfigError(f"memory: {self._device} reserves no addresses: {error}") from error
        found = AddressRange(address, self.size, [None] * count)
        self._ranges.append(found)
        return found

    def supply(self, to: AddressRange, places: Sequence[int] | I64) -> None:
        """Maps idle granules at places that have none. Raises OSError, with none mapped, if there are too few
        or the driver refuses."""
        with self._lock:
            if len(places) > len(self._idle):
                raise OSError(
                    errno.ENOMEM, f"{len(places)} granules are wanted, and {len(self._idle)} are idle"
                )
            self._driver.enter(self._index)
            done: list[int] = []
            try:
                for place in map(int, places):
                    self._map(to, place)
                    done.append(place)
            except DriverError as error:
                for place in done:
                    self._unmap(to, place)
                raise OSError(errno.EIO, f"{self._device} maps no memory: {error}") from error

    def withdraw(self, whence: AddressRange, places: Sequence[int] | I64) -> None:
        """Takes the granules of these places away. They are idle then, and their content is lost. No work
        that was asked for may touch them. Raises DriverError, with those before it taken, if the driver
        refuses."""
        with self._lock:
            self._driver.enter(self._index)
            for place in map(int, places):
                self._unmap(whence, place)

    @contextmanager
    def lent(self, to: AddressRange) -> Iterator[Tensor]:
        """Yields the bytes of a range that has no granules; it has new ones meanwhile. Raises ConfigError."""
        with self.made(len(to.held)):
            try:
                self.supply(to, range(len(to.held)))
                yield self.tensor(to)
            finally:
                self.withdraw(to, [place for place, held in enumerate(to.held) if held is not None])

    @contextmanager
    def made(self, count: int) -> Iterator[None]:
        """Makes so many more granules for the time of the context, and gives all idle ones back after it.
        Raises ConfigError."""
        self.create(count)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Gives what is idle back to the system."""
        with self._lock:
            self._driver.enter(self._index)
            while self._idle:
                self._driver("cuMemRelease", self._idle.pop())

    def tensor(self, of: AddressRange) -> Tensor:
        """Returns the bytes of a range, all of whose granules are there for now: torch asks the driver whose
        memory it is. The tensor stays right when they are taken and others come."""
        size = len(of.held) * of.size
        if self._device.type == "cpu":
            memory = (ctypes.c_char * size).from_address(of.address)
            return torch.frombuffer(memory, dtype=torch.uint8)
        here = {"shape": (size,), "typestr": "|u1", "data": (of.address, False), "version": 3}
        found = torch.as_tensor(_Addressed(here))
        if found.device != self._device or found.data_ptr() != of.address:
            raise ConfigError(f"memory: what is mapped for {self._device} is {found.device}'s for torch")
        return found

    def close(self) -> None:
        """Gives all back to the system, once nobody uses it."""
        for one in self._ranges:
            self.withdraw(one, [place for place, held in enumerate(one.held) if held is not None])
            self._driver("cuMemAddressFree", one.address, len(one.held) * one.size)
        self._ranges.clear()
        self.release()

    def _map(self, to: AddressRange, place: int) -> None:
        assert to.held[place] is None, "a granule is there already"
        at, handle = to.address + place * self.size, self._idle[-1]
        self._driver("cuMemMap", at, self.size, 0, handle, 0)
        try:
            self._driver("cuMemSetAccess", at, self.size, [self._access], 1)
        except DriverError:
            self._driver("cuMemUnmap", at, self.size)
            raise
        to.held[place] = self._idle.pop()

    def _unmap(self, whence: AddressRange, place: int) -> None:
        """Takes one granule: a call may not take a part of what was mapped, nor more."""
        assert whence.held[place] is not None, "no granule is there"
        self._driver("cuMemUnmap", whence.address + place * self.size, self.size)
        self._idle.append(whence.held[place])
        whence.held[place] = None


class GranuleArena:
    """An arena whose granules may be given to weights for a time. It satisfies `ArenaMemory`. Its address
    never changes; blocks that are given up have no memory, and a device that touches them fails for good."""

    def __init__(self, granules: Granules, count: int, block_bytes: int) -> None:
        """count: of granules, which are idle. Raises ConfigError."""
        self.per_granule: Final = granules.size // block_bytes
        self.blocks = count * self.per_granule
        self.block_bytes = block_bytes
        self._granules = granules
        self._range = granules.reserve(count)
        try:
            granules.supply(self._range, range(count))
        except OSError as error:
            raise ConfigError(f"memory: the pool cannot be mapped: {error.strerror}") from error
        self.bytes: Tensor = granules.tensor(self._range)

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the arena as one model sees it: [blocks, 2, tokens, head_dim]."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)

    def discard(self, blocks: I32) -> None:
        """Gives the memory of these blocks up. Raises ValueError if they are no whole granules."""
        self._granules.withdraw(self._range, self._places(blocks))

    def restore(self, blocks: I32) -> None:
        """Gives these blocks memory again, of any content. Raises ValueError if they are no whole granules,
        OSError if too few are idle."""
        self._granules.supply(self._range, self._places(blocks))

    def close(self) -> None:
        """Gives all memory back to the system, that of all ranges."""
        self._granules.close()

    def _places(self, blocks: I32) -> I64:
        places, counts = np.unique(blocks // self.per_granule, return_counts=True)
        if (counts != self.per_granule).any():
            raise ValueError(f"blocks: want whole granules of {self.per_granule}, not parts of them")
        return places.astype(np.int64)

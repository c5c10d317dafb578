"""The CUDA driver's virtual memory management over the host's memory, as strict as its documentation: what is
touched without being mapped and let in ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from types import SimpleNamespace
from typing import Any

from kvloom.kernels.driver import DriverError

_FIXED, _NORESERVE = 0x10, 0x4000
_KIND, _READ_WRITE = "device memory", "read and write"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostDriver:
    """Satisfies `DriverCalls`. granule: bytes; granules: that the device has."""

    def __init__(self, granule: int = mmap.PAGESIZE, granules: int = 1 << 16) -> None:
        self.granule = granule
        self.reserved: dict[int, int] = {}  # bytes, by address
        self.mapped: dict[int, tuple[int, int]] = {}  # by address: bytes, handle
        self.open: set[int] = set()  # what may be touched
        self.handles: dict[int, int] = {}  # bytes of each that is not released
        self.failing: dict[str, int] = {}  # calls of a name that succeed before one fails
        self._left = granules * granule
        self._fd = os.memfd_create("device")
        self._end = 0
        self._thread = threading.local()
        self.api = SimpleNamespace(
            CUmemAllocationProp=lambda: SimpleNamespace(location=SimpleNamespace()),
            CUmemAccessDesc=SimpleNamespace,
            CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=_KIND),
            CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device"),
            CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=_READ_WRITE),
            CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
        )

    def enter(self, index: int) -> None:
        self._thread.index = index

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert getattr(self._thread, "index", None) == 0, "no context is current in this thread"
        if name in self.failing:
            self.failing[name] -= 1
            if self.failing[name] < 0:
                del self.failing[name]
                raise DriverError(f"{name}: CUDA_ERROR_UNKNOWN")
        return getattr(self, f"_{name}")(*arguments)

    def __del__(self) -> None:
        for address, size in self.reserved.items():
            _libc.munmap(address, size)
        os.close(self._fd)

    def _cuMemGetAllocationGranularity(self, kind: Any, option: int) -> int:
        self._check(kind)
        return self.granule

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert size > 0
        assert size % self.granule == alignment == address == flags == 0
        found: int = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        self.reserved[found] = size
        return found

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= one < address + size for one in self.mapped)
        _libc.munmap(address, size)

    def _cuMemCreate(self, size: int, kind: Any, flags: int) -> int:
        self._check(kind)
        assert size % self.granule == flags == 0
        if size > self._left:
            raise DriverError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self._left -= size
        handle = self._end
        self._end += size
        os.posix_fallocate(self._fd, handle, size)
        self.handles[handle] = size
        return handle

    def _cuMemRelease(self, handle: int) -> None:
        assert handle not in (held for _, held in self.mapped.values()), "it is mapped"
        self._left += self.handles.pop(handle)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert offset == flags == 0
        assert self.handles[handle] == size
        assert any(at <= address and address + size <= at + all for at, all in self.reserved.items())
        assert not any(at < address + size and address < at + all for at, (all, _) in self.mapped.items())
        got = _libc.mmap(address, size, 0, mmap.MAP_SHARED | _FIXED, self._fd, handle)
        assert got == address
        self.mapped[address] = size, handle

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        assert self.mapped[address][0] == size
        assert len(access) == count == 1
        assert (access[0].location.type, access[0].location.id, access[0].flags) == ("device", 0, _READ_WRITE)
        assert _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.open.add(address)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address)[0] == size, "a part of what was mapped"
        self.open.discard(address)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        assert _libc.mmap(address, size, 0, flags, -1, 0) == address

    def _check(self, kind: Any) -> None:
        assert (kind.type, kind.location.type, kind.location.id) == (_KIND, "device", 0)

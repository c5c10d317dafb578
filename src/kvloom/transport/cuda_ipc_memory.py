"""Memory of a GPU as other processes of the host see it: exported, mapped, and copied between arenas.

CUDA's driver API, section "Memory Management" (cuIpcGetMemHandle): what is exported is the whole allocation
in which the memory lies. Who exports it must outlive its users' mappings, or at least their use.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Annotated, Any, Protocol

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from kvloom.kernels.driver import Driver, DriverError
from kvloom.transport.cuda import open_driver
from kvloom.transport.marks import CudaMark, Mark
from kvloom.transport.room import Room
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.transfer import Parcel

_HANDLE = 64  # bytes


class DeviceMemory(Protocol):
    """What a device does for the KV plane."""

    def export(self, memory: Tensor) -> bytes:
        """A handle, for processes of this host. Raises ConfigError where the memory cannot be shared."""

    def map(self, handle: bytes) -> Tensor:
        """Another process' memory, for as long as the tensor lives. Raises BadRequest for what is no handle,
        Unavailable for one that leads nowhere."""

    def mark(self) -> Mark:
        """What this thread has asked the device for, on its current stream, up to now."""

    def copy(self, source: Tensor, target: Tensor, parcel: Parcel, room: Room) -> None:
        """`reference.copy_blocks` from `source` to `target`, with the room's layout; done when it returns.
        Raises RuntimeError."""


class _Handle(Struct, frozen=True, array_like=True):
    """The memory is `size` bytes from `offset` on in the allocation that `ipc` names."""

    ipc: Annotated[bytes, Meta(min_length=_HANDLE, max_length=_HANDLE)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 48)]
    size: Annotated[int, Meta(ge=1, lt=1 << 48)]


class _Foreign:
    """Bytes at an address of the device, as torch takes them; they are let go of with this object."""

    def __init__(self, driver: Driver, device: int, base: int, offset: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (base + offset, False),
            "version": 3,
        }
        weakref.finalize(self, _close, driver, device, base)


class CudaMemory:
    """One GPU's, for one process. Copies have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where the driver cannot share memory from here."""
        self._driver = open_driver()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def export(self, memory: Tensor) -> bytes:
        at = memory.data_ptr()
        try:
            self._driver.enter(self._device.index)
            base, _ = self._driver("cuMemGetAddressRange", at)
            handle = self._driver("cuIpcGetMemHandle", base)
        except DriverError as error:
            raise ConfigError(
                f"transport: the KV arena cannot be shared with other processes: {error}"
            ) from error
        return msgspec.msgpack.encode(_Handle(bytes(handle.reserved), at - int(base), memory.numel()))

    def map(self, handle: bytes) -> Tensor:
        try:
            told = msgspec.msgpack.decode(handle, type=_Handle)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"peer: its memory's handle cannot be read: {error}") from error
        api: Any = self._driver.api
        ipc = api.CUipcMemHandle()
        ipc.reserved = told.ipc
        try:
            self._driver.enter(self._device.index)
            base = int(
                self._driver(
                    "cuIpcOpenMemHandle", ipc, int(api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                )
            )
        except DriverError as error:
            raise Unavailable(f"the peer's KV arena cannot be mapped: {error}") from error
        foreign = _Foreign(self._driver, self._device.index, base, told.offset, told.size)
        try:
            mapped = torch.as_tensor(foreign)  # on the pointer's own device; one that is given is believed
        except RuntimeError as error:
            raise Unavailable(f"the peer's memory cannot be taken as a tensor: {error}") from error
        if mapped.device != self._device or mapped.data_ptr() != base + told.offset:
            raise BadRequest(
                f"peer: its memory is {mapped.device}'s, which {self._device} cannot map as its own; units "
                "of one GPU are right"
            )
        return mapped

    def mark(self) -> Mark:
        with torch.cuda.device(self._device):
            return CudaMark()

    def copy(self, source: Tensor, target: Tensor, parcel: Parcel, room: Room) -> None:
        from kvloom.kernels.cuda.copy import copy_blocks  # noqa: PLC0415 -- triton reads its environment then

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            lists = (parcel.own, parcel.peer, parcel.offsets, parcel.counts)
            sent = (torch.from_numpy(one.copy()).pin_memory() for one in lists)
            copy_blocks(
                source,
                target,
                *(one.to(self._device, non_blocking=True) for one in sent),
                block_bytes=room.block_bytes,
                page_tokens=room.page_tokens,
                token_bytes=room.token_bytes,
            )
            self._stream.synchronize()


def _close(driver: Driver, device: int, base: int) -> None:
    """On whichever thread the memory's last holder ends."""
    with suppress(DriverError):  # the process is ending, or its device has failed
        driver.enter(device)
        driver("cuIpcCloseMemHandle", base)

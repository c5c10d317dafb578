"""The KV plane between GPUs' arenas on one host: as over shared memory, with arenas that CUDA maps.

The ledger is in the host's memory, and fences are the same: a sender holds the ticket's lock until the copy
that it has asked the device for is done, and tells of tokens that are there.

How memory is shared: CUDA's driver API, section "Memory Management" (cuIpcGetMemHandle). What is exported is
the whole allocation in which the memory lies. Who exports it must outlive its users' mappings, or at least
their use.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Final, Protocol

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from kvloom.kernels.driver import Driver, DriverError, read_struct, write_struct
from kvloom.kv.arena import ArenaMemory
from kvloom.transfer.fenced import FencedPlane, FencedTransfer, FencedTransport, Memory, PeerProcess
from kvloom.transfer.ledger import ROW_BYTES
from kvloom.transfer.plane import address_of
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.transfer import BlockCopies, DeviceEvent

PIECE = 32 << 20  # bytes copied between two looks at the ledger: a tenth of a millisecond on one GPU
_HANDLE: Final = 64  # bytes


class DeviceMemory(Protocol):
    """A device does this for the KV plane."""

    def export(self, memory: Tensor) -> bytes:
        """Returns a handle for processes of this host. Raises ConfigError if the memory cannot be shared."""

    def map(self, handle: bytes) -> Tensor:
        """Returns another process' memory, for as long as the tensor lives. Raises BadRequest for what is no
        handle, Unavailable for one that leads nowhere."""

    def mark(self) -> DeviceEvent:
        """Returns the point up to which this thread has asked the device for something, on its current
        stream."""

    def copy(self, source: Tensor, target: Tensor, copies: BlockCopies, room: WriteTarget) -> None:
        """Copies as `reference.copy_blocks` does from `source` to `target`, with the room's layout; the
        copies are done when it returns. Raises RuntimeError."""


class CudaEvent:
    """A `DeviceEvent` in the calling thread's current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


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
    """The `DeviceMemory` of a GPU, for one process. Copies have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError if the driver cannot share memory from here."""
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
        return msgspec.msgpack.encode(_Handle(read_struct(handle, _HANDLE), at - int(base), memory.numel()))

    def map(self, handle: bytes) -> Tensor:
        try:
            told = msgspec.msgpack.decode(handle, type=_Handle)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"peer: its memory's handle cannot be read: {error}") from error
        api: Any = self._driver.api
        ipc = api.CUipcMemHandle()
        write_struct(ipc, told.ipc)
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
        self._refuse_unreached(base)
        try:
            mapped = torch.as_tensor(foreign, device=self._device)  # a device that is given is believed
        except RuntimeError as error:
            raise Unavailable(f"the peer's memory cannot be taken as a tensor: {error}") from error
        if mapped.device != self._device or mapped.data_ptr() != base + told.offset:
            raise Unavailable(f"the peer's memory has become a copy on {mapped.device}; torch 2.11 is right")
        return mapped

    def _refuse_unreached(self, address: int) -> None:
        """Raises BadRequest if memory that is mapped is another GPU's and kernels of this one do not reach
        it. Mapping it has enabled peer access, if there is any."""
        api: Any = self._driver.api
        kind = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        try:
            owner = int(self._driver("cuPointerGetAttribute", kind, address))
            ours, theirs = (self._driver("cuDeviceGet", one) for one in (self._device.index, owner))
            reached = owner == self._device.index or int(self._driver("cuDeviceCanAccessPeer", ours, theirs))
        except DriverError as error:
            raise Unavailable(f"which GPU's the peer's memory is cannot be told: {error}") from error
        if not reached:
            raise BadRequest(
                f"peer: its memory is cuda:{owner}'s, to which {self._device} has no peer access; units of "
                "one GPU, or of two that NVLink joins, are right"
            )

    def mark(self) -> DeviceEvent:
        with torch.cuda.device(self._device):
            return CudaEvent()

    def copy(self, source: Tensor, target: Tensor, copies: BlockCopies, room: WriteTarget) -> None:
        from kvloom.kernels.cuda.copy import copy_blocks  # noqa: PLC0415 -- triton reads its environment then

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            lists = (copies.own, copies.peer, copies.offsets, copies.counts)
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
    """Unmaps a peer's memory, on whichever thread the memory's last holder ends."""
    with suppress(DriverError):  # the process is ending, or its device has failed
        driver.enter(device)
        driver("cuIpcCloseMemHandle", base)


def open_driver() -> Driver:
    """Raises ConfigError if there are no bindings or no driver."""
    try:
        return Driver()
    except DriverError as error:
        raise ConfigError(
            f"transport: {error}; pip install '.[gpu]' in kvloom's checkout is right"
        ) from error


class CudaEndpoint(Struct, frozen=True, array_like=True):
    """The address of an endpoint of kind `cuda`: `handle` leads to the arena, as `DeviceMemory` has exported
    it."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    handle: Annotated[bytes, Meta(max_length=1 << 10)]
    ledger: Memory
    blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=64, lt=1 << 31)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]


class CudaPeer(PeerProcess):
    """Another process with its arena, whose bytes are `memory`."""

    def __init__(self, endpoint: Endpoint, device: DeviceMemory, handle: bytes, own: Tensor) -> None:
        """own: this unit's arena, which has this `handle`, and which its process cannot map. Raises
        BadRequest for an endpoint that never was one, Unavailable for one that is gone."""
        where = _decode(endpoint)
        super().__init__(endpoint, where.pid, where.ledger, where.slots, where.blocks, where.block_bytes)
        self.refuse_gone()
        self.memory = own if where.handle == handle else device.map(where.handle)
        if self.memory.numel() != where.blocks * where.block_bytes:
            raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")


class CudaTransfer(FencedTransfer):
    """Blocks that are put may still be written by what the thread that puts them has asked its stream for."""

    PIECE: ClassVar[int] = PIECE

    def __init__(
        self,
        source: Tensor,
        device: DeviceMemory,
        plane: FencedPlane,
        peer: CudaPeer,
        target: WriteTarget,
        address: KVAddress,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(plane, peer, target, address, begin, end)
        self._source = source
        self._memory = peer.memory
        self._device = device

    def _event(self) -> DeviceEvent:
        return self._device.mark()

    def _write(self, piece: BlockCopies) -> None:
        try:
            self._device.copy(self._source, self._memory, piece, self.target)
        except RuntimeError as error:
            raise self.failed(error) from error


class CudaIpcTransport(FencedTransport[CudaPeer]):
    """Implements `Transport`."""

    def __init__(self, unit: str, arena: ArenaMemory, device: DeviceMemory, *, slots: int = 4096) -> None:
        """Raises ConfigError if the arena cannot be shared."""
        self._handle = device.export(arena.bytes)
        super().__init__(arena, slots)
        self.device = device
        ledger = Memory.of(self._ledger.fd)
        where = CudaEndpoint(os.getpid(), self._handle, ledger, arena.blocks, arena.block_bytes, slots)
        self.endpoint = Endpoint(unit=unit, kind="cuda", where=msgspec.msgpack.encode(where))

    def peer(self, endpoint: Endpoint) -> CudaPeer:
        return CudaPeer(endpoint, self.device, self._handle, self._arena.bytes)

    def _transfer(
        self, peer: CudaPeer, target: WriteTarget, address: KVAddress, begin: int, end: int
    ) -> CudaTransfer:
        source, device = self._arena.bytes, self.device
        return CudaTransfer(source, device, self._plane, peer, target, address, begin, end)


def _decode(endpoint: Endpoint) -> CudaEndpoint:
    where = address_of(endpoint, "cuda", CudaEndpoint)
    if where.ledger.size != where.slots * ROW_BYTES:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")
    return where

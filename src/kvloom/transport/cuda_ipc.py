"""The KV plane between GPUs' arenas on one host: as over shared memory (`shm.py`), with arenas that CUDA
maps.

The ledger is in the host's memory, and fences are the same: a sender holds the ticket's lock until the copy
that it has asked the device for is done, and tells of tokens that are there.
"""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from torch import Tensor

from kvloom.kv.arena import Store
from kvloom.transport.cuda_ipc_memory import DeviceMemory
from kvloom.transport.fenced import FencedTransport
from kvloom.transport.ledger import ROW_BYTES
from kvloom.transport.marks import MarkedParcel
from kvloom.transport.peer import Memory, PeerProcess
from kvloom.transport.plane import FencedShipment, Plane
from kvloom.transport.room import Room
from kvloom.types.errors import BadRequest
from kvloom.types.transfer import Endpoint, KVAddress, Parcel, Ticket

PIECE = 32 << 20  # bytes copied between two looks at the ledger: a tenth of a millisecond on one GPU


class DeviceWhere(Struct, frozen=True, array_like=True):
    """An endpoint of kind `cuda`: `handle` leads to the arena, as `DeviceMemory` has exported it."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    handle: Annotated[bytes, Meta(max_length=1 << 10)]
    ledger: Memory
    blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=64, lt=1 << 31)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]


class DevicePeer(PeerProcess):
    """With its arena. memory: its bytes."""

    def __init__(self, endpoint: Endpoint, device: DeviceMemory, handle: bytes, own: Tensor) -> None:
        """own: this unit's arena, which has this `handle`, and which its process cannot map. Raises
        BadRequest for an endpoint that never was one, Unavailable for one that is gone."""
        where = _decode(endpoint)
        super().__init__(endpoint, where.pid, where.ledger, where.slots)
        self.blocks, self.block_bytes = where.blocks, where.block_bytes
        self.refuse_gone()
        self.memory = own if where.handle == handle else device.map(where.handle)
        if self.memory.numel() != where.blocks * where.block_bytes:
            raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")


class DeviceShipment(FencedShipment):
    """What is put may be written to before it, on the current stream of the thread that puts it."""

    def __init__(
        self,
        source: Tensor,
        device: DeviceMemory,
        plane: Plane,
        peer: DevicePeer,
        room: Room,
        ticket: Ticket,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(plane, peer, room, ticket, begin, end)
        self._source = source
        self._target = peer.memory
        self._device = device

    @property
    def piece(self) -> int:
        return PIECE

    def put(self, parcel: Parcel) -> None:
        try:
            mark = self._device.mark()
        except RuntimeError as error:  # the device has failed
            self.fail(self._failed(error))
            return
        super().put(MarkedParcel.of(parcel, mark))

    def copy(self, parcel: Parcel) -> None:
        """Waits first, for as long as what is copied is being computed, and holds no lock meanwhile."""
        if isinstance(parcel, MarkedParcel):
            try:
                parcel.mark.wait()
            except RuntimeError as error:
                self.fail(self._failed(error))
        super().copy(parcel)

    def _write(self, parcel: Parcel, piece: slice) -> None:
        rows = Parcel(
            *(
                np.ascontiguousarray(one[piece])
                for one in (parcel.own, parcel.peer, parcel.offsets, parcel.counts)
            )
        )
        try:
            self._device.copy(self._source, self._target, rows, self.room)
        except RuntimeError as error:
            raise self._failed(error) from error


class CudaIpcTransport(FencedTransport):
    """Implements Transport. To be used on one event loop."""

    def __init__(self, unit: str, arena: Store, device: DeviceMemory, *, slots: int = 4096) -> None:
        """Raises ConfigError where the arena cannot be shared."""
        self._handle = device.export(arena.bytes)
        super().__init__(slots)
        self._arena = arena
        self._device = device
        ledger = Memory.of(self._ledger.fd)
        where = DeviceWhere(os.getpid(), self._handle, ledger, arena.blocks, arena.block_bytes, slots)
        self._endpoint = Endpoint(unit=unit, kind="cuda", where=msgspec.msgpack.encode(where))

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def device(self) -> DeviceMemory:
        return self._device

    def peer(self, endpoint: Endpoint) -> DevicePeer:
        """Another unit, mapped for as long as what is returned lives. Raises BadRequest for an endpoint that
        never was one, Unavailable for one that is gone."""
        return DevicePeer(endpoint, self._device, self._handle, self._arena.bytes)

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> DeviceShipment:
        self._plane.refuse_over()
        reached = self._reach(peer)
        room = Room.of(address, begin, end, own=self._arena, peer=reached)
        reached.ledger.claim(address.ticket, digest, begin, end)
        return DeviceShipment(
            self._arena.bytes, self._device, self._plane, reached, room, address.ticket, begin, end
        )

    def _reach(self, endpoint: Endpoint) -> DevicePeer:
        known = self._peers.known(endpoint)
        if isinstance(known, DevicePeer):
            return known
        peer = self.peer(endpoint)
        self._peers.add(peer)
        return peer


def _decode(endpoint: Endpoint) -> DeviceWhere:
    if endpoint.kind != "cuda":
        raise BadRequest(
            f"peer: {endpoint.unit} moves K and V by {endpoint.kind}, this unit by cuda; units of one "
            "kind of device are right"
        )
    try:
        where = msgspec.msgpack.decode(endpoint.where, type=DeviceWhere)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} cannot be read: {error}") from error
    if where.ledger.size != where.slots * ROW_BYTES:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} contradicts itself")
    return where

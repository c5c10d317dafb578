"""The plane between arenas on devices: fenced as shared memory is, and after what the device still
computes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from kvloom.kv.arena import Arena
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.transfer.fenced import FencedTransfer
from kvloom.types.address import KVAddress, KVForm
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.geometry import Geometry
from kvloom.types.transfer import BlockCopies, DeviceEvent
from tests.transfer.device_memory import HostMemory
from tests.transfer.units import DEADLINE

BLOCK, TOKENS = 4096, 32
FORM = KVForm.of(Geometry(1, 1, 16, 4, BLOCK), "float32")


class _Later:
    """What the device has been asked for is done when `computed` is set; `problem` is what went wrong."""

    def __init__(self) -> None:
        self.computed = threading.Event()
        self.reached = threading.Event()
        self.problem = ""

    def done(self) -> bool:
        return self.computed.is_set()

    def wait(self) -> None:
        self.reached.set()
        self.computed.wait()
        if self.problem:
            raise RuntimeError(self.problem)


class _Slow(HostMemory):
    def __init__(self, arena: Arena, later: _Later) -> None:
        super().__init__(arena)
        self._later = later

    def mark(self) -> DeviceEvent:
        return self._later


async def _ship(later: _Later) -> tuple[FencedTransfer, CudaIpcTransport, KVAddress, Arena, Arena]:
    """Block 3 of a sender, to block 7 of a receiver, which is put and not yet computed."""
    arenas = Arena(8, BLOCK), Arena(8, BLOCK)
    sender = CudaIpcTransport("sender", arenas[0], _Slow(arenas[0], later), slots=4)
    receiver = CudaIpcTransport("receiver", arenas[1], HostMemory(arenas[1]), slots=4)
    blocks = KVAddress.compress(np.array([7], np.int32))
    address = KVAddress(model="m", form=FORM, begin=0, end=TOKENS, blocks=blocks, ticket=receiver.open(0, 5))
    transfer = sender.claim(receiver.endpoint, address, 5, 0, TOKENS)
    one, none, count = (np.array([n], np.int32) for n in (3, 0, TOKENS))
    transfer.put(BlockCopies(one, np.array([7], np.int32), none, count))
    return transfer, receiver, address, *arenas


def test_what_is_still_computed_is_copied_afterwards_and_holds_no_lock() -> None:
    async def run() -> None:
        later = _Later()
        transfer, receiver, address, own, peer = await _ship(later)
        assert await asyncio.to_thread(later.reached.wait, DEADLINE)
        assert receiver.received(address.ticket) == 0
        own.view(16, torch.float32)[3] = 1.5  # what the device was to write
        later.computed.set()
        await transfer.arrived()
        assert receiver.received(address.ticket) == TOKENS
        assert (peer.view(16, torch.float32)[7] == 1.5).all()
        assert receiver.close(address.ticket)

    asyncio.run(run())


def test_a_reservation_closes_at_once_while_the_device_computes() -> None:
    async def run() -> None:
        later = _Later()
        transfer, receiver, address, own, peer = await _ship(later)
        assert await asyncio.to_thread(later.reached.wait, DEADLINE)
        assert receiver.close(address.ticket)
        own.view(16, torch.float32)[3] = 1.5
        later.computed.set()
        with pytest.raises(BadRequest, match="over"):
            await transfer.arrived()
        assert not peer.bytes.any()

    asyncio.run(run())


def test_a_device_that_fails_fails_its_transfers() -> None:
    async def run() -> None:
        later = _Later()
        later.problem = "an illegal memory access was encountered"
        later.computed.set()
        transfer, receiver, address, _, peer = await _ship(later)
        with pytest.raises(Unavailable, match="to be sent was not computed: an illegal memory access"):
            await transfer.arrived()
        assert not peer.bytes.any()
        assert receiver.close(address.ticket)

    asyncio.run(run())

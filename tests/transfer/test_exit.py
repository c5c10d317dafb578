"""A process that forgets to end its transports ends all the same, and at once."""

from __future__ import annotations

import subprocess
import sys

from tests.transfer.kinds import NIXL

PROGRAM = """
import asyncio, struct, sys
import numpy as np
from kvloom.types.address import KVAddress, KVForm
from kvloom.types.transfer import BlockCopies
from kvloom.kv.arena import Arena
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.nixl_agent import HostPlace
from tests.transfer.device_memory import HostMemory, LikeAGpu

FORM = KVForm(layers=1, kv_heads=1, head_dim=16, dtype="float32", block_bytes=4096, tokens_per_block=32)

async def used(kind):
    device = lambda unit, arena: CudaIpcTransport(unit, arena, HostMemory(arena))
    nixl = lambda unit, arena: NixlTransport(unit, arena, HostPlace())
    like_a_gpu = lambda unit, arena: NixlTransport(unit, arena, LikeAGpu())
    kinds = {"shm": ShmTransport, "nixl": nixl, "device": device, "nixl-device": like_a_gpu}
    sender, receiver = (kinds[kind](end, Arena(64, 4096)) for end in ("sender", "receiver"))
    address = KVAddress(
        model="m", form=FORM, begin=0, end=32, blocks=struct.pack("<ii", 7, 1), ticket=receiver.open(0, 5)
    )
    transfer = sender.claim(receiver.endpoint, address, 5, 0, 32)
    one, none, all_ = (np.array([n], np.int32) for n in (7, 0, 32))
    transfer.put(BlockCopies(one, one, none, all_))
    await transfer.arrived()
    print(receiver.received(address.ticket), flush=True)
    return sender, receiver, transfer

async def main():
    return [await used(kind) for kind in sys.argv[1:]]

kept = asyncio.run(main())
"""


def test_a_process_ends_with_its_transports_open() -> None:
    """One of each kind, each with two units in one process, which CUDA cannot have: a process does not map
    its own exports."""
    kinds = ["shm", "device", *(["nixl", "nixl-device"] if NIXL else [])]
    command = [sys.executable, "-c", PROGRAM, *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "32\n" * len(kinds)), done.stderr

"""K and V between two processes' arenas over NIXL: `python -m tools.gpu_checks.nixl DEVICE` is the sender.

It reads where to send from its input, sends an arena full of ones and then of twos by the transport that
serves, and prints the seconds that the second took.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import msgspec
import numpy as np
import torch
from msgspec import Struct
from tools.gpu_checks.report import Figure

from kvloom.exec.cuda.loader import DeviceArena
from kvloom.kv.arena import Arena, ArenaMemory
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import place_of
from kvloom.types.address import Endpoint, KVAddress, KVForm
from kvloom.types.geometry import Geometry
from kvloom.types.transfer import BlockCopies

_BLOCK_BYTES = 16 << 10
_FORM = KVForm.of(Geometry(32, 8, 128, 2, _BLOCK_BYTES), "bfloat16")
_PAGE = _FORM.layers * _FORM.kv_heads  # blocks
_DIGEST = 1
_DEADLINE = 90


class Targets(Struct):
    """The same blocks twice: what is first sent connects the two."""

    peer: Endpoint
    addresses: tuple[KVAddress, KVAddress]


def over_nixl(device: torch.device, pages: int = 64) -> list[Figure]:
    """Raises AssertionError where the arena is not what the other process sent."""
    arena = _arena(device, pages)
    transport = NixlTransport("receiver", arena, place_of(arena))
    shape = (pages, _FORM.layers, _FORM.kv_heads)
    blocks = np.random.default_rng(0).permutation(arena.blocks).astype(np.int32).reshape(shape)
    tokens = pages * _FORM.tokens_per_block
    first, second = (
        KVAddress(
            model="m",
            form=_FORM,
            begin=0,
            end=tokens,
            blocks=KVAddress.compress(blocks),
            ticket=transport.open(0, _DIGEST),
        )
        for _ in range(2)
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tools.gpu_checks.nixl", str(device)],
            input=msgspec.json.encode(Targets(transport.endpoint, (first, second))),
            capture_output=True,
            timeout=_DEADLINE,
            check=False,
        )
        received = transport.received(second.ticket)
    finally:
        transport.close_all()
    assert done.returncode == 0, done.stderr.decode().strip().splitlines()[-1:]
    assert received == tokens, f"{received} of {tokens} tokens have come"
    assert bool((arena.bytes == 2).all()), "the arena does not hold what the other process sent"
    return [
        Figure(
            name="over NIXL, two processes, scattered blocks of 16 KiB",
            value=arena.bytes.numel() / float(done.stdout) / 1e9,
            unit="GB/s",
        )
    ]


def _arena(device: torch.device, pages: int) -> ArenaMemory:
    on_host = device.type == "cpu"
    return Arena(pages * _PAGE, _BLOCK_BYTES) if on_host else DeviceArena(pages * _PAGE, _BLOCK_BYTES, device)


async def _send(transport: NixlTransport, peer: Endpoint, address: KVAddress) -> float:
    blocks = address.block_map.ravel()
    none, all_ = np.zeros_like(blocks), np.full_like(blocks, _FORM.tokens_per_block)
    own = np.arange(len(blocks), dtype=np.int32)
    began = time.perf_counter()
    transfer = transport.claim(peer, address, _DIGEST, address.begin, address.end)
    transfer.put(BlockCopies(own, blocks, none, all_))
    await transfer.arrived()
    return time.perf_counter() - began


async def main() -> None:
    device = torch.device(sys.argv[1])
    targets = msgspec.json.decode(sys.stdin.buffer.read(), type=Targets)
    arena = _arena(device, targets.addresses[0].pages)
    transport = NixlTransport("sender", arena, place_of(arena))
    for value, address in enumerate(targets.addresses, 1):
        arena.bytes.fill_(value)
        took = await _send(transport, targets.peer, address)
    transport.close_all()
    print(took)


if __name__ == "__main__":
    asyncio.run(main())

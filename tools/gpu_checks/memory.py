"""K and V between two processes' arenas on one GPU, mapped and over NIXL. `python -m tools.gpu_checks.memory
WAY DEVICE` is the other process: it reads from its input where to write, writes there by the transport that
serves, and prints the seconds that it took."""

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
from kvloom.transfer.cuda_ipc import CudaMemory
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import place_of
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress, KVForm
from kvloom.types.geometry import Geometry
from kvloom.types.transfer import BlockCopies

_BLOCKS, _BLOCK_BYTES = 16384, 16 << 10
_DEADLINE = 90
_FORM = KVForm.of(Geometry(32, 8, 128, 2, _BLOCK_BYTES), "bfloat16")
_PAGE = _FORM.layers * _FORM.kv_heads  # blocks
_DIGEST = 1


def between_processes() -> list[Figure]:
    """Raises AssertionError where the arena is not what the other process wrote."""
    device = torch.device("cuda", 0)
    arena = DeviceArena(_BLOCKS, _BLOCK_BYTES, device)
    handle = CudaMemory(device).export(arena.bytes)
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_checks.memory", "mapped", str(device)],
        input=handle.hex(),
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]
    assert bool((arena.bytes == 7).all()), "the arena does not hold what the other process wrote"
    size = _BLOCKS * _BLOCK_BYTES
    return [
        Figure(
            name="arena to arena, two processes, scattered blocks of 16 KiB",
            value=size / float(done.stdout) / 1e9,
            unit="GB/s",
        )
    ]


def write_mapped(device: torch.device) -> float:
    """Writes 7 to all of the arena that the input leads to. Returns the seconds of the fastest time."""
    torch.cuda.set_device(device)
    memory = CudaMemory(device)
    target = memory.map(bytes.fromhex(sys.stdin.read()))
    source = torch.full_like(target, 7)
    blocks = np.random.default_rng(0).permutation(_BLOCKS).astype(np.int32)
    none, all_ = np.zeros(_BLOCKS, np.int32), np.full(_BLOCKS, 32, np.int32)
    room = WriteTarget(_BLOCK_BYTES, 32, 256, _BLOCKS, np.ones(_BLOCKS, np.bool_))
    found: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        memory.copy(source, target, BlockCopies(blocks, blocks[::-1].copy(), none, all_), room)
        found.append(time.perf_counter() - began)
    return min(found)


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
            [sys.executable, "-m", "tools.gpu_checks.memory", "nixl", str(device)],
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


async def send(device: torch.device) -> float:
    """Sends an arena full of ones and then of twos to where the input says. Returns the seconds of the second
    time."""
    targets = msgspec.json.decode(sys.stdin.buffer.read(), type=Targets)
    arena = _arena(device, targets.addresses[0].pages)
    transport = NixlTransport("sender", arena, place_of(arena))
    for value, address in enumerate(targets.addresses, 1):
        arena.bytes.fill_(value)
        took = await _send(transport, targets.peer, address)
    transport.close_all()
    return took


def main(way: str, device: str) -> None:
    here = torch.device(device)
    print(write_mapped(here) if way == "mapped" else asyncio.run(send(here)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""K and V between the arenas of two processes on one GPU: `python -m tools.gpu_checks.ipc` is the other one.

It reads the arena's handle and size from its input, writes 7 to all of it through the transport's own copy,
and prints the seconds that took.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import torch
from tools.gpu_checks.report import Figure

from kvloom.exec.cuda.loader import DeviceArena
from kvloom.transfer.cuda_ipc import CudaMemory
from kvloom.transfer.target import WriteTarget
from kvloom.types.transfer import BlockCopies

_BLOCKS, _BLOCK_BYTES = 16384, 16 << 10
_DEADLINE = 90


def between_processes() -> list[Figure]:
    """Raises AssertionError where the arena is not what the other process wrote."""
    device = torch.device("cuda", 0)
    arena = DeviceArena(_BLOCKS, _BLOCK_BYTES, device)
    handle = CudaMemory(device).export(arena.bytes)
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_checks.ipc"],
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


def main() -> None:
    device = torch.device("cuda", 0)
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
    print(min(found))


if __name__ == "__main__":
    main()

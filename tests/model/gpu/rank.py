"""A rank whose device is the CPU in a GPU's place, a process: `python -m tests.model.gpu.rank FD NAME`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from kvloom.exec.cuda.device import Device, Lane, Partitions
from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.cuda.streams import HostStream
from kvloom.exec.parallel.cuda import GpuWorker
from kvloom.exec.parallel.member import Member
from kvloom.exec.parallel.rank import run_rank
from kvloom.exec.parallel.wire import Begin

COMPUTE = 8


def one_lane() -> Device:
    return Device(torch.device("cpu"), COMPUTE, Partitions(Lane(COMPUTE, HostStream()), []))


def start(wire: int, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(wire), name],
        stdin=subprocess.DEVNULL,
        pass_fds=[wire],
        cwd=Path(__file__).parents[3],
    )


def _open(begin: Begin, member: Member) -> GpuWorker:
    torch.set_num_threads(1)
    return GpuWorker.over(begin, member, one_lane(), plain_operations())


if __name__ == "__main__":
    run_rank(_open)

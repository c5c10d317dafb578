"""A rank whose device is the CPU in a GPU's place, a process: `python -m tests.exec.cuda.rank FD NAME`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.cuda.parallel import GpuWorker
from kvloom.exec.parallel.ranks import Member
from kvloom.exec.parallel.wire import StartRank
from kvloom.exec.rank import run_rank
from tests.exec.cuda.devices import one_lane


def start(wire: int, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(wire), name],
        stdin=subprocess.DEVNULL,
        pass_fds=[wire],
        cwd=Path(__file__).parents[3],
    )


def _open(begin: StartRank, member: Member) -> GpuWorker:
    torch.set_num_threads(1)
    return GpuWorker.over(begin, member, one_lane(), plain_operations())


if __name__ == "__main__":
    run_rank(_open)

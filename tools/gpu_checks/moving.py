"""How long a request that moves from one engine to another on this GPU keeps its caller waiting: what
`benchmarks.downtime` does on CPUs, between two processes whose arenas are mapped by CUDA IPC."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.downtime import Found, live
from benchmarks.moving_pair import cold, paired, prompt_of
from tools.gpu_checks.report import Figure
from tools.gpu_checks.unit import Setup, units

from kvloom.types.client import EngineClient

PARTS: Final = ("hold", "send", "start", "last")  # of the gap


@dataclass(frozen=True, slots=True)
class Effort:
    """length: tokens of the request that moves, and its context; beside: requests that decode at each engine
    meanwhile; patience: seconds until both engines serve."""

    shape: str = "8B"
    length: int = 8192
    context: int = 16000
    beside: int = 8
    rounds: int = 3
    kv_bytes: int = 8 << 30
    most_running: int = 16
    chunk: int = 4096
    patience: float = 60.0


def moving(effort: Effort | None = None) -> Iterator[Figure]:
    effort = effort or Effort()
    yield from told(asyncio.run(_between_processes(effort)), effort)


def told(found: Sequence[Found], effort: Effort) -> Iterator[Figure]:
    downtime, step = (median(getattr(one, what) for one in found) * 1e3 for what in ("downtime", "step"))
    parts = ", ".join(f"{part} {median(getattr(one, part) for one in found) * 1e3:.1f}" for part in PARTS)
    yield Figure(
        name=f"a request of {effort.length} tokens moves: downtime, against a decode step",
        value=downtime,
        unit="ms",
        most=step,
        note=f"the step {step:.1f} ms; of the gap: {parts} ms; {effort.beside} others at each engine, two "
        "processes on one GPU",
    )
    slower = 100 * max(one.slower for one in found)
    yield Figure(name="others slower while it moves, at worst", value=slower, unit="%")
    whole = median(one.whole for one in found) * 1e3
    yield Figure(name="from the order to its first token there", value=whole, unit="ms")


async def _between_processes(effort: Effort) -> list[Found]:
    with tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_urlsafe(16)
        setups = [setup(unit, effort, Path(folder), secret) for unit in ("source", "target")]
        async with units(setups, effort.patience) as (source, target):
            return await moves(source, target, effort)


def setup(unit: str, effort: Effort, folder: Path, secret: str) -> Setup:
    return Setup(
        unit=unit,
        shape=effort.shape,
        kv_bytes=effort.kv_bytes,
        most_running=effort.most_running,
        chunk=effort.chunk,
        socket=str(folder / unit),
        secret=secret,
    )


async def moves(source: EngineClient, target: EngineClient, effort: Effort) -> list[Found]:
    """The first round, in which memory is touched and kernels are loaded, is left out."""
    found = []
    async with paired(source, target, effort.beside, effort.context // 4) as on:
        prompt = prompt_of(effort.length)
        for _ in range(effort.rounds + 1):
            await cold(on)
            found.append(await live(on, prompt, effort.context))
    return found[1:]

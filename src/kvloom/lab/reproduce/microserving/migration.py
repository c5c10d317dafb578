"""A cached context moves to another engine (LLM Microserving, section 4.2): figure 12 and table 3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from kvloom.lab.reproduce.microserving.setup import DATA_PARALLEL, MODEL, units
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import VOCAB
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.links import Link
from kvloom.lab.sim.unit import SimulatedUnit, timed_link
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.plan.cost.shapes import find_shape
from kvloom.router.program import load_program
from kvloom.types.client import EngineClient
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.verbs import PrepRecv, RemoteSend

UNIQUE: Final = 500  # tokens that no engine has
CONTEXTS: Final = (500, 2500, 4500)
SPEEDUP: Final = 1.7  # the paper's, at 1,000 tokens
# Milliseconds a layer, by the tokens of the prompt: of computing, and of moving K and V.
TABLE_3: Final = {1000: (1.247, 0.197), 3000: (1.391, 0.533), 5000: (1.564, 0.867)}
SLIGHT: Final = 1.5  # times as long, for a prompt five times as long
BENT: Final = 0.25  # by which a line's second half may be steeper than its first


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy over a link: its begin and its end, in seconds."""

    begin: float
    end: float


class WatchedLink:
    """Satisfies `Link`: tells of each copy."""

    def __init__(self, link: Link, copies: list[Copy]) -> None:
        self._link = link
        self._copies = copies

    def wait(self, size: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()

        def over() -> None:
            if size:
                self._copies.append(Copy(begin, loop.time()))
            then()

        self._link.wait(size, over)


@dataclass(frozen=True, slots=True)
class Move:
    """The times of one move. `seconds` is the time until the receiver has K and V of the whole prompt.
    `layer` is the time of a layer for computing what is new, and `transfer` that for moving all, from the
    context's copy, which begins with the job, to the last layer's."""

    seconds: float
    layer: float
    transfer: float


def move(context: int, *, cached: bool) -> Move:
    """Plays one engine that prefills `context` and UNIQUE tokens for another one. If it is `cached`, it has
    the context already."""
    copies: list[Copy] = []

    def watched(unit: SimulatedUnit) -> Link:
        return WatchedLink(timed_link(unit), copies)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        prompt = Prompts(VOCAB)(0, WorkloadRequest(at=0.0, model=MODEL, prompt=context + UNIQUE, output=1))
        program = load_program(DATA_PARALLEL.program.name)
        async with run_fleet(units(2), program, link=watched) as fleet:
            source, target = fleet.engines.values()
            if cached:
                await _prefill(source, prompt[:context])
            begin = loop.time()
            ready = await target.prep_recv(PrepRecv(model=MODEL, request="move", prompt=prompt))
            await source.remote_send(
                RemoteSend(model=MODEL, request="move", prompt=prompt, address=ready.address, peer=ready.peer)
            )
            return loop.time() - begin

    seconds = run_virtual(main())
    layers = find_shape(MODEL).layers
    busy = sum(copy.end - copy.begin for copy in copies)
    return Move(seconds, (copies[-1].begin - copies[0].begin) / layers, busy / layers)


async def _prefill(engine: EngineClient, prompt: list[int]) -> None:
    body = StartGenerate(
        model=MODEL, request="context", prompt=prompt, sampling=SamplingParams(max_tokens=1, seed=0)
    )
    async with aclosing(engine.start_generate(body)) as frames:
        async for _ in frames:
            pass  # until it is over


def figure_12(_: Scale, tell: Tell) -> Report:
    """Measures the prefill time with the context recomputed, and with it migrated."""
    recomputed, migrated = [], []
    for i, context in enumerate(CONTEXTS):
        tell(f"{context + UNIQUE} tokens", i / len(CONTEXTS))
        recomputed.append(move(context, cached=False).seconds)
        migrated.append(move(context, cached=True).seconds)
    growth, speedup = migrated[-1] / migrated[0], recomputed[0] / migrated[0]
    first, second = recomputed[1] - recomputed[0], recomputed[2] - recomputed[1]
    rows = tuple(
        (f"{context + UNIQUE:,}", f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", f"{a / b:.2f}×")
        for context, a, b in zip(CONTEXTS, recomputed, migrated, strict=True)
    )
    return Report(
        name="figure 12",
        title="prefill time with a cached context recomputed, and migrated",
        cells=(Cell(row="1,000 tokens", column="times faster, migrated", paper=SPEEDUP, ours=speedup),),
        claims=(
            Claim(
                said="migrated, the time grows but slightly from 1,000 to 5,000 tokens",
                holds=growth < SLIGHT,
                found=f"{growth:.2f}×",
            ),
            Claim(
                said="recomputed, it grows linearly",
                holds=abs(second / first - 1) < BENT,
                found=f"by {first * 1e3:.0f} ms to 3,000 tokens, by {second * 1e3:.0f} ms more to 5,000",
            ),
        ),
        grids=(
            Grid(title="Prefill time, ms", heads=("tokens", "recomputed", "migrated", "faster"), rows=rows),
        ),
    )


def table_3(_: Scale, tell: Tell) -> Report:
    """Measures for each layer, with the context cached, what is computed and what is moved meanwhile."""
    told: list[Cell] = []
    after = 0.0  # layers' times from the last layer's computing to the last byte's arrival, at most
    for i, (tokens, (layer, transfer)) in enumerate(TABLE_3.items()):
        tell(f"{tokens} tokens", i / len(TABLE_3))
        found = move(tokens - UNIQUE, cached=True)
        after = max(after, found.seconds / found.layer - find_shape(MODEL).layers)
        told += cells(
            f"{tokens:,} tokens",
            ("computing, ms a layer", layer, found.layer * 1e3),
            ("moving, ms a layer", transfer, found.transfer * 1e3),
            ("moving over computing, %", transfer / layer * 100, found.transfer / found.layer * 100),
        )
    return Report(
        name="table 3",
        title="a layer's prefill and its transfer",
        cells=tuple(told),
        claims=(
            Claim(
                said="moving is hidden behind computing while it takes less time",
                holds=after < 1.0,
                found=f"all has arrived {after:.2f} layers' time after the last layer's computing",
            ),
        ),
    )

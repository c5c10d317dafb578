"""One system under one load: how long its requests took, and how often they moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.lab.sim.fleet import Rescheduling, simulated
from kvloom.lab.sim.run import play
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.reproduce.llumnix.by_reports import infaas_by_reports
from kvloom.reproduce.llumnix.setup import VOCAB
from kvloom.router.program import Program, load_program
from kvloom.types.geometry import F64
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.prompts import Prompts

INTERVAL: Final = 16  # tokens a frame: what a router knows of a request that is to move


@dataclass(frozen=True, slots=True)
class System:
    """program: that dispatches. rescheduling: None where no request moves."""

    name: str
    program: Program
    rescheduling: Rescheduling | None = None


ROUND_ROBIN: Final = System("round-robin", load_program("data_parallel", {}))
INFAAS: Final = System("INFaaS++", load_program("infaas", {}))
BY_REPORTS: Final = System("INFaaS++ by reports", Program("infaas, by reports", infaas_by_reports, {}))
LLUMNIX: Final = System("Llumnix", load_program("freest", {}), Rescheduling())


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: mean and P99."""

    mean: float
    p99: float

    @staticmethod
    def of(seconds: F64) -> Times:
        return Times(float(seconds.mean()), float(np.quantile(seconds, 0.99)))


@dataclass(frozen=True, slots=True)
class Point:
    """prefill: to the first token. decode: between tokens, of the requests that had two. request: to the
    last. preemptions: in all; moved, stayed: moves that were made, and that came to nothing. units: instances
    that there were, in the mean until the last answer."""

    prefill: Times
    decode: Times
    request: Times
    preemptions: int
    moved: int
    stayed: int
    units: float


def play_point(
    system: System, units: list[SimulatedUnit], asks: Iterable[Ask], tell: Callable[[Outcome], None]
) -> Point:
    """Raises RuntimeError where a request is not answered."""
    return _Play(tell).run(system, units, asks)


def play_outcomes(
    system: System, units: list[SimulatedUnit], asks: Iterable[Ask], tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Of every request, as they ended. Raises RuntimeError where one is not answered."""
    playing = _Play(tell)
    playing.run(system, units, asks)
    return playing.outcomes


class _Play:
    def __init__(self, tell: Callable[[Outcome], None]) -> None:
        self._tell = tell
        self.outcomes: list[Outcome] = []

    def run(self, system: System, units: list[SimulatedUnit], asks: Iterable[Ask]) -> Point:
        return run_virtual(self._main(system, units, asks))

    async def _main(self, system: System, units: list[SimulatedUnit], asks: Iterable[Ask]) -> Point:
        clock = LoopClock(asyncio.get_running_loop())
        async with simulated(units, system.program, rescheduling=system.rescheduling) as fleet:
            await play(fleet.server, asks, Prompts(VOCAB), clock, self._add, interval=INTERVAL)
            mover, processes = fleet.rescheduler, fleet.processes
            return Point(
                *latencies(self.outcomes),
                preemptions=await processes.preemptions(),
                moved=mover.moved if mover else 0,
                stayed=mover.stayed if mover else 0,
                units=processes.census.mean,
            )

    def _add(self, outcome: Outcome) -> None:
        if outcome.error:
            raise RuntimeError(f"a request at {outcome.ask.at:.3f} s failed: {outcome.error}")
        self.outcomes.append(outcome)
        self._tell(outcome)


def latencies(outcomes: Iterable[Outcome]) -> tuple[Times, Times, Times]:
    """To the first token, between tokens, to the last."""
    rows = [(one.first, one.per_token, one.end) for one in outcomes]
    first, between, last = zip(*rows, strict=True)
    steps = [seconds for seconds in between if seconds is not None]
    return Times.of(np.array(first)), Times.of(np.array(steps)), Times.of(np.array(last))

"""The engine by itself, as published and as kvloom's: what preemption costs on one instance (section 3,
figure 3), and what four instances leave unused while prompts wait (figure 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean
from typing import Final, TypeVar

import numpy as np

from kvloom.lab.reproduce.llumnix.fragmentation import queue_heads
from kvloom.lab.reproduce.llumnix.losses import PreemptionLosses
from kvloom.lab.reproduce.llumnix.setup import KVLOOM, PUBLISHED, EngineKind, make_units
from kvloom.lab.reproduce.llumnix.systems import INFAAS, ROUND_ROBIN, ByStep, program_of
from kvloom.lab.reproduce.llumnix.traffic import MEDIUM
from kvloom.lab.reproduce.report import Claim, Grid, Report, Scale, Tell, cells, duration
from kvloom.lab.reproduce.setup import VOCAB, TellPart, check_answered, play_all, tell_each
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.run import send_workload
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.router.program import Program

ENGINES: Final = {"vLLM of 2023": PUBLISHED, "kvloom, fcfs": KVLOOM}
DRAWS: Final = 8  # one draw differs much from another: a few long requests decide
REQUESTS: Final = 2000  # of figure 3; the paper does not tell how many figure 5 has
RATE: Final = 0.42  # requests a second on one instance
FOUR, RATE_OF_FOUR, DRAWS_OF_FOUR = 4, 1.9, 3
SECOND: Final = 1.0  # between two looks at the instances
SLOW: Final = 0.99
AROUND: Final = 0.005  # requests between the quantiles 0.985 and 0.995 stand for the P99 request
QUEUE_HEADS: Final = 3  # instances whose first waiting requests mostly find room in what all leave

# Figure 3, as section 3 tells it.
MEMORY, PREEMPTED, SLOWER, LOST, LOST_SECONDS = 62.0, 8.0, 3.8, 70.0, 50.0

_COLUMNS: Final = (
    ("memory in use, %", MEMORY),
    ("requests preempted, %", PREEMPTED),
    ("a token, P99 over P50", SLOWER),
    ("of the P99 request's time, lost to preemption, %", LOST),
    ("lost by it, s", LOST_SECONDS),
)
_COLUMN_NAMES: Final = (
    "engine", "draw", *(column for column, _ in _COLUMNS), "a token, P50", "P99", "prefill, P50", "P99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alone:
    """The findings of one draw of figure 3, in its units. `memory` is the mean memory in use until the last
    request came, and `per_token` the seconds of a token, P50 and P99."""

    memory: float
    preempted: float
    per_token: tuple[float, float]
    lost: float
    lost_seconds: float
    prefill: tuple[float, float]
    """The seconds to the first token, P50 and P99."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the figure, as `_COLUMNS` has them."""
        middle, slow = self.per_token
        return self.memory, self.preempted, slow / middle, self.lost, self.lost_seconds


Found = TypeVar("Found")


def _in_all_draws(
    play: Callable[[EngineKind, int, int, TellPart], Found], draws: int, scale: Scale, tell: Tell
) -> list[tuple[str, Found]]:
    """Returns what `play` finds of each engine in each draw, with the engine's name. `draws` is their number
    at the full scale."""
    draws, count = (draws, REQUESTS) if scale == "full" else (1, 300)
    plan = [(name, draw) for name in ENGINES for draw in range(draws)]

    def one(run: tuple[str, int], part: TellPart) -> Found:
        return play(ENGINES[run[0]], count, run[1], part)

    found = play_all(plan, one, lambda run: f"{run[0]}, draw {run[1] + 1}", tell)
    return [(name, one) for (name, _), one in zip(plan, found, strict=True)]


def figure_3(scale: Scale, tell: Tell) -> Report:
    """Plays one instance by itself, with each engine."""
    return report_3(_in_all_draws(alone, DRAWS, scale, tell))


def alone(engine: EngineKind, count: int, draw: int, tell: TellPart) -> Alone:
    """Raises RuntimeError if a request is not answered."""
    asked = list(MEDIUM.requests(RATE, count, draw))
    used: list[float] = []

    async def look(fleet: SimulatedFleet) -> None:
        pool = next(iter(fleet.engines.values())).pool
        used.append(100 * (1 - pool.available / pool.total))

    results, lost = _played(make_units(1, engine=engine), ROUND_ROBIN.dispatch, asked, look, tell)
    names = {id(request): f"ask-{number}" for number, request in enumerate(asked)}
    rows = sorted(
        (one.per_token, sum(lost.get(names[id(one.request)], ())), one.tokens - 1)
        for one in results
        if one.per_token is not None
    )
    per_token, losses, gaps = (np.array(column) for column in zip(*rows, strict=True))
    at = slice(*(round((SLOW + side * AROUND) * len(rows)) for side in (-1, 1)))
    first = np.array([one.first for one in results])
    return Alone(
        memory=float(np.mean(used)),
        preempted=100 * len(lost) / count,
        per_token=_quantiles(per_token),
        lost=100 * float(np.mean(losses[at] / (per_token[at] * gaps[at]))),
        lost_seconds=float(losses[at].mean()),
        prefill=_quantiles(first),
    )


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    return float(np.quantile(values, 0.5)), float(np.quantile(values, SLOW))


Look = Callable[[SimulatedFleet], Awaitable[None]]


def _played(
    units: Sequence[SimulatedUnit],
    dispatch: Program | ByStep,
    asked: Sequence[WorkloadRequest],
    look: Look,
    tell: TellPart,
) -> tuple[list[RequestResult], dict[str, list[float]]]:
    """Returns the results, and the losses of each request that was preempted. `look` is called once a second
    until the last request has come."""
    results: list[RequestResult] = []
    told = tell_each(tell, len(asked))
    program, serves = program_of(dispatch)

    def end(result: RequestResult) -> None:
        check_answered(result)
        results.append(result)
        told(result)

    async def looking(fleet: SimulatedFleet, clock: LoopClock) -> None:
        while clock.now() < asked[-1].at:
            await look(fleet)
            await clock.sleep(SECOND)

    async def main() -> dict[str, list[float]]:
        clock = LoopClock(asyncio.get_running_loop())
        async with run_fleet(units, program) as fleet, asyncio.TaskGroup() as group:
            serves(fleet)
            losses = PreemptionLosses(fleet.server, clock.now)
            fleet.journal.follow(losses.keep)
            group.create_task(looking(fleet, clock))
            await send_workload(losses, asked, Prompts(VOCAB), clock, end, interval=1)
        return losses.seconds

    return results, run_virtual(main())


def report_3(found: Sequence[tuple[str, Alone]]) -> Report:
    """Returns the report. `found` has all draws of each engine."""
    own = {name: [one for other, one in found if other == name] for name in ENGINES}
    return Report(
        name="figure 3",
        title=f"preemption on one instance: M-M, {RATE:g} req/s",
        cells=tuple(
            cell
            for name, draws in own.items()
            for cell in cells(
                name,
                *(
                    (column, paper, mean(one.numbers[at] for one in draws))
                    for at, (column, paper) in enumerate(_COLUMNS)
                ),
            )
        ),
        grids=(Grid(title="ours, draw by draw", heads=_COLUMN_NAMES, rows=tuple(_rows(own))),),
    )


def _rows(own: Mapping[str, Sequence[Alone]]) -> Iterator[tuple[str, ...]]:
    for name, draws in own.items():
        for draw, one in enumerate(draws, 1):
            numbers = [f"{number:.1f}" for number in one.numbers]
            times = [duration(seconds) for seconds in (*one.per_token, *one.prefill)]
            yield name, f"{draw}", *numbers, *times


@dataclass(frozen=True, slots=True)
class Unused:
    """The looks at which a queue head would find room.

    `seconds` is the number of looks, one a second, at which a request waited. `several` is the fraction of
    them at which the queue heads of QUEUE_HEADS instances (of all that had one, if fewer) fitted into the
    cluster's free blocks, and `all` the fraction at which every queue head did.
    """

    seconds: int
    several: float
    all: float


def figure_5(scale: Scale, tell: Tell) -> Report:
    """Plays four instances behind a dispatch that spreads the load, with each engine."""
    return report_5(_in_all_draws(unused, DRAWS_OF_FOUR, scale, tell))


def unused(engine: EngineKind, count: int, draw: int, tell: TellPart) -> Unused:
    """Raises RuntimeError if a request is not answered."""
    asked = list(MEDIUM.requests(RATE_OF_FOUR, count, draw))
    found: list[tuple[bool, bool]] = []

    async def look(fleet: SimulatedFleet) -> None:
        if heads := queue_heads([await one.load() for one in fleet.engines.values()]):
            room = sum(engine.pool.available for engine in fleet.engines.values())
            held = sum(need <= room for need in accumulate(heads))
            found.append((held >= min(QUEUE_HEADS, len(heads)), held == len(heads)))

    _played(make_units(FOUR, engine=engine), INFAAS.dispatch, asked, look, tell)
    several, everyone = zip(*found, strict=True) if found else ((True,), (True,))
    return Unused(len(found), float(mean(several)), float(mean(everyone)))


def report_5(found: Sequence[tuple[str, Unused]]) -> Report:
    """Returns the report. `found` has all draws of each engine."""
    return Report(
        name="figure 5",
        title=f"room that nobody can use: four instances, M-M, {RATE_OF_FOUR:g} req/s",
        claims=tuple(
            Claim(
                said=f"{name}: most of the time in which requests wait, the first ones of {QUEUE_HEADS} "
                "instances would find room in what all leave",
                holds=min(one.several for one in draws) > 0.5,
                found=", ".join(f"{one.several:.0%}" for one in draws)
                + " of it; those of all: "
                + ", ".join(f"{one.all:.0%}" for one in draws),
            )
            for name in ENGINES
            if (draws := [one for other, one in found if other == name])
        ),
        grids=(
            Grid(
                title="ours, draw by draw",
                heads=(
                    "engine",
                    "seconds in which requests wait",
                    f"{QUEUE_HEADS} first find room",
                    "all do",
                ),
                rows=tuple(
                    (name, f"{one.seconds:,}", f"{one.several:.0%}", f"{one.all:.0%}") for name, one in found
                ),
            ),
        ),
    )

"""One system under one load: its answers, how fast they come, and how full the pools are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvloom.lab.reproduce.report import Tell
from kvloom.lab.reproduce.setup import VOCAB, play_all
from kvloom.lab.reproduce.weaver.setup import COLD, COLD_RATE, HOT, System, Trace, requests
from kvloom.lab.sim.fleet import SimulatedFleet, simulated
from kvloom.lab.sim.run import play
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.router.program import load_program

WARM: Final = 0.5  # the part of the time that is not counted
_LOOK: Final = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Requests come for `seconds`, then it ends. hot, cold: requests a second. at_once: so many of the hot
    model come at the start instead, and it ends with the last of them."""

    device: str
    trace: Trace
    hot: float
    seconds: float
    cold: float = COLD_RATE
    at_once: int = 0

    @property
    def counted(self) -> float:
        """The time from which on it is counted, in seconds."""
        return 0.0 if self.at_once else WARM * self.seconds


@dataclass(frozen=True, slots=True)
class Course:
    """Means of one model in the counted time. rate: answers a second, by their tokens. tpot: seconds a token
    of those that ended, the mean of their means; p99. batch: sequences that run, in the mean."""

    rate: float
    tpot: float
    p99: float
    batch: float


@dataclass(frozen=True, slots=True)
class Point:
    """filled: by unit, the part of its pool that is in use, with what others have of it, in the mean."""

    hot: Course
    cold: Course
    filled: dict[str, float]


def play_point(system: System, load: Load, tell: Callable[[float], None]) -> Point:
    """tell: hears which part of the time is over."""
    return _Play(system, load, tell).run()


def play_points(plan: Sequence[tuple[System, Load]], tell: Tell) -> list[Point]:
    """Plays one after the other."""
    return play_all(
        plan, play_point, lambda system, load: f"{system.name}, {load.device}, {load.trace.name}", tell
    )


@dataclass
class _Seen:
    """tokens: made so far, at each look."""

    tpots: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def course(self, answer: int) -> Course:
        """answer: its tokens, in the mean."""
        times = np.array(self.tpots or [0.0])
        batch = float(np.mean(self.running or [0]))
        made = self.tokens[-1] - self.tokens[0] if self.tokens else 0
        rate = made / (_LOOK * max(1, len(self.tokens) - 1)) / answer
        return Course(rate, float(times.mean()), float(np.quantile(times, 0.99)), batch)


class _Play:
    def __init__(self, system: System, load: Load, tell: Callable[[float], None]) -> None:
        self._system, self._load, self._tell = system, load, tell
        self._seen = {HOT: _Seen(), COLD: _Seen()}
        self._filled: dict[str, list[float]] = {}
        self._over = asyncio.Event()  # of what came at once

    def run(self) -> Point:
        run_virtual(self._main())
        hot, cold = (self._seen[model].course(self._load.trace.output) for model in (HOT, COLD))
        return Point(hot, cold, {name: float(np.mean(parts)) for name, parts in self._filled.items()})

    async def _main(self) -> None:
        load, clock = self._load, LoopClock(asyncio.get_running_loop())
        units = self._system.units(load.device, load.hot, load.cold)
        async with simulated(units, load_program("least_loaded", {})) as fleet:
            with suppress(TimeoutError):
                async with asyncio.timeout(load.seconds):
                    async with asyncio.TaskGroup() as group:
                        tasks = [
                            group.create_task(self._look(fleet, clock)),
                            group.create_task(
                                play(fleet.router, self._requests(), Prompts(VOCAB), clock, self._end)
                            ),
                        ]
                        await self._over.wait()
                        for task in tasks:
                            task.cancel()

    async def _look(self, fleet: SimulatedFleet, clock: LoopClock) -> None:
        """Looks now and then at how full all pools are."""
        await clock.sleep(self._load.counted)
        while True:
            for name, engine in fleet.engines.items():
                load = await engine.load()
                for model, told in load.models.items():
                    self._seen[model].running.append(told.running)
                    self._seen[model].tokens.append(told.output_tokens_total)
                used = sum(told.used_blocks for told in load.models.values())
                loan = engine.borrower.loan(HOT) if name == HOT else None
                self._filled.setdefault(name, []).append(used / load.total_blocks)
                if loan is not None:
                    away = loan.pool.total - loan.pool.available
                    self._filled.setdefault("lent", []).append(away / load.total_blocks)
            await clock.sleep(_LOOK)

    def _requests(self) -> Iterator[WorkloadRequest]:
        load = self._load
        for n in range(load.at_once):
            yield WorkloadRequest(
                at=0.0, model=HOT, prompt=load.trace.prompt + n % 16, output=load.trace.output
            )
        for request in requests(load.trace, load.hot, load.cold, load.seconds):
            self._tell(request.at / load.seconds)
            yield request

    def _end(self, result: RequestResult) -> None:
        request, end = result.request, result.end
        if result.error:
            raise RuntimeError(f"a request at {request.at:.3f} s failed: {result.error}")
        seen = self._seen[request.model].tpots
        if end is not None and result.per_token is not None and request.at + end >= self._load.counted:
            seen.append(result.per_token)
        if request.model == HOT and 0 < len(seen) == self._load.at_once:
            self._over.set()

"""One system under one load: its answers, how many came in time, and who has how much of the pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvloom.lab.reproduce.muxserve.setup import Alone, Served, System, make_units, requests
from kvloom.lab.reproduce.report import Scale, Tell
from kvloom.lab.reproduce.setup import VOCAB
from kvloom.lab.reproduce.setup import play_all as play_each
from kvloom.lab.sim.fleet import SimulatedFleet, simulated
from kvloom.lab.sim.run import play
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.router.program import load_program

SECONDS: Final[Mapping[Scale, float]] = {"full": 60.0, "small": 10.0}  # for which requests come
SCALES: Final = (5, 8, 10, 20)  # of the SLO
WARM: Final = 0.5  # the part of the time that is not counted as throughput
_LOOK: Final = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Requests come for `seconds`; the run ends `after` seconds later. Judged by the SLO are those whose time
    is over then."""

    models: tuple[Served, ...]
    gpus: int
    seconds: float
    after: float = 0.0

    @property
    def end(self) -> float:
        return self.seconds + self.after


@dataclass(frozen=True, slots=True)
class Point:
    """throughput: answers a second by model. attained: the part of the requests that were answered within
    each scale of the SLO. blocks: the part of all used blocks that each model has, in the mean."""

    throughput: Mapping[str, float]
    attained: Mapping[int, float]
    blocks: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.throughput.values())

    def weighted(self, models: Sequence[Served]) -> float:
        """Throughput, weighted with the rates."""
        whole = sum(model.rate for model in models)
        return sum(model.rate * self.throughput[model.name] for model in models) / whole


def play_all(runs: Sequence[tuple[System, Load]], tell: Tell) -> list[Point]:
    """Plays one after the other. Raises ConfigError if models have no place."""
    return play_each(runs, play_point, _name, tell)


def _name(system: System, load: Load) -> str:
    return f"{system.name}, {len(load.models)} models on {load.gpus} GPUs"


def play_point(system: System, load: Load, tell: Callable[[float], None]) -> Point:
    """tell: hears which part of the load has come. Raises ConfigError if the models have no place."""
    return _Play(load, tell).run(make_units(system, load.models, load.gpus))


class _Play:
    def __init__(self, load: Load, tell: Callable[[float], None]) -> None:
        self._load, self._tell = load, tell
        self._alone = Alone(load.models)
        self._answered: Counter[str] = Counter()
        self._judged: Counter[int] = Counter()
        self._met: Counter[int] = Counter()
        self._used: Counter[str] = Counter()

    def run(self, units: Sequence[SimulatedUnit]) -> Point:
        run_virtual(self._main(units))
        load, used = self._load, sum(self._used.values()) or 1
        seconds = load.seconds * (1 - WARM)
        return Point(
            throughput={model.name: self._answered[model.name] / seconds for model in load.models},
            attained={
                scale: self._met[scale] / self._judged[scale] for scale in SCALES if self._judged[scale]
            },
            blocks={model.name: self._used[model.name] / used for model in load.models},
        )

    async def _main(self, units: Sequence[SimulatedUnit]) -> None:
        clock = LoopClock(asyncio.get_running_loop())
        async with simulated(units, load_program("least_loaded", {})) as fleet:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._load.end):
                    async with asyncio.TaskGroup() as group:
                        looking = group.create_task(self._look(fleet, clock))
                        await play(fleet.router, self._requests(), Prompts(VOCAB), clock, self._end)
                        looking.cancel()

    async def _look(self, fleet: SimulatedFleet, clock: LoopClock) -> None:
        """Looks now and then at who has how many blocks."""
        while clock.now() < self._load.seconds:
            await clock.sleep(_LOOK)
            for engine in fleet.engines.values():
                load = await engine.load()
                self._used.update({name: model.used_blocks for name, model in load.models.items()})

    def _requests(self) -> Iterator[WorkloadRequest]:
        for request in requests(self._load.models, self._load.seconds):
            alone = self._alone.seconds(request)
            self._judged.update(scale for scale in SCALES if self._is_judged(request, alone, scale))
            self._tell(request.at / self._load.seconds)
            yield request

    def _is_judged(self, request: WorkloadRequest, alone: float, scale: int) -> bool:
        return request.at + scale * alone <= self._load.end

    def _end(self, result: RequestResult) -> None:
        request, end = result.request, result.end
        if result.error or end is None:
            return
        if WARM * self._load.seconds <= request.at + end <= self._load.seconds:
            self._answered[request.model] += 1
        alone = self._alone.seconds(request)
        self._met.update(
            scale for scale in SCALES if end <= scale * alone and self._is_judged(request, alone, scale)
        )

"""The results of a system under a load: throughput as MuxServe measures it, requests in time, latencies,
blocks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.lab.reproduce.muxserve.setup import Alone, Load, Served
from kvloom.lab.reproduce.muxserve.systems import System, make_units
from kvloom.lab.reproduce.report import Tell
from kvloom.lab.reproduce.setup import TellPart, play_all, play_watched
from kvloom.lab.sim.fleet import SimulatedFleet
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.workload.request import RequestResult, WorkloadRequest

SCALES: Final = (5, 8, 10, 20)  # of the SLO
SETTLED: Final = 0.5  # the part of the load's time after which `Point.answered` counts
_LOOK: Final = 1.0  # seconds
_MOST: Final = 1e7  # seconds of a run


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Latencies of one model's requests, in seconds, and the sequences that its decode steps have.

    `ttft` is the mean to the first token, and `tpot` the mean between two; the tails are P99."""

    ttft: float
    tpot: float
    ttft_tail: float
    tpot_tail: float
    latency_tail: float
    """The P99 of the times to the last token."""
    batch: float
    """The mean number of sequences that run, while any do."""


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one system under one load.

    `throughput` has the requests of each model by the seconds until the last of them has ended, as the paper
    has it. `answered` has the answers a second of each model, in the second half of the time in which
    requests come. `attained` is the part of all requests that were answered within each scale of the SLO.
    `blocks` is the part of all used blocks that each model has, in the mean, while requests come.
    """

    throughput: Mapping[str, float]
    answered: Mapping[str, float]
    attained: Mapping[int, float]
    blocks: Mapping[str, float]
    times: Mapping[str, ModelTimes]
    tails: tuple[float, float, float]
    """The P99 over all requests of the times to the first token, between tokens, and to the last one, in
    seconds."""

    @property
    def total(self) -> float:
        return sum(self.throughput.values())

    def weighted(self, models: Sequence[Served]) -> float:
        """Returns the throughput, weighted with the rates."""
        whole = sum(model.rate for model in models)
        return sum(model.rate * self.throughput[model.name] for model in models) / whole


Run = tuple[System, Load]


def play_points(runs: Sequence[Run], tell: Tell) -> list[Point]:
    """Plays each system under its load. Raises ConfigError if models have no place."""

    def name(run: Run) -> str:
        system, load = run
        return f"{system.name}, {len(load.models)} models on {load.gpus} GPUs"

    return play_all(runs, lambda run, part: play_point(*run, part), name, tell)


def play_point(system: System, load: Load, tell: TellPart) -> Point:
    """Plays the system under its load. `tell` hears which part of the load has come. Raises ConfigError if
    the models have no place."""
    return play_units(make_units(system, load.models, load.gpus), load, tell)


def play_units(units: Sequence[SimulatedUnit], load: Load, tell: TellPart) -> Point:
    """Plays a load on units that have its models."""
    return _Play(load, tell).run(units)


class _Play:
    def __init__(self, load: Load, tell: TellPart) -> None:
        self._load, self._tell = load, tell
        self._alone = Alone(load.models)
        self._results: defaultdict[str, list[RequestResult]] = defaultdict(list)
        self._used: Counter[str] = Counter()
        self._running: defaultdict[str, list[int]] = defaultdict(list)

    def run(self, units: Sequence[SimulatedUnit]) -> Point:
        load = self._load
        play_watched(units, self._requests(), self._end, self._look, seconds=_MOST, first=_LOOK, every=_LOOK)
        used = sum(self._used.values()) or 1
        half = SETTLED * load.seconds
        names = [model.name for model in load.models]
        return Point(
            throughput={name: self._throughput(name) for name in names},
            answered={
                name: sum(half <= _ended(one) <= load.seconds for one in self._results[name])
                / (load.seconds - half)
                for name in names
            },
            attained=self._attained(),
            blocks={name: self._used[name] / used for name in names},
            times={name: self._times(self._results[name], self._running[name]) for name in names},
            tails=_tails([one for some in self._results.values() for one in some]),
        )

    def _requests(self) -> Iterator[WorkloadRequest]:
        for request in self._load.requests():
            self._tell(min(1.0, request.at / self._load.seconds))
            yield request

    async def _look(self, fleet: SimulatedFleet) -> None:
        """Adds up who has how many blocks, and how many sequences run."""
        used: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for engine in fleet.engines.values():
            load = await engine.load()
            used.update({name: model.used_blocks for name, model in load.models.items()})
            running.update({name: model.running for name, model in load.models.items()})
        self._used.update(used)
        for name, count in running.items():
            if count:
                self._running[name].append(count)

    def _end(self, result: RequestResult) -> None:
        self._results[result.request.model].append(result)

    def _throughput(self, name: str) -> float:
        answered = [_ended(one) for one in self._results[name] if math.isfinite(_ended(one))]
        return len(answered) / max(answered) if answered else 0.0

    def _attained(self) -> dict[int, float]:
        lates = [
            _late(one, self._alone.seconds(one.request)) for some in self._results.values() for one in some
        ]
        return {scale: sum(late <= scale for late in lates) / max(1, len(lates)) for scale in SCALES}

    def _times(self, results: Sequence[RequestResult], running: Sequence[int]) -> ModelTimes:
        first = [one.first for one in results if one.first is not None]
        steps = [one.per_token for one in results if one.per_token is not None]
        return ModelTimes(
            ttft=float(np.mean(first or [0.0])),
            tpot=float(np.mean(steps or [0.0])),
            ttft_tail=_tail(first),
            tpot_tail=_tail(steps),
            latency_tail=_tail([one.end for one in results if one.end is not None]),
            batch=float(np.mean(running or [0])),
        )


def _ended(result: RequestResult) -> float:
    """Returns when the last token came; inf if it did not."""
    return math.inf if result.error or result.end is None else result.request.at + result.end


def _late(result: RequestResult, alone: float) -> float:
    """Returns how many times as long as alone the request took; inf if it was not answered."""
    return math.inf if result.error or result.end is None else result.end / alone


def _tail(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def _tails(results: Sequence[RequestResult]) -> tuple[float, float, float]:
    first = [one.first for one in results if one.first is not None]
    steps = [one.per_token for one in results if one.per_token is not None]
    last = [one.end for one in results if one.end is not None]
    return _tail(first), _tail(steps), _tail(last)

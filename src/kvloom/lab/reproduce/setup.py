"""The experiments' shared parts: engines on whole GPUs, a runtime's part of jobs, requests, runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, TypeVar

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.kept_runs import KeptRuns
from kvloom.lab.reproduce.report import Tell
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.run import send_workload
from kvloom.lab.sim.unit import MAX_RUNNING, MAX_WAITING, SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.arrivals import Steps, arrivals, poisson
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.router.program import load_program
from kvloom.types.job import Phase
from kvloom.types.spec import EngineSpec, ModelSpec, Policy

VOCAB: Final = 32_000  # of the prompts
AT_ONCE: Final = 1024  # lengths that are drawn together

R = TypeVar("R")
P = TypeVar("P")
TellPart = Callable[[float], None]  # the part of a run that is over


def engine_spec(
    unit: str,
    models: Iterable[ModelSpec],
    *,
    kv_bytes: int,
    block_bytes: int,
    policy: Policy = "fcfs",
    chunk_tokens: int = 8192,
) -> EngineSpec:
    """Returns an engine that runs jobs one at a time on the whole of its device, first come first served.

    `policy` is that one or another, and `chunk_tokens` the most of a prefill job."""
    return EngineSpec(
        models=tuple(models),
        kv_bytes=kv_bytes,
        block_bytes=block_bytes,
        policy=policy,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        chunk_tokens=chunk_tokens,
        threads=1,
        unit=unit,
    )


def in_one_layer(shape: ModelShape) -> ModelShape:
    """Returns a shape whose pages are one block each, with as many bytes: pools count fewer things, and have
    the same room."""
    return structs.replace(
        shape, layers=1, kv_heads=1, head_dim=shape.layers * shape.kv_heads * shape.head_dim
    )


class Hosted:
    """Satisfies `CostModel`: a decode step waits for the host, which prepares it and reads its tokens."""

    def __init__(self, cost: CostModel, host: Callable[[Work], float]) -> None:
        """`host` returns the seconds that the host takes for a decode step."""
        self._cost = cost
        self._host = host

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        host = self._host(work) if work.phase is Phase.DECODE else 0.0
        return self._cost.seconds(work, beside) + host


class UnderMPS:
    """Satisfies `CostModel`: each model has a process for its prefills and one for its decodes, whose shares
    of the device are set when they start. So a job has no more of the device if it runs alone."""

    def __init__(self, cost: CostModel, spec: EngineSpec) -> None:
        self._cost = cost
        self._shares = {
            (model.name, phase): share or 1.0
            for model in spec.models
            for phase, share in ((Phase.PREFILL, model.prefill_share), (Phase.DECODE, model.decode_share))
        }

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._cost.seconds(self._fixed(work), [self._fixed(other) for other in beside])

    def _fixed(self, work: Work) -> Work:
        share = self._shares[work.model, work.phase]
        return work if work.share == share else structs.replace(work, share=share)


def poisson_requests(
    model: str,
    rate: float,
    seconds: float,
    pairs: Callable[[np.random.Generator], Iterator[tuple[int, int]]],
    seed: int = 0,
) -> Iterator[WorkloadRequest]:
    """Yields one model's requests, `rate` a second, until `seconds`. They do not depend on other models.

    `pairs` returns the lengths of prompts and answers, without end."""
    timing, sizing = (np.random.default_rng([seed, kind, *model.encode()]) for kind in (1, 2))
    lengths = pairs(sizing)
    for at in arrivals(poisson, Steps(np.array([rate])), timing):
        if at >= seconds:
            return
        prompt, output = next(lengths)
        yield WorkloadRequest(at=at, model=model, prompt=prompt, output=output)


def play_all(
    runs: Sequence[R],
    play: Callable[[R, TellPart], P],
    name: Callable[[R], str],
    tell: Tell,
) -> list[P]:
    """Plays the runs one after the other, and returns what `play` found in each.

    `name` returns that of a run, for the reader."""

    def played(at: int, run: R) -> P:
        what = f"{name(run)}, {at + 1} of {len(runs)}"
        return play(run, lambda part: tell(what, (at + part) / len(runs)))

    return [played(at, run) for at, run in enumerate(runs)]


def play_or_read(
    kept: KeptRuns | None,
    result: type[P],
    runs: Sequence[R],
    play: Callable[[R, TellPart], P],
    name: Callable[[R], str],
    tell: Tell,
) -> list[P]:
    """Plays runs as `play_all` does, but keeps them, and plays none again that is kept. result: what `play`
    returns. `name` is also what a run is kept under, so it tells all by which two runs of a figure differ."""
    if kept is None:
        return play_all(runs, play, name, tell)
    found = dict[int, P]()

    def played(at: int) -> P:
        what = f"{name(runs[at])}, {len(found) + 1} of {len(runs)}"
        return play(runs[at], lambda part: tell(what, (len(found) + part) / len(runs)))

    for wait in (False, True):  # for what another process plays, if nothing else is left to play
        for at in [one for one in range(len(runs)) if one not in found]:
            point = kept.result(name(runs[at]), result, partial(played, at), wait=wait)
            if point is not None:
                found[at] = point
    return [found[at] for at in range(len(runs))]


def tell_each(tell: TellPart, whole: int) -> Callable[[object], None]:
    """Returns what is to be called for each of so many answers: it tells which part of them has come."""
    answered = count(1)
    return lambda _: tell(next(answered) / whole)


Look = Callable[[SimulatedFleet], Awaitable[None]]


def play_watched(
    units: Sequence[SimulatedUnit],
    requests: Iterable[WorkloadRequest],
    end: Callable[[RequestResult], None],
    look: Look,
    *,
    seconds: float,
    first: float,
    every: float,
    last: float = math.inf,
    over: asyncio.Event | None = None,
) -> None:
    """Plays requests to a fleet that dispatches to the least loaded unit, for at most so many seconds; it
    ends earlier once `over` is set or, if that is left out, once all are answered.

    `look` is called at `first` seconds and `every` so many from then on, before `last`."""

    async def looking(fleet: SimulatedFleet, clock: LoopClock) -> None:
        await clock.sleep(first)
        while True:
            await look(fleet)
            if clock.now() >= last:
                return
            await clock.sleep(every)

    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        async with run_fleet(units, load_program("least_loaded", {})) as fleet:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                    asking = send_workload(fleet.router, requests, Prompts(VOCAB), clock, end)
                    tasks = [group.create_task(looking(fleet, clock)), group.create_task(asking)]
                    await (tasks[-1] if over is None else over.wait())
                    for task in tasks:
                        task.cancel()

    run_virtual(main())


def check_answered(result: RequestResult) -> None:
    """Raises RuntimeError if the request failed."""
    if result.error:
        raise RuntimeError(f"a request at {result.request.at:.3f} s failed: {result.error}")

"""Jobs beside other work: a second job, busy processes, and the loop of their own process."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Final, TypeVar

from kvloom.lab.profile.jobs import JobRunner, Limits, Setting, decode, prefill
from kvloom.lab.profile.processes import busy_processes
from kvloom.plan.cost.profile import BesideLoop, Colocated, MeasuredJob, Oversubscribed

T = TypeVar("T")

PROMPT_TOKENS, SHORT_PROMPT_TOKENS, CONTEXT = 256, 32, 128
FEW, MANY = 4, 32  # sequences of a decode step
MAX_PAIRS = 24
MAX_OVERSUBSCRIBED = 24  # jobs of all models that are measured beside busy processes


def pairs(models: Sequence[str], cores: int, limits: dict[str, Limits]) -> list[tuple[Setting, Setting]]:
    """Returns pairs of jobs on half of the cores each: prefills beside decodes, and decodes beside decodes of
    another model. Of many models not all are paired with each other."""
    found = [pair for pair in _pairs(models, cores, limits) if _fit(pair, limits)]
    return some_of(found, MAX_PAIRS)


def some_of(all_: Sequence[T], most: int) -> list[T]:
    """Returns at most so many of them, drawn at random, in their order."""
    drawn = random.Random(0).sample(range(len(all_)), min(most, len(all_)))
    return [all_[at] for at in sorted(drawn)]


def _pairs(models: Sequence[str], cores: int, limits: dict[str, Limits]) -> Iterator[tuple[Setting, Setting]]:
    half, rest = (cores + 1) // 2, cores // 2
    if rest == 0:
        return
    for one, other in itertools.product(models, repeat=2):
        tokens, context = min(PROMPT_TOKENS, limits[one].chunk), min(CONTEXT, limits[other].context // 2)
        for batch in (FEW, MANY):
            yield prefill(one, half, 1, tokens), decode(other, rest, batch, context)
    for one, other in itertools.combinations(models, 2):
        contexts = [min(CONTEXT, limits[model].context // 2) for model in (one, other)]
        yield decode(one, rest, MANY, contexts[0]), decode(other, rest, FEW, contexts[1])


def _fit(pair: tuple[Setting, Setting], limits: dict[str, Limits]) -> bool:
    """Returns whether each fits in half of the pool."""
    return all(
        setting.fits(limits[setting.model])
        and 2 * sum(a + b for a, b in zip(setting.starts, setting.appends, strict=True))
        <= limits[setting.model].tokens
        for setting in pair
    )


async def measure_pair(runner: JobRunner, pair: tuple[Setting, Setting], repeats: int) -> list[Colocated]:
    """Measures both of them, each beside the other."""
    first, second = pair
    with runner.placed(first) as these, runner.placed(second) as those:
        alone = [await _alone(runner, first, these, repeats), await _alone(runner, second, those, repeats)]
        enough = asyncio.Event()
        counts = [0, 0]

        async def again(which: int, setting: Setting, ids: list[int]) -> list[float]:
            """Runs it until both have been measured often enough. The first job began before the other did,
            and the last may have ended after it."""
            seconds = []
            while not enough.is_set():
                seconds.append(await runner.run(setting, ids))
                counts[which] += 1
                if min(counts) >= repeats + 2:
                    enough.set()
            return seconds[1:-1]

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(again(0, first, these)), group.create_task(again(1, second, those))]
    found = []
    for i, (setting, beside) in enumerate(((first, second), (second, first))):
        found.append(
            Colocated(
                job=_measured(setting),
                beside=_measured(beside),
                alone=alone[i],
                seconds=median(running[i].result()),
            )
        )
    return found


async def _alone(runner: JobRunner, setting: Setting, ids: list[int], repeats: int) -> float:
    await runner.run(setting, ids)
    return median([await runner.run(setting, ids) for _ in range(repeats)])


def _measured(setting: Setting) -> MeasuredJob:
    return MeasuredJob.of(setting.work(setting.cores), setting.cores)


EXCESS_THREADS: Final = (1, 2)  # threads more than there are cores
LOOP_BURST: Final = 0.001  # seconds of the loop's work at a time, at most
TARGET_SECONDS: Final = 0.3  # seconds of a job's runs, within its repeats and MAX_RUNS
MAX_RUNS: Final = 300
BUSY_PART: Final = 0.5  # the part of the time for which a busy process wants a core
MAX_SCALE: Final = 4  # what was lost is multiplied by this at most


def settings_beside_others(model: str, cores: int, limits: Limits, *, quick: bool = False) -> list[Setting]:
    """Returns two prefills and two decode steps on one core, on half of the cores and on all; if `quick`, one
    of each on all cores."""
    context = min(CONTEXT, limits.context // 2)
    found = []
    for count in sorted({cores} if quick else {1, (cores + 1) // 2, cores}):
        prompts = (PROMPT_TOKENS,) if quick else (SHORT_PROMPT_TOKENS, PROMPT_TOKENS)
        found += [prefill(model, count, 1, min(tokens, limits.chunk)) for tokens in prompts]
        found += [decode(model, count, batch, context) for batch in ((FEW,) if quick else (FEW, MANY))]
    return [setting for setting in found if setting.fits(limits)]


async def measure_oversubscribed(
    runner: JobRunner, settings: Sequence[Setting], cores: int, repeats: int
) -> list[Oversubscribed]:
    """Measures each of them beside so many busy processes that on average `EXCESS_THREADS` threads more want
    to run than the machine has cores, and alone just before, because the machine's own pace changes.

    The processes work in bursts, as a server's do: endless loops would hold a job's thread up for a slice of
    the scheduler's each time, and leave its caches as they are. From the part of the time for which they
    had a core or waited for one follows how many threads too many there really were; what the job lost is
    scaled from that number to the one in `EXCESS_THREADS`."""
    found = []

    def busy_beside(pair: tuple[Setting, int]) -> int:
        return processes_for(pair[1], cores - pair[0].cores)

    wanted = sorted(itertools.product(settings, EXCESS_THREADS), key=busy_beside)
    for busy, group in itertools.groupby(wanted, key=busy_beside):
        with busy_processes(busy) as busy_ones:
            for setting, excess in group:
                busy_ones.rest()
                alone = median(await _runs(runner, setting, repeats))
                busy_ones.work()
                begun, before = time.perf_counter(), busy_ones.wanted_seconds
                beside = fmean(await _runs(runner, setting, repeats))
                work = (busy_ones.wanted_seconds - before) / (time.perf_counter() - begun) / busy
                extra = max(excess / MAX_SCALE, mean_excess(busy, min(1.0, work), cores - setting.cores))
                lost = max(0.0, beside - alone) * excess / extra
                found.append(
                    Oversubscribed(job=_measured(setting), excess=excess, alone=alone, seconds=alone + lost)
                )
    return found


def processes_for(excess: int, free: int) -> int:
    """Returns how many processes it takes, each of which wants a core for half of the time, to have `excess`
    threads more than there are cores on average, if `free` cores have nothing else."""
    return next(count for count in itertools.count(excess) if mean_excess(count, BUSY_PART, free) >= excess)


def mean_excess(processes: int, work: float, free: int) -> float:
    """Returns how many threads more than there are cores want to run on average if each of so many processes
    does for a part `work` of the time, independently of the others, and `free` cores have nothing else."""
    return sum(
        (count - free) * math.comb(processes, count) * work**count * (1.0 - work) ** (processes - count)
        for count in range(free + 1, processes + 1)
    )


async def measure_beside_loop(
    runner: JobRunner, settings: Sequence[Setting], repeats: int
) -> list[BesideLoop]:
    """Measures each of them while this process's loop works by turns in the first half of the job's time, as
    an engine does that sends what the job before has drawn."""
    found = []
    for setting in settings:
        alone = median(await _runs(runner, setting, repeats))
        with runner.placed(setting) as ids:
            runs = [await _beside_loop(runner, setting, ids, alone) for _ in range(_count(alone, repeats))]
        found.append(
            BesideLoop(
                job=_measured(setting),
                busy=median(busy for busy, _ in runs),
                alone=alone,
                seconds=median(seconds for _, seconds in runs),
            )
        )
    return found


async def _runs(runner: JobRunner, setting: Setting, repeats: int) -> list[float]:
    with runner.placed(setting) as ids:
        first = await runner.run(setting, ids)
        return [await runner.run(setting, ids) for _ in range(_count(first, repeats))]


def _count(seconds: float, repeats: int) -> int:
    return max(repeats, min(MAX_RUNS, int(TARGET_SECONDS / seconds)))


async def _beside_loop(
    runner: JobRunner, setting: Setting, ids: list[int], alone: float
) -> tuple[float, float]:
    """Returns the seconds that the loop worked, and those of the job."""
    job = asyncio.ensure_future(runner.run(setting, ids))
    await asyncio.sleep(0)  # it is launched
    began, busy = time.perf_counter(), 0.0
    burst = min(LOOP_BURST, alone / 2)
    while not job.done() and time.perf_counter() - began < alone / 2:
        busy += _work(burst)
        await asyncio.sleep(burst)
    return busy, await job


def _work(seconds: float) -> float:
    """Works in Python for about so long and returns how long it was."""
    began = now = time.perf_counter()
    while now - began < seconds:
        now = time.perf_counter()
    return now - began

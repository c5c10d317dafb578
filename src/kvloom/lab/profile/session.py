"""Measures all of a profile that needs only the executor and an engine in this process; `run.py` adds
what needs a running server."""

from __future__ import annotations

import itertools
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from kvloom.config.machine import Machine
from kvloom.lab.profile.beside import (
    MAX_OVERSUBSCRIBED,
    SHORT_PROMPT_TOKENS,
    measure_beside_loop,
    measure_oversubscribed,
    measure_pair,
    pairs,
    settings_beside_others,
    some_of,
)
from kvloom.lab.profile.jobs import (
    PROMPT,
    PROMPT_EVERY,
    JobRunner,
    Limits,
    Setting,
    WatchedExecutor,
    core_counts,
    grid,
    measure_prefill_gap,
    measure_step,
)
from kvloom.plan.cost.profile import (
    Computer,
    EngineStep,
    MeasuredJob,
    PrefillGap,
    Profile,
    Timed,
    TimedMixed,
)
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.job import Phase
from kvloom.types.spec import EngineSpec

STEPPED: Final = (1, 8, 64)  # sequences under the engine
PACKAGES: Final = ("kvloom", "torch", "transformers", "numba")

Tell = Callable[[str, float], None]  # what is being done, and which part of all is done


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    rounds: int = 9
    """How often a job is timed that is not slow, each time in another order. So the changes of the machine's
    own pace spread over jobs, and prompts come after others, whose memory the caches hold, as under an
    engine."""
    slow_rounds: int = 3
    """How often a slow job is timed."""
    slow: float = 0.1
    """The seconds from which on a job counts as slow."""
    repeats: int = 3
    """How often, at least, a job is timed that is repeated beside something else."""
    steps: int = 40
    """The number of steps under the engine, and of the prompts that come between steps there."""
    quick: bool = False
    """Whether only some of the jobs are measured."""
    load_seconds: float = 15.0
    """About how many seconds each load of the server lasts."""


QUICK: Final = Effort(
    rounds=2,
    slow_rounds=1,
    slow=0.01,
    repeats=2,
    steps=6,
    quick=True,
    load_seconds=0.5,
)


async def measure(
    executor: WatchedExecutor,
    spec: EngineSpec,
    shapes: Mapping[str, ModelShape],
    computer: Computer,
    effort: Effort,
    temperature: float,
    tell: Tell,
) -> Profile:
    """Measures jobs alone, in pairs and beside other threads, and steps and prompts under the engine.
    `executor` has the models of `spec` loaded."""
    runner, cores = JobRunner(executor, temperature=temperature), executor.compute
    limits = {name: runner.limits(name, spec.chunk_tokens, spec.max_running) for name in shapes}
    settings = [
        setting
        for name in shapes
        for count in core_counts(cores)
        for setting in grid(name, count, limits[name], quick=effort.quick)
    ]
    both = pairs(list(shapes), cores, limits)
    beside = [
        setting
        for name in shapes
        for setting in settings_beside_others(name, cores, limits[name], quick=effort.quick)
    ]
    among = some_of(beside, MAX_OVERSUBSCRIBED)
    work = effort.rounds * len(settings) + 4 * len(both) + 6 * len(among) + 4 * len(beside) + 8 * len(shapes)
    done = _Done(work, tell)
    jobs, mixed = await _jobs(runner, settings, cores, effort, done)
    colocated = []
    for pair in both:
        done.tell(f"{JobRunner.told(pair[0])} beside {pair[1].model} {pair[1].phase.value}", 4)
        colocated += await measure_pair(runner, pair, effort.repeats)
    done.tell("jobs beside busy processes", 6 * len(among))
    oversubscribed = await measure_oversubscribed(runner, among, computer.cores, effort.repeats)
    done.tell("jobs beside the loop's work", 4 * len(beside))
    beside_loop = await measure_beside_loop(runner, beside, effort.repeats)
    steps, prefill_gaps = list[EngineStep](), list[PrefillGap]()
    for name in shapes:
        done.tell(f"{name} under the engine", 8)
        found = await _under_engine(executor, spec, name, limits[name], effort, temperature)
        steps += found[0]
        prefill_gaps += found[1]
    tell("done", 1.0)
    return Profile(
        computer=computer,
        cores=cores,
        block_bytes=spec.block_bytes,
        temperature=temperature,
        shapes=dict(shapes),
        jobs=jobs,
        colocated=tuple(colocated),
        steps=tuple(steps),
        prefill_gaps=tuple(prefill_gaps),
        mixed=mixed,
        oversubscribed=tuple(oversubscribed),
        beside_loop=tuple(beside_loop),
    )


async def _jobs(
    runner: JobRunner, settings: list[Setting], cores: int, effort: Effort, done: _Done
) -> tuple[tuple[Timed, ...], tuple[TimedMixed, ...]]:
    """Measures each job alone, round by round. A decode step is timed after one like it, as under an engine,
    and so is any job in the first round, in which products are compiled. Returns the mixed jobs apart."""
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number, setting in _in_rounds(settings, effort.rounds):
        done.tell(JobRunner.told(setting))
        if number < effort.slow_rounds or min(seconds[setting]) <= effort.slow:
            again = number == 0 or setting.phase is Phase.DECODE
            seconds[setting].append(await _timed(runner, setting, again=again))
    timed, timed_mixed = list[Timed](), list[TimedMixed]()
    for setting, found in seconds.items():
        work = setting.work(cores)
        if setting.phase is Phase.MIXED:
            prompts, step = (MeasuredJob.of(part, setting.cores) for part in (work.prompts, work.step))
            timed_mixed.append(TimedMixed(prompts=prompts, step=step, seconds=tuple(found)))
        else:
            timed.append(Timed(job=MeasuredJob.of(work, setting.cores), seconds=tuple(found)))
    return tuple(timed), tuple(timed_mixed)


def _in_rounds(settings: Sequence[Setting], rounds: int) -> Iterator[tuple[int, Setting]]:
    """Yields all settings in each round, with the round's number, in another order each time. Those of one
    model on the same number of cores follow each other, because a team of threads that has rested is slower
    at first."""
    groups = [list(group) for _, group in itertools.groupby(settings, lambda one: (one.model, one.cores))]
    rng = random.Random(0)
    for number in range(rounds):
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
            for setting in group:
                yield number, setting


async def _timed(runner: JobRunner, setting: Setting, *, again: bool) -> float:
    """Returns the seconds of one job; of its second run if `again`."""
    with runner.placed(setting) as ids:
        if again:
            await runner.run(setting, ids)
        return await runner.run(setting, ids)


async def _under_engine(
    executor: WatchedExecutor,
    spec: EngineSpec,
    model: str,
    limits: Limits,
    effort: Effort,
    temperature: float,
) -> tuple[list[EngineStep], list[PrefillGap]]:
    """Returns what was measured under the engine of steps, and of prompts that come between them: as much as
    the pool has room for."""
    stepped, gaps = list[EngineStep | None](), list[PrefillGap | None]()
    steps = min(effort.steps, limits.context - PROMPT)
    for sequences in STEPPED[: 2 if effort.quick else None]:
        room = sequences * (PROMPT + steps + limits.page) <= limits.tokens
        if steps > 2 and room and sequences <= limits.batch:
            stepped.append(await measure_step(executor, spec, model, sequences, steps, temperature))
    tokens = min(SHORT_PROMPT_TOKENS, limits.chunk, limits.context - 1)
    prompts = min(effort.steps, (limits.context - PROMPT) // PROMPT_EVERY - 1)
    room = PROMPT + PROMPT_EVERY * (prompts + 1) + tokens + 2 * limits.page <= limits.tokens
    if prompts >= 1 and room and limits.batch >= 2:  # one decodes, and one comes
        gaps.append(await measure_prefill_gap(executor, spec, model, prompts, tokens, temperature))
    return [one for one in stepped if one], [one for one in gaps if one]


class _Done:
    """Tells the user which part of all measurements is done."""

    def __init__(self, whole: int, tell: Tell) -> None:
        self._whole, self._tell = whole, tell
        self._begun = 0

    def tell(self, what: str, parts: int = 1) -> None:
        """Tells that `what` begins, which is so many parts of the whole."""
        self._tell(what, self._begun / self._whole)
        self._begun += parts


def this_computer() -> Computer:
    machine = Machine.here()
    return Computer(
        cpu=_cpu(),
        cores=machine.cores,
        memory=machine.memory,
        load=round(os.getloadavg()[0], 2),
        system=platform.platform(),
        versions={package: metadata.version(package) for package in PACKAGES},
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()

"""One run with faults: built from its seed, played, and held against the laws."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.journal.records import Record
from kvloom.lab.faults.faults import Client, FaultScenario
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.journal import ClientAnswer, Journal
from kvloom.lab.faults.laws import (
    NO_CRASH,
    NO_STARVATION,
    Broken,
    check_answer,
    check_fleet,
    check_idle,
    check_invariants,
    check_router,
)
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import FaultSimulation, Parts
from kvloom.lab.sim.recording import Recording
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.types.errors import ConfigError, KvloomError
from kvloom.types.request import SamplingParams, StartGenerate

ENDS_WITHIN: Final = 300.0  # virtual seconds in which every request has ended
PROMPTLY: Final = 60.0  # in which it has if nobody waits for a lease
MOST_TURNS: Final = 100_000  # of the event loop at one moment
TIDY: Final = 10.0  # after the last answer: what is held then is held by a lease, if there are any
SETTLED: Final = 100.0  # after the last fault: all that was late has come, all leases have run out


@dataclass(slots=True)
class Verdict:
    """The result of one run."""

    seed: int
    broken: list[Broken] = field(default_factory=list)
    """The laws that did not hold."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of events, by kind."""
    lines: list[str] = field(default_factory=list)
    """The run's own journal, if it was wanted."""
    records: list[Record] = field(default_factory=list)
    """The fleet's journal, if it was wanted."""
    recording: Recording = field(default_factory=Recording, compare=False)
    """The recording of the fleet for a page, if it was wanted."""


def run_seed(seed: int, *, journal: bool = False) -> Verdict:
    return run_scenario(draw_scenario(seed), journal=journal)


def run_scenario(scenario: FaultScenario, *, journal: bool = False, parts: Parts | None = None) -> Verdict:
    """Plays a scenario. It never raises: an error of the run is in the verdict."""
    verdict = Verdict(scenario.seed)
    try:
        run = _run(scenario, verdict, journal, parts or Parts())
        run_virtual(run, seed=scenario.seed, most_turns=MOST_TURNS)
    except Exception as error:  # noqa: BLE001 - whatever a run fails of is what it is for
        if not verdict.broken:
            verdict.broken.append(_crash(error))
    return verdict


async def _run(scenario: FaultScenario, verdict: Verdict, journal: bool, parts: Parts) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    told = Journal(clock, kept=journal)
    verdict.counts, verdict.lines = told.counts, told.lines
    simulation = FaultSimulation(scenario, clock, told, parts)
    if journal:
        verdict.records.extend(simulation.records.since(0))
        simulation.records.follow(verdict.records.extend)
        verdict.recording.keep(verdict.records)
        simulation.records.follow(verdict.recording.keep)
        verdict.recording.begin(simulation.sample)
    trial = asyncio.get_running_loop().create_task(_try(simulation, clock))
    both: list[asyncio.Future[Any]] = [trial, simulation.crash]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    told.kept = False
    if trial.done() and (error := trial.exception()):
        simulation.broken.append(_crash(error))
    elif simulation.crash.done():
        simulation.broken.append(_crash(simulation.crash.result()))
    verdict.broken = simulation.broken


async def _try(simulation: FaultSimulation, clock: LoopClock) -> None:
    """Plays the scenario, lets it settle and checks; then sees whether all that was promised can be had."""
    await simulation.start()
    seconds = PROMPTLY if simulation.scenario.tidy else ENDS_WITHIN
    late = await simulation.play(seconds)
    simulation.broken.extend(_late(answer, seconds) for answer in late)
    simulation.calm()
    if simulation.scenario.tidy:
        await clock.sleep(TIDY)
        await _check_idle(simulation)
    await clock.sleep(SETTLED)
    for answer in simulation.answers:
        if answer.over is not None:
            simulation.broken.extend(check_answer(answer, simulation.scenario))
    await _check_idle(simulation)
    if simulation.broken:
        return
    for answer in [*(await _ask_fleet(simulation)), *(await _ask_units(simulation))]:
        simulation.broken.extend(check_answer(answer, simulation.scenario))
        if answer.fate != "ended":
            simulation.broken.append(_late(answer))
    await _check_idle(simulation)
    await simulation.close()
    for host in simulation.hosts.values():
        simulation.broken.extend(check_invariants(host))


async def _check_idle(simulation: FaultSimulation) -> None:
    assert simulation.gateway is not None
    simulation.broken.extend(check_fleet(simulation.controller))
    simulation.broken.extend(check_router(simulation.gateway.router))
    units = simulation.controller.spec.units
    for host in simulation.hosts.values():
        unit = units.get(host.name)
        assert (host.process is not None) == (unit is not None and unit.wanted)
        if host.process is not None:
            simulation.broken.extend(check_idle(host, await host.process.engine.load()))
        simulation.broken.extend(check_invariants(host))


async def _ask_fleet(simulation: FaultSimulation) -> list[ClientAnswer]:
    """Asks the gateway for one answer of each model."""
    assert simulation.gateway is not None
    answers = [
        ClientAnswer(
            Client(0.0, _last(card.name, card.context_length // 2, f"last-{card.name}"), leaves=ENDS_WITHIN)
        )
        for card in await simulation.gateway.router.models()
        if card.context_length > 1
    ]
    for answer in answers:
        await simulation.gateway.answer(answer)
    return answers


async def _ask_units(simulation: FaultSimulation) -> list[ClientAnswer]:
    """Asks each unit for the longest request of each model, which needs all that the unit has promised."""
    return [
        await _ask_unit(host, card.name, card.context_length)
        for host in simulation.hosts.values()
        if host.process is not None
        for card in await host.process.engine.models()
        if card.context_length > 1
    ]


async def _ask_unit(host: FaultyHost, model: str, context: int) -> ClientAnswer:
    assert host.process is not None
    answer = ClientAnswer(Client(0.0, _last(model, context - 1, f"longest-{model}-{host.name}")))
    frames = host.process.engine.start_generate(answer.client.body)
    try:
        async with asyncio.timeout(ENDS_WITHIN), aclosing(frames):
            async for frame in frames:
                answer.take(frame)
        answer.fate = "ended"
    except KvloomError as error:
        answer.fate, answer.error = "failed", error
    except TimeoutError:
        answer.fate = "waits"
    return answer


def _last(model: str, length: int, request: str) -> StartGenerate:
    return StartGenerate(
        model=model,
        request=request,
        prompt=[(7 * i + length) % 400 for i in range(length)],
        sampling=SamplingParams(max_tokens=3, seed=1),
    )


def _late(answer: ClientAnswer, seconds: float = ENDS_WITHIN) -> Broken:
    name = answer.client.body.request
    if answer.error is not None:
        return Broken(NO_STARVATION, f"{name}: all is calm, but it is told: {answer.error.message}")
    return Broken(NO_STARVATION, f"{name} has waited for {seconds:g} s or more")


def _crash(error: BaseException) -> Broken:
    """Tells an error and where it came from, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno}" if last else ""
    return Broken(NO_CRASH, " ".join(f"{type(error).__name__}{where}: {error}".split()))


BROKEN, INTERRUPTED = 1, 130
MOST_JOBS: Final = 256
_AHEAD: Final = 10  # runs that a process is given at once
_WINDOW: Final = 5000  # that all are; so there may be any number


def chaos(
    *,
    seeds: int,
    first: int,
    jobs: int,
    replay: int | None,
    keep: Callable[[Verdict], None] = lambda _: None,
) -> int:
    """Returns the command's exit code. `keep` takes the verdict of a replayed run, with the fleet's own
    journal. Raises ConfigError."""
    _check(seeds, first, jobs, replay)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if replay is not None:
        verdict = run_quietly(replay, journal=True)
        keep(verdict)
        return tell(verdict)
    try:
        counts, broken = _run_all(range(first, first + seeds), jobs, console)
    except KeyboardInterrupt:
        print("kvloom: interrupted", file=sys.stderr)
        return INTERRUPTED
    if broken is not None:
        verdict = run_quietly(broken.seed, journal=True)
        keep(verdict)
        return tell(verdict)
    console.print(_summary(seeds, counts))
    return 0


def _check(seeds: int, first: int, jobs: int, replay: int | None) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds}; 1 or more is right")
    for flag, seed in (("--first", first), ("--replay", replay)):
        if seed is not None and seed < 0:
            raise ConfigError(f"{flag}: {seed}; a seed of 0 or more is right")
    if not 1 <= jobs <= MOST_JOBS:
        raise ConfigError(f"--jobs: {jobs}; 1 to {MOST_JOBS} is right")


def run_quietly(seed: int, *, journal: bool = False) -> Verdict:
    """Runs a seed without logs: what engines log of failed jobs would bury the rest."""
    logging.disable(logging.CRITICAL)
    try:
        return run_seed(seed, journal=journal)
    finally:
        logging.disable(logging.NOTSET)


def verdicts(seeds: range, jobs: int) -> Iterator[Verdict]:
    """Yields the verdicts in order, from `jobs` processes."""
    if jobs == 1:
        yield from map(run_quietly, seeds)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        for first in range(0, len(seeds), _WINDOW):
            with _without_interrupts():
                found = pool.map(run_quietly, seeds[first : first + _WINDOW], chunksize=_AHEAD)
            yield from found
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes, and the first one ends the others: those that are started here never hear
    it, from their first moment on. For this one it waits until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(verdict: Verdict) -> int:
    """Prints the journal and the verdict. Returns the exit code."""
    for line in verdict.lines:
        print(line)
    for broken in verdict.broken:
        print(f"seed {verdict.seed} breaks {broken}")
    if not verdict.broken:
        print(f"seed {verdict.seed} keeps the laws")
    return BROKEN if verdict.broken else 0


def _run_all(seeds: range, jobs: int, console: Console) -> tuple[Counter[str], Verdict | None]:
    """Returns what happened, and the first run that broke a law."""
    counts: Counter[str] = Counter()
    columns = TextColumn("seeds"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    quiet = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as progress:
        step = progress.add_task("", total=len(seeds))
        for verdict in verdicts(seeds, jobs):
            if verdict.broken:
                return counts, verdict
            counts.update(verdict.counts)
            progress.advance(step)
    return counts, None


def _summary(seeds: int, counts: Counter[str]) -> Table:
    table = Table(title=f"{seeds} runs keep the laws", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, count in sorted(counts.items()):
        table.add_row(what, f"{count:,}")
    return table

"""One run with faults: built from its seed, played, and held against the laws."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from kvloom.core.errors import KvloomError
from kvloom.core.request import StartGenerate
from kvloom.core.sampling import SamplingParams
from kvloom.sim.answer import Answer
from kvloom.sim.clock import LoopClock
from kvloom.sim.faults import Client, Ordeal
from kvloom.sim.host import Host
from kvloom.sim.journal import Journal
from kvloom.sim.laws import (
    NO_CRASH,
    NO_STARVATION,
    Broken,
    check_answer,
    check_idle,
    check_router,
    check_witnesses,
)
from kvloom.sim.loop import run_virtual
from kvloom.sim.restless import draw_ordeal
from kvloom.sim.world import Parts, World

PATIENCE: Final = 300.0  # virtual seconds in which every request has ended
PROMPTLY: Final = 60.0  # in which it has where nobody waits for a lease
MOST_TURNS: Final = 100_000  # of the event loop at one moment
TIDY: Final = 10.0  # after the last answer: what is held then is held by a lease, where there are any
SETTLED: Final = 100.0  # after the last fault: all that was late has come, all leases have run out


@dataclass(slots=True)
class Verdict:
    """broken: the laws that did not hold. counts: events by kind. lines: the journal, where it was wanted."""

    seed: int
    broken: list[Broken] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def run_seed(seed: int, *, journal: bool = False) -> Verdict:
    return run_ordeal(draw_ordeal(seed), journal=journal)


def run_ordeal(ordeal: Ordeal, *, journal: bool = False, parts: Parts | None = None) -> Verdict:
    """Never raises: what it fails of is in the verdict."""
    verdict = Verdict(ordeal.seed)
    try:
        run = _run(ordeal, verdict, journal, parts or Parts())
        run_virtual(run, seed=ordeal.seed, most_turns=MOST_TURNS)
    except Exception as error:  # noqa: BLE001 - whatever a run fails of is what it is for
        if not verdict.broken:
            verdict.broken.append(_crash(error))
    return verdict


async def _run(ordeal: Ordeal, verdict: Verdict, journal: bool, parts: Parts) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    told = Journal(clock, kept=journal)
    verdict.counts, verdict.lines = told.counts, told.lines
    world = World(ordeal, clock, told, parts)
    trial = asyncio.get_running_loop().create_task(_try(world, clock))
    both: list[asyncio.Future[Any]] = [trial, world.crash]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    told.kept = False
    if trial.done() and (error := trial.exception()):
        world.broken.append(_crash(error))
    elif world.crash.done():
        world.broken.append(_crash(world.crash.result()))
    verdict.broken = world.broken


async def _try(world: World, clock: LoopClock) -> None:
    """Play it, let it settle, and check; then see whether all that was promised can still be had."""
    await world.start()
    seconds = PROMPTLY if world.ordeal.tidy else PATIENCE
    late = await world.play(seconds)
    world.broken.extend(_late(answer, seconds) for answer in late)
    world.calm()
    if world.ordeal.tidy:
        await clock.sleep(TIDY)
        await _check_idle(world)
    await clock.sleep(SETTLED)
    for answer in world.answers:
        if answer.over is not None:
            world.broken.extend(check_answer(answer, world.ordeal))
    await _check_idle(world)
    if world.broken:
        return
    for answer in [*(await _ask_fleet(world)), *(await _ask_units(world))]:
        world.broken.extend(check_answer(answer, world.ordeal))
        if answer.fate != "ended":
            world.broken.append(_late(answer))
    await _check_idle(world)
    await world.close()
    for host in world.hosts.values():
        world.broken.extend(check_witnesses(host))


async def _check_idle(world: World) -> None:
    assert world.gateway is not None
    world.broken.extend(check_router(world.gateway.router))
    for host in world.hosts.values():
        assert (host.process is None) == (host.name in world.supervisor.away)
        if host.process is not None:
            world.broken.extend(check_idle(host, await host.process.engine.load()))
        world.broken.extend(check_witnesses(host))


async def _ask_fleet(world: World) -> list[Answer]:
    """A request for each model, as anybody would ask."""
    assert world.gateway is not None
    answers = [
        Answer(Client(0.0, _last(card.name, card.context_length // 2, f"last-{card.name}"), leaves=PATIENCE))
        for card in await world.gateway.router.models()
        if card.context_length > 1
    ]
    for answer in answers:
        await world.gateway.answer(answer)
    return answers


async def _ask_units(world: World) -> list[Answer]:
    """Of each unit the longest request of each model: it needs all that the unit has promised."""
    return [
        await _ask_unit(host, card.name, card.context_length)
        for host in world.hosts.values()
        if host.process is not None
        for card in await host.process.engine.models()
        if card.context_length > 1
    ]


async def _ask_unit(host: Host, model: str, context: int) -> Answer:
    assert host.process is not None
    answer = Answer(Client(0.0, _last(model, context - 1, f"longest-{model}-{host.name}")))
    frames = host.process.engine.start_generate(answer.client.body)
    try:
        async with asyncio.timeout(PATIENCE), aclosing(frames):
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


def _late(answer: Answer, seconds: float = PATIENCE) -> Broken:
    name = answer.client.body.request
    if answer.error is not None:
        return Broken(NO_STARVATION, f"{name}: all is calm, but it is told: {answer.error.message}")
    return Broken(NO_STARVATION, f"{name} has waited for {seconds:g} s or more")


def _crash(error: BaseException) -> Broken:
    """Where it came from, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno}" if last else ""
    return Broken(NO_CRASH, " ".join(f"{type(error).__name__}{where}: {error}".split()))

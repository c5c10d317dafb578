"""Whatever happens at whatever stage of a move, it ends well: at the source, at the target, elsewhere, or as
its caller wants; the tokens are the lone engine's, and no block is left."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing, suppress
from typing import cast

import pytest
from msgspec.structs import replace

from kvloom.lab.faults.invariants import lone_answer
from kvloom.router import migration
from kvloom.types.client import EngineClient
from kvloom.types.errors import KvloomError, OutOfBlocks, QueueFull, Unavailable
from tests.modelled import CONTEXT, VOCAB, expected, turns
from tests.modelled_units import generate, prompt, run
from tests.router.crowds import fill, until_waiting
from tests.router.scenes import POINTS, SOURCE, TARGET, Happening, Scene, Wire
from tests.router.worlds import World, world

LONG = 50
LEASE = 31.0


# -- what happens -----------------------------------------------------------------------------------------


def dies(unit: int) -> Happening:
    async def happening(scene: Scene) -> None:
        """Its process is gone, and its streams break."""
        made = scene.w.units[unit]
        scene.dead.add(unit)
        made.transport.plane.kill(made.transport)
        for name in made.engine._requests.ids:
            made.engine._requests.cancel(name, "error", "it dies")

    return happening


async def finish(scene: Scene) -> None:
    """The caller has it all, where it can; who stands still cannot."""
    await _quiet(scene)


async def abort(scene: Scene) -> None:
    await scene.w.router.abort("r")


async def abort_choice(scene: Scene) -> None:
    await scene.w.router.abort("r", scene.body.n - 1)


async def hang_up(scene: Scene) -> None:
    scene.task.cancel()
    await turns(5)


def preempts(unit: int) -> Happening:
    async def happening(scene: Scene) -> None:
        """More urgent requests that take all the room there is."""
        engine = scene.w.units[unit].engine
        for i in range(3):
            urgent = generate(prompt(80, first=i), request=f"urgent-{i}", max_tokens=10)
            async with aclosing(engine.start_generate(replace(urgent, priority=-9))) as frames:
                async for _ in frames:
                    pass

    return happening


def refuse(error: KvloomError) -> Happening:
    async def happening(scene: Scene) -> None:
        raise error

    return happening


def lease_ends(unit: int) -> Happening:
    async def happening(scene: Scene) -> None:
        await scene.w.units[unit].pass_time(LEASE)

    return happening


async def lost(scene: Scene) -> None:
    """The call, or its answer."""
    raise Unavailable("the connection broke")


async def doubled(scene: Scene) -> None:
    with suppress(KvloomError):
        await scene.again[-1]()


async def hangs(scene: Scene) -> None:
    """For longer than a request may stand still."""
    await asyncio.sleep(2 * migration.STANDSTILL)


async def another_move(scene: Scene) -> None:
    with pytest.raises(KvloomError):
        await scene.w.router.move("r", "unit-2")


EVENTS: dict[str, Happening] = {
    "source dies": dies(SOURCE),
    "target dies": dies(TARGET),
    "finish": finish,
    "abort": abort,
    "abort of a choice": abort_choice,
    "hang up": hang_up,
    "preempted at the source": preempts(SOURCE),
    "preempted at the target": preempts(TARGET),
    "out of blocks": refuse(OutOfBlocks("no room")),
    "queue full": refuse(QueueFull("too many", retry_after=1)),
    "the source's lease ends": lease_ends(SOURCE),
    "the target's lease ends": lease_ends(TARGET),
    "message lost": lost,
    "message doubled": doubled,
    "nobody answers": hangs,
    "another move": another_move,
}
REFUSALS = {"out of blocks", "queue full"}
LEASED = {"source dies", "target dies", "message lost", "message doubled", "nobody answers", "hang up"}
STOPPED = {"abort", "abort of a choice", "hang up"}


PAIRS = [
    (point, event, after)
    for point, event, after in itertools.product(POINTS, EVENTS, (False, True))
    if (event not in REFUSALS or (POINTS[point][1] in ("prep_recv", "start_generate") and not after))
    and (event != "nobody answers" or point in ("told to hold", "the last copy", "handing over"))
]


@pytest.mark.parametrize(("point", "event", "after"), PAIRS)
def test_it_ends_well(point: str, event: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if event == "nobody answers":
        monkeypatch.setattr(migration, "STANDSTILL", 0.25)
    one = generate(prompt(21), temperature=1.0, max_tokens=LONG)
    stop = lone_answer(one, 0, context=CONTEXT, vocab=VOCAB)[30]
    three = replace(one, n=3, sampling=replace(one.sampling, stop_token_ids=(stop,)))
    for body in (one, three) if after else (three,):
        run(lambda body=body: _play(Scene(point, after, EVENTS[event], body), event))  # type: ignore[misc]


WAITING = [
    (point, event, after)
    for point, event, after in PAIRS
    if POINTS[point][1] in ("start_generate", "abort")
    and event != "preempted at the source"  # nobody there could be
]


@pytest.mark.parametrize(("point", "event", "after"), WAITING)
def test_one_that_waits_ends_well(
    point: str, event: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it has been computed, and nothing is copied."""
    if event == "nobody answers":
        monkeypatch.setattr(migration, "STANDSTILL", 0.25)
    one = generate(prompt(21), temperature=1.0, max_tokens=LONG)
    told = replace(one.sampling, prompt_logprobs=1)
    bodies = [
        one,
        replace(one, sampling=told, interval=4),
        replace(one, sampling=told, prompt=prompt(1), interval=3),  # known at once
        replace(one, sampling=replace(told, max_tokens=1), priority=-1),
    ]
    for body in bodies:
        scene = Scene(point, after, EVENTS[event], body, told=True)
        run(lambda scene=scene: _play(scene, event, waits=True))  # type: ignore[misc]


async def _play(scene: Scene, event: str, *, waits: bool = False) -> None:
    """waits: for room at the source, until the move is over."""
    numbers = iter(range(3))
    async with world(3, wire=lambda unit: cast(EngineClient, Wire(scene, next(numbers), unit))) as scene.w:
        w = scene.w
        crowd = await fill(w.units[SOURCE], len(scene.body.prompt)) if waits else []
        task = w.ask(scene.body)
        await (until_waiting(w.units[SOURCE]) if waits else w.until("r", 2))
        scene.task = task
        [outcome] = await asyncio.gather(w.router.move("r", "unit-1"), return_exceptions=True)
        assert outcome is None or isinstance(outcome, KvloomError)
        problem = "did not let request r in" if waits else "stood still"
        assert event != "nobody answers" or problem in str(outcome)
        assert scene.happened or event == "nobody answers"  # a slow machine may not come so far
        for reader in crowd:
            await w.units[SOURCE].engine.abort(reader.body.request)
        await _over(scene)
        with suppress(asyncio.CancelledError):
            await task
        _check(scene, event)
        await asyncio.gather(*(reader.task for reader in crowd))
        assert await _all_free(w, leases=event in LEASED), "blocks are left"


async def _over(scene: Scene) -> None:
    """The stream is; where it stands still because of a call that came twice, after a lease."""
    for _ in range(3):
        await _quiet(scene)
        if scene.task.done():
            return
        for number in {0, 1, 2} - scene.dead:
            await scene.w.units[number].pass_time(LEASE)


async def _quiet(scene: Scene) -> None:
    """The stream is over, or nothing comes any more."""
    for _ in range(40):
        if scene.task.done():
            return
        await turns(10)


def _check(scene: Scene, event: str) -> None:
    answer, last = scene.w.answers["r"], scene.body.n - 1
    whole = expected(scene.w.units[2].executor, scene.body)
    if event not in STOPPED:
        assert answer.tokens == whole
        assert (answer.prompt is not None) == (scene.body.sampling.prompt_logprobs is not None)
    for choice, tokens in answer.tokens.items():
        assert tokens == whole[choice][: len(tokens)]
        if event != "abort" and not (event == "abort of a choice" and choice == last) and event != "hang up":
            assert tokens == whole[choice]
    assert len(answer.ends) == scene.body.n or event == "hang up"
    if event in ("abort", "abort of a choice"):
        assert answer.ends[last].reason == "abort"


async def _all_free(w: World, *, leases: bool) -> bool:
    """leases: what nobody has given back may end with its lease."""
    for _ in range(1 + leases):
        await turns(100)
        for unit in w.units:
            await unit.settled()
        if all(unit.engine.pool.available == unit.engine.pool.total for unit in w.units):
            return True
        for unit in w.units if leases else ():
            await unit.pass_time(LEASE)
    return False

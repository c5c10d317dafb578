"""Running requests move between modelled engines, and their callers see nothing of it: law 2."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.router import migration
from kvloom.router.migration import Migration, MigrationStage
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.request import EndEvent, Event, StartGenerate
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend, Sent, Standing
from tests.modelled import turns
from tests.modelled_units import Unit, generate, prompt, run
from tests.processes import DEADLINE
from tests.router.worlds import world

LONG = 55


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 37])
async def test_to_and_fro(n: int, length: int) -> None:
    """Nothing is computed twice but the prompt of choices that begin together."""
    async with world(2) as w:
        body = replace(generate(prompt(length), temperature=1.0, max_tokens=LONG), n=n)
        task = w.ask(body)
        await w.until("r", 1)
        await w.router.move("r", "unit-1")
        with suppress(BadRequest):  # it may have ended before it could come back
            await w.router.move("r", "unit-0")
            await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert w.computed == length + n * (LONG - 1)
        assert w.units[1].computed > 0


def test_long_contexts_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent twice."""
    monkeypatch.setattr(migration, "PIECE", 10)  # of which two pages of 4 are full
    monkeypatch.setattr(migration, "PAUSE", 0.0)
    ends = []

    async def test() -> None:
        async with world(2) as w:
            body = generate(prompt(41), temperature=1.0, max_tokens=LONG)
            task = w.ask(body)
            await w.until("r", 3)
            real = w.units[0].engine.remote_send

            async def noted(order: RemoteSend) -> Sent:
                ends.append((order.begin, order.end))
                return await real(order)

            w.units[0].engine.remote_send = noted  # type: ignore[method-assign,assignment]
            await w.router.move("r", "unit-1")
            await task
            w.check(body)
            assert w.computed == 41 + LONG - 1

    run(test)
    assert ends[:5] == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]


def test_pieces_leave_nothing_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the target nor here, and each is asked for with what it needs of the context."""
    monkeypatch.setattr(migration, "PIECE", 12)
    monkeypatch.setattr(migration, "PAUSE", 0.0)
    kept: list[int] = []

    async def test() -> None:
        async with world(2) as w:
            body = generate(prompt(41), max_tokens=LONG)
            task = w.ask(body)
            await w.until("r", 1)
            real = w.units[1].engine.prep_recv

            async def counted(asked: PrepRecv) -> Prepared:
                assert asked.end == len(asked.prompt)
                return await real(asked)

            async def settle(move: Migration, verb: Any) -> None:
                kept.append(len(move.rooms))
                await settled(move, verb)

            settled = Migration.settle
            monkeypatch.setattr(Migration, "settle", settle)
            w.units[1].engine.prep_recv = counted  # type: ignore[method-assign, assignment]
            await w.router.move("r", "unit-1")
            await task
            w.check(body)

    run(test)
    [rooms] = kept
    assert rooms <= 1  # the last piece's


async def test_who_ends_meanwhile_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is still to send, and may never come to it: the room goes with the request."""
    async with world(2) as w:
        body = generate(prompt(21), max_tokens=9)
        task = w.ask(body)
        await w.until("r", 4)
        asked, given_up = asyncio.Event(), asyncio.Event()

        async def never(order: RemoteSend) -> Sent:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
            raise AssertionError

        monkeypatch.setattr(w.units[0].engine, "remote_send", never)
        with pytest.raises(BadRequest, match="request r has ended"):
            await w.router.move("r", "unit-1")
        assert asked.is_set()
        assert given_up.is_set()
        assert not w.units[1].transport.ledger
        await task
        w.check(body)


async def test_a_target_that_is_drained_meanwhile_gets_nothing() -> None:
    """Room that is made there is no call, so a drain does not wait for it."""
    async with world(2) as w:
        body = generate(prompt(21), max_tokens=LONG)
        task = w.ask(body)
        await w.until("r", 4)
        real = w.units[1].engine.prep_recv

        async def withdrawn(asked: PrepRecv) -> Prepared:
            w.router.units["unit-1"].withdraw()
            return await real(asked)

        w.units[1].engine.prep_recv = withdrawn  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable, match="unit-1 takes no requests any more"):
            await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert w.units[1].computed == 0


async def test_a_move_of_what_goes_on_under_another_name_is_none() -> None:
    """Its stream breaks while it stands still, and begins again at the source before that has answered."""
    async with world(2) as w:
        source = w.units[0].engine
        generates, broken = source.start_generate, asyncio.Event()

        async def breaking(asked: StartGenerate) -> AsyncGenerator[list[Event], None]:
            async with aclosing(generates(asked)) as frames:
                async for frame in frames:
                    yield frame
                    if asked.request == "r" and broken.is_set():
                        raise Unavailable("connection reset by peer")

        async def held(request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
            broken.set()
            while w.router.sessions["r"].running is None or w.router.sessions["r"].name == "r":
                await turns(1)
            return Standing(made=w.router.sessions["r"].progress.made, sent=[one.end or 0 for one in sends])

        source.start_generate, source.hold = breaking, held  # type: ignore[method-assign, assignment]
        body = generate(prompt(21), max_tokens=200)
        task = w.ask(body)
        await w.until("r", 4)
        w.replica(1).queue += 100_000  # so that it begins again where it was
        with pytest.raises(BadRequest, match="request r has gone on otherwise"):
            await w.router.move("r", "unit-1")
        w.replica(1).queue -= 100_000
        await task
        w.check(body)


async def test_what_is_handed_over_moves_no_second_time_before_its_stream_has() -> None:
    """The source has heard that it is to end the request, and comes to it late."""
    async with world(3) as w:
        source, heard = w.units[0].engine, list[str]()
        aborts = source.abort

        async def later(request: str, choice: int | None = None) -> None:
            heard.append(request)

        source.abort = later  # type: ignore[method-assign]
        body = generate(prompt(21), max_tokens=LONG)
        task = w.ask(body)
        await w.until("r", 3)
        await w.router.move("r", "unit-1")
        with pytest.raises(BadRequest, match="moves already"):
            await w.router.move("r", "unit-2")
        source.abort = aborts  # type: ignore[method-assign]
        await aborts(heard[0])
        await task
        w.check(body)
        assert w.units[2].computed == 0


async def test_what_the_cache_spared_it_is_told_as_of_where_it_began() -> None:
    async with world(2) as w:
        first = generate(prompt(16), request="before", max_tokens=1)
        await w.ask(first)
        task = w.ask(generate(prompt(16) + prompt(9, first=5), max_tokens=LONG))
        await w.until("r", 2)
        running = w.router.sessions["r"].running
        assert running is not None
        [source] = [i for i in range(2) if running.replica is w.replica(i)]
        await w.router.move("r", f"unit-{1 - source}")
        await task
        assert w.answers["r"].ends[0].cached_tokens == (16 if source == 0 else 0)


async def test_what_cannot_be() -> None:
    async with world(2) as w:
        with pytest.raises(BadRequest, match="does not run here"):
            await w.router.move("r", "unit-1")
        body = generate(prompt(8), max_tokens=LONG)
        task = w.ask(body)
        await w.until("r", 3)
        for to, why in (("unit-0", "runs there already"), ("unit-9", "does not serve")):
            with pytest.raises(BadRequest, match=why):
                await w.router.move("r", to)
        await task
        w.check(body)


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("kind", ["prep_recv", "remote_send", "hold", "start_generate", "abort"])
async def test_whatever_verb_fails_the_stream_goes_on(kind: str, at: int) -> None:
    """The verb's call number `at`, at either engine, fails after or before it was done."""
    async with world(2) as w:
        body = replace(generate(prompt(21), temperature=1.0, max_tokens=LONG), n=2)
        task = w.ask(body)
        await w.until("r", 4)
        count = 0
        for unit in w.units:
            real = getattr(unit.engine, kind)

            def failing(*args: object, real: object = real) -> object:
                nonlocal count
                count += 1
                if count == at + 1:
                    raise Unavailable("the connection broke")
                return real(*args)  # type: ignore[operator]

            setattr(unit.engine, kind, failing)
        for to in ("unit-1", "unit-0"):
            with suppress(KvloomError):
                await w.router.move("r", to)
        await task
        w.check(body)


@pytest.mark.parametrize("verb", ["resume", "abort"])
async def test_what_the_source_has_not_heard_it_is_told_again(verb: str) -> None:
    """Before the lease ends, after which it would go on by itself."""

    async def refuses(body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        raise QueueFull("too many", retry_after=1)
        yield []

    async with world(2) as w:
        body = generate(prompt(21), temperature=1.0, max_tokens=LONG)
        task = w.ask(body)
        await w.until("r", 4)
        source, target = w.units[0].engine, w.units[1].engine
        real, told = getattr(source, verb), []

        async def lost(request: str, *rest: object) -> None:
            told.append(request)
            if len(told) < 3:
                raise Unavailable("the connection broke")
            await real(request, *rest)

        setattr(source, verb, lost)
        if verb == "resume":
            target.start_generate = refuses  # type: ignore[method-assign]
        with suppress(QueueFull):
            await w.router.move("r", "unit-1")
        async with asyncio.timeout(DEADLINE):
            await task
        assert told[:3] == ["r"] * 3
        w.check(body)


async def test_a_target_without_room_changes_nothing() -> None:
    async with world(2, blocks=100) as w:
        there = [generate(prompt(45, first=i), request=f"q{i}", max_tokens=40) for i in range(2)]
        filling = [asyncio.create_task(_drain(w.units[1], one)) for one in there]
        await turns(20)
        body = generate(prompt(40), max_tokens=30)
        task = w.ask(body)
        await w.until("r", 2)
        with suppress(KvloomError):
            await w.router.move("r", "unit-1")
        await task
        w.check(body)
        await asyncio.gather(*filling)


async def _drain(unit: Unit, body: StartGenerate) -> None:
    async for _ in unit.engine.start_generate(body):
        pass


@pytest.mark.parametrize("seed", range(25))
async def test_many_move_at_random_and_leave_at_random(seed: int) -> None:
    rng = random.Random(seed)
    async with world(3, blocks=rng.choice([80, 140, 260])) as w:
        bodies = [
            replace(
                generate(
                    prompt(rng.randint(1, 40), first=rng.randint(0, 2)),
                    request=f"r{i}", temperature=1.0, max_tokens=rng.randint(1, 30),
                    stop_token_ids=tuple(range(0, 1000, 40)) if rng.random() < 0.3 else (),
                ),
                n=rng.choice([1, 1, 2]),
            )
            for i in range(8)
        ]  # fmt: skip
        tasks = {body.request: w.ask(body) for body in bodies}
        gone = set()
        moves = []
        while not all(task.done() for task in tasks.values()):
            await turns(rng.randint(1, 9))
            name = rng.choice(bodies).request
            moves.append(asyncio.create_task(w.router.move(name, f"unit-{rng.randrange(3)}")))
            if rng.random() < 0.05:
                gone.add(name)
                tasks[name].cancel()
        outcomes = await asyncio.gather(*moves, return_exceptions=True)
        assert all(one is None or isinstance(one, KvloomError) for one in outcomes), outcomes
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for body in bodies:
            if body.request not in gone:
                w.check(body)


def test_illegal_steps_of_one_that_waits() -> None:
    move = object.__new__(Migration)
    move.stage = MigrationStage.WAITING
    for stage in (MigrationStage.COPYING, MigrationStage.HELD):
        with pytest.raises(ValueError, match="waiting cannot become"):
            move.become(stage)


def test_illegal_steps() -> None:
    move = object.__new__(Migration)
    move.stage = MigrationStage.COPYING
    with pytest.raises(ValueError, match="copying cannot become handed"):
        move.become(MigrationStage.HANDED)
    move.become(MigrationStage.HELD)
    move.become(MigrationStage.HANDED)
    for stage in MigrationStage:
        with pytest.raises(ValueError, match="handed cannot become"):
            move.become(stage)


@pytest.mark.parametrize("broken", [False, True])
async def test_a_target_that_refused_a_move_may_still_be_asked(broken: bool) -> None:
    """broken: the source answers that it has failed to resume, which ends nobody else's requests."""
    async with world(2) as w:
        source, target = (unit.engine for unit in w.units)
        runs, begins, resumes = source.start_generate, target.start_generate, source.resume
        fails = asyncio.Event()

        async def failing(body: StartGenerate) -> AsyncGenerator[list[Event], None]:
            async for frame in runs(body):
                yield [EndEvent(0, "error", message="worn out")] if fails.is_set() else frame
                if fails.is_set():
                    return

        async def full(_: StartGenerate) -> AsyncGenerator[list[Event], None]:
            raise OutOfBlocks("full just now")
            yield []

        async def resume(request: str) -> None:
            await resumes(request)
            if broken:
                raise KvloomError("the engine failed")

        source.start_generate, target.start_generate = failing, full  # type: ignore[method-assign,assignment]
        source.resume = resume  # type: ignore[method-assign]
        body = generate(prompt(9), max_tokens=LONG)
        task = w.ask(body)
        await w.until("r", 3)
        with pytest.raises(OutOfBlocks, match="full just now"):
            await w.router.move("r", "unit-1")
        target.start_generate = begins  # type: ignore[method-assign]
        fails.set()
        await task
        w.check(body)

"""A request of which engines die is tried at no other, so that it cannot end them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program
from kvloom.router.programs import PROGRAMS
from kvloom.router.quarantine import (
    DEATHS_AFTER,
    DEATHS_BEFORE,
    DEATHS_IN_ALL,
    MOST_QUARANTINED,
    QUARANTINE_SECONDS,
    Quarantine,
)
from kvloom.types.errors import ConnectionLost, KvloomError, RequestQuarantined, Unavailable
from kvloom.types.request import EndEvent, Event, StartGenerate
from tests.router.fleets import Answer, Fleets, ManualClock, ask, ask_well, begin, body, routed, turns
from tests.router.ledger import LedgerEngine
from tests.router.managed import SHORT, managed

UNITS = 7
POISON = 9  # tokens of a prompt of which engines die


def dies(engine: LedgerEngine, frames: int, *, token: int | None = None) -> None:
    """Dies of a request that is poison, after so many of its frames; or after the second, as it computes this
    token of the answer."""
    real = engine.start_generate

    async def dying(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
        made = sum(len(one.tokens) for one in request.made)
        left = frames if token is None else frames + token - made
        async with aclosing(real(request)) as told:
            while len(request.prompt) != POISON or left:
                frame = await anext(told, None)
                if frame is None:
                    return
                yield frame
                left -= 1
        engine.restart()
        engine.down = True
        raise ConnectionLost("the connection broke")

    engine.start_generate = dying  # type: ignore[method-assign,assignment]


def down(fleets: Fleets) -> int:
    return list(fleets.router.services.values()).count("down")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("frames", "most"),
    [(0, DEATHS_BEFORE), (1, 2 * DEATHS_BEFORE), (2, DEATHS_BEFORE)],
    ids=["before it is let in", "before it is told to have begun", "before its first token"],
)
async def test_one_that_engines_die_of_is_given_up(program: str, frames: int, most: int) -> None:
    async with routed(UNITS, program) as fleets:
        for engine in fleets.engines:
            dies(engine, frames)
        with pytest.raises(RequestQuarantined, match=f"{most} engines died before its first token") as told:
            await ask(fleets.router, body(POISON))
        assert (told.value.status, told.value.code) == (400, "request_quarantined")
        assert down(fleets) == most
        await ask_well(fleets.router, body(20))  # the others live on


async def test_deaths_with_and_without_word_that_it_has_begun_add_up() -> None:
    """Of the first engine nothing was heard but that the request was let in, of the next it had begun."""
    async with routed(UNITS) as fleets:
        for engine, frames in zip(fleets.engines, [1, 2, 1, 1, 1, 1, 1], strict=True):
            dies(engine, frames)
        with pytest.raises(RequestQuarantined, match="3 engines died before its first token"):
            await ask(fleets.router, body(POISON))
        assert down(fleets) == 3


async def test_one_that_has_tokens_is_given_up_before_it_is_told_to_have_begun() -> None:
    """The first engine dies at the second token, each other as it begins with what there is."""
    units = 2 * DEATHS_AFTER + 2
    async with routed(units) as fleets:
        for engine, frames in zip(fleets.engines, [3, *[1] * (units - 1)], strict=True):
            dies(engine, frames)
        most = 2 * DEATHS_AFTER - 1  # the first one counts twice
        with pytest.raises(RequestQuarantined, match=f"{most} engines died after 1 tokens"):
            await ask(fleets.router, body(POISON, tokens=20))
        assert down(fleets) == most


async def test_after_the_first_token_it_may_live_longer() -> None:
    """Each engine dies at its second token."""
    async with routed(UNITS) as fleets:
        for engine in fleets.engines:
            dies(engine, 2, token=1)
        answer = Answer()

        async def reading() -> None:
            async for frame in fleets.router.start_generate(body(POISON, tokens=20)):
                answer.take(frame)

        with pytest.raises(RequestQuarantined, match=f"{DEATHS_AFTER} engines died after 1 tokens"):
            await reading()
        assert down(fleets) == DEATHS_AFTER
        assert len(answer.tokens[0]) == 1


async def test_one_that_is_not_to_blame_lives_long() -> None:
    """Each engine makes a token more before it dies."""
    async with routed(DEATHS_IN_ALL + 1) as fleets:
        for engine in fleets.engines:
            dies(engine, 3)
        with pytest.raises(RequestQuarantined, match=f"and {DEATHS_IN_ALL} in all"):
            await ask(fleets.router, body(POISON, tokens=DEATHS_IN_ALL + 4))
        assert down(fleets) == DEATHS_IN_ALL


async def test_one_death_is_forgiven() -> None:
    async with routed(3) as fleets:
        dies(fleets.engines[0], 2)
        await ask_well(fleets.router, body(POISON))
        assert down(fleets) == 1


async def test_who_finds_nobody_is_not_to_blame() -> None:
    """Engines that were dead already die of nobody, however many there are."""
    async with routed(UNITS) as fleets:
        for engine in fleets.engines[:-1]:
            engine.down = True
        await ask_well(fleets.router, body())


async def test_a_broken_connection_is_no_death() -> None:
    async with routed(3) as fleets:
        broken = list[LedgerEngine]()

        def breaks(engine: LedgerEngine) -> None:
            real = engine.start_generate

            async def breaking(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
                async with aclosing(real(request)) as frames:
                    yield await anext(frames)
                    if len(broken) < 3:
                        broken.append(engine)
                        raise ConnectionLost("reset by peer")
                    async for frame in frames:
                        yield frame

            engine.start_generate = breaking  # type: ignore[method-assign,assignment]

        for engine in fleets.engines:
            breaks(engine)
        await ask_well(fleets.router, body())
        assert len(broken) == 3


async def test_ends_that_were_ordered_are_no_deaths() -> None:
    """The unit is restarted again and again, and its process is gone before the request's first token."""
    async with managed(1, seconds=SHORT) as played:
        [engine] = played.fleets.engines
        engine.answering.clear()
        asking = await begin(ask_well(played.router, body()))
        for _ in range(DEATHS_BEFORE + 1):
            assert not asking.done()
            played.processes.starts.clear()
            restarting = await begin(played.orders.restart("a"))
            await played.fleets.clock.advance(SHORT)
            await turns()
            assert engine.down
            engine.answering.set()  # what hangs there finds that its engine is gone
            await turns()
            engine.answering.clear()
            played.processes.starts.set()
            await restarting
            await turns()
        engine.answering.set()
        await asking


async def test_a_crash_under_a_controller_counts() -> None:
    async with managed(3) as played:
        for engine in played.fleets.engines:
            real = engine.start_generate

            async def dying(
                request: StartGenerate, engine: LedgerEngine = engine, real: Callable[..., Frames] = real
            ) -> AsyncGenerator[list[Event], None]:
                frames = real(request)
                for _ in range(2):
                    yield await anext(frames)
                played.processes.die(engine.name)
                raise ConnectionLost("the connection broke")

            engine.start_generate = dying  # type: ignore[method-assign,assignment]
        with pytest.raises(RequestQuarantined):
            await ask(played.router, body())
        assert sorted(played.states().values()) == ["down", "down", "up"]


async def test_a_program_that_goes_on_by_itself_is_held_to_it() -> None:
    """It asks one replica after the other, whatever they say."""

    async def stubborn(call: Call, fleet: Fleet) -> Frames:
        for replica in fleet.up:
            try:
                async for frame in call.start_generate(replica):
                    yield frame
            except KvloomError:
                continue

    async with routed(UNITS, Program("stubborn", stubborn, {})) as fleets:
        for engine in fleets.engines:
            dies(engine, 0)
        with pytest.raises(KvloomError):
            await ask(fleets.router, body(POISON))
        assert down(fleets) == DEATHS_BEFORE


async def test_what_a_client_sends_again_costs_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The same request is refused for a while, with any seed; another client's, and another prompt, are
    not."""
    async with routed(UNITS) as fleets:
        for engine in fleets.engines:
            dies(engine, 0)
        first = body(POISON)
        with caplog.at_level(logging.ERROR), pytest.raises(RequestQuarantined):
            await ask(fleets.router, first)
        [line] = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        again = replace(body(POISON), sampling=replace(first.sampling, seed=99))
        with pytest.raises(RequestQuarantined, match="engines died of it") as told:
            await ask(fleets.router, again)
        digest = told.value.message.partition("(")[2].partition(")")[0]
        assert f"({digest})" in line
        assert down(fleets) == DEATHS_BEFORE
        await ask_well(fleets.router, body(POISON + 1))
        with pytest.raises(RequestQuarantined):  # it has to find out for itself
            await ask(fleets.router, replace(body(POISON), tenant="another"))
        assert down(fleets) == 2 * DEATHS_BEFORE
        for engine in fleets.engines:
            engine.down = False
        await fleets.clock.advance(QUARANTINE_SECONDS)
        with pytest.raises(RequestQuarantined):
            await ask(fleets.router, body(POISON))
        assert down(fleets) == DEATHS_BEFORE


async def test_few_are_remembered() -> None:
    quarantine, bodies = Quarantine(ManualClock()), [body(at + 1) for at in range(MOST_QUARANTINED + 1)]
    for one in bodies:
        quarantine.add(one)
    quarantine.check(bodies[0])
    for one in bodies[1:]:
        with pytest.raises(RequestQuarantined):
            quarantine.check(one)


async def test_an_error_that_is_the_requests_own_goes_to_its_client() -> None:
    """Its guide has failed: no other engine would do better."""
    async with routed(3) as fleets:
        asked: list[str] = []
        for engine in fleets.engines:

            async def failing(
                request: StartGenerate, name: str = engine.name
            ) -> AsyncGenerator[list[Event], None]:
                asked.append(name)
                yield []
                yield [EndEvent(0, "error", message="no", code="guide_failed", param="guided_regex")]

            engine.start_generate = failing  # type: ignore[method-assign,assignment]
        answer = await ask(fleets.router, body())
        assert answer.ends[0].code == "guide_failed"
        assert asked == ["a"]


async def test_a_death_of_one_that_waits_for_a_restart_is_no_endless_wait() -> None:
    """The only unit dies of it, comes back, and dies of it again."""
    async with routed(1) as fleets:
        [engine] = fleets.engines
        dies(engine, 2)
        asking = asyncio.create_task(ask(fleets.router, body(POISON)))
        await turns()
        assert not asking.done()
        engine.down = False
        await fleets.clock.advance(10.0)
        with pytest.raises(RequestQuarantined):
            await asking
        with pytest.raises(Unavailable):
            await ask(fleets.router, body(20))

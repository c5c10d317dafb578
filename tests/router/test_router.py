"""The router as a server: its models, its units going down and up, programs changed while it serves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import pytest

from kvloom.router.program import load_program
from kvloom.router.programs import PROGRAMS
from kvloom.router.router import Router
from kvloom.types.errors import BadRequest, Unavailable, UnknownModel
from kvloom.types.request import EndEvent, TokenEvent
from tests.router.fleets import ManualClock, ask, ask_well, begin, body, routed, turns
from tests.router.ledger import PAGE, LedgerEngine, World, card


def count_calls(engine: LedgerEngine, verb: str, clock: ManualClock | None = None) -> list[float]:
    """When it is called, from now on."""
    times: list[float] = []
    real = getattr(engine, verb)

    async def counted() -> object:
        times.append(round((clock or ManualClock()).now(), 3))
        return await real()

    setattr(engine, verb, counted)
    return times


async def test_models_are_everybodys() -> None:
    world = World()
    world.engine("a", card("m", context_length=100), card("left"))
    world.engine("b", card("m", context_length=90), card("right"))
    async with Router(world.engines, load_program("data_parallel"), ManualClock()) as router:
        served = await router.models()
        assert [(one.name, one.context_length) for one in served] == [
            ("m", 90),
            ("left", 512),
            ("right", 512),
        ]
        for model, units in (("left", {"a"}), ("right", {"b"}), ("m", {"a", "b"})):
            world.journal.clear()
            for _ in range(4):
                await ask_well(router, body(model=model))
            assert {call.unit for call in world.journal} == units
        with pytest.raises(UnknownModel, match=r"`other` does not exist .*; served: left, m, right"):
            await ask(router, body(model="other"))


@pytest.mark.parametrize("changed", [{"vocab_size": 999}, {"tokenizer": "[]"}, {"eos_token_ids": (2,)}])
async def test_replicas_that_speak_differently_are_refused(changed: dict[str, Any]) -> None:
    world = World()
    world.engine("a", card())
    world.engine("b", card(**changed))
    async with Router(world.engines, load_program("data_parallel"), ManualClock()) as router:
        [field] = changed
        with pytest.raises(Unavailable, match=f"m differs in {field} between a and b") as error:
            await router.models()
        assert "\n" not in error.value.message
        assert router.services == {"a": "up", "b": "down"}


async def test_loads_are_those_that_answer() -> None:
    async with routed(3) as fleets:
        assert set(await fleets.router.loads()) == {"a", "b", "c"}
        fleets.engines[1].down = True
        assert set(await fleets.router.loads()) == {"a", "c"}
        assert fleets.router.services == {"a": "up", "b": "down", "c": "up"}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("lost", ["a", "b"])
async def test_a_unit_that_goes_down_and_comes_back(program: str, units: int, lost: str) -> None:
    async with routed(units, program) as fleets:
        if lost not in fleets.world.engines:
            return
        await ask_well(fleets.router, body(20))
        engine = fleets.world.engines[lost]
        engine.down = True
        engine.restart()
        for _ in range(4):
            if units == 1:
                with pytest.raises(Unavailable, match=r"cannot be reached|no unit that serves"):
                    await ask(fleets.router, body(20))
            else:
                await ask_well(fleets.router, body(20))
        await fleets.router.loads()  # who was not asked is noticed so
        assert fleets.router.services[lost] == "down"
        engine.down = False
        await fleets.clock.advance(5)
        assert fleets.router.services[lost] == "up"
        fleets.journal.clear()
        async with asyncio.TaskGroup() as group:
            for first in range(6):
                group.create_task(ask_well(fleets.router, body([first, *range(40)])))
        assert lost in {call.unit for call in fleets.journal}


async def test_a_lost_unit_is_asked_ever_more_slowly() -> None:
    async with routed(1) as fleets:
        [engine] = fleets.engines
        asked = count_calls(engine, "models", fleets.clock)
        engine.down = True
        with suppress(Unavailable):
            await ask(fleets.router, body())
        await fleets.clock.advance(20)
        assert asked == [0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3]
        with pytest.raises(Unavailable, match=r"no unit that serves m is up \(of a\)") as error:
            await ask(fleets.router, body())
        assert error.value.retry_after
        engine.down = False
        await fleets.router.units["a"].admit()
        await ask_well(fleets.router, body())


async def test_units_that_are_not_there_yet() -> None:
    world, clock = World(), ManualClock()
    world.engine("a").down = True
    async with Router(world.engines, load_program("data_parallel"), clock) as router:
        with pytest.raises(Unavailable, match=r"no unit is up \(of a\)"):
            await router.models()
        world.engines["a"].down = False
        await turns()
        await clock.advance(1)
        assert [one.name for one in await router.models()] == ["m"]
        await ask_well(router, body())


async def test_a_withdrawn_unit_finishes_and_gets_nothing_new() -> None:
    async with routed(2) as fleets:
        first, _ = fleets.engines
        first.gate.clear()
        running = await begin(ask_well(fleets.router, body()))
        assert first.streams
        fleets.router.units["a"].withdraw()
        for _ in range(3):
            await ask_well(fleets.router, body())
        assert {call.unit for call in fleets.journal[1:]} == {"b"}
        await fleets.clock.advance(60)
        assert fleets.router.services == {"a": "draining", "b": "up"}
        first.gate.set()
        await running
        await fleets.router.units["a"].admit()
        await ask_well(fleets.router, body())
        assert fleets.journal[-1].unit == "a"


async def test_a_unit_that_is_withdrawn_while_it_is_asked() -> None:
    async with routed(2) as fleets:
        engine = fleets.engines[0]
        asked, may_answer = count_calls(engine, "models"), asyncio.Event()
        for down in (False, True):
            engine.down, engine.answers = down, may_answer
            may_answer.clear()
            asking = await begin(fleets.router.units["a"].admit())
            fleets.router.units["a"].withdraw()
            may_answer.set()
            await asking
            asked.clear()
            await fleets.clock.advance(60)
            assert not asked
            assert fleets.router.services == {"a": "drained", "b": "up"}


async def test_calls_that_fail_together_ask_once_whether_the_unit_lives() -> None:
    async with routed(2) as fleets:
        engine = fleets.engines[0]
        engine.gate.clear()
        asked = count_calls(engine, "load")
        tasks = [asyncio.create_task(ask_well(fleets.router, body(tokens=9))) for _ in range(8)]
        await turns()
        engine.down = True
        engine.gate.set()
        await asyncio.gather(*tasks)  # those that had begun there go on at the other
        assert len(asked) == 1


async def test_models_that_a_unit_no_longer_serves() -> None:
    world = World()
    engine = world.engine("a", card("m"), card("old"))
    async with Router(world.engines, load_program("data_parallel"), ManualClock()) as router:
        await ask_well(router, body(model="old"))
        engine.cards = (card("m", context_length=7), card("new"))
        await router.units["a"].admit()
        assert [(one.name, one.context_length) for one in await router.models()] == [
            ("m", 7),
            ("new", 512),
        ]
        with pytest.raises(UnknownModel):
            await ask(router, body(model="old"))


async def test_an_error_passes_through_the_router_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Router(World().engines, load_program("data_parallel"), ManualClock()):
            raise ZeroDivisionError


async def test_a_unit_that_comes_back_has_nothing_cached() -> None:
    async with routed(2, "cache_aware") as fleets:
        await ask_well(fleets.router, body(40))
        home = fleets.journal[0].unit
        assert fleets.router._index.match("m", body(40).prompt, width=PAGE) == {home: 40}
        await fleets.router.units[home].admit()
        assert fleets.router._index.match("m", body(40).prompt, width=PAGE) == {}


async def test_one_replica_needs_no_index() -> None:
    async with routed(1, "cache_aware") as fleets:
        await ask_well(fleets.router, body(40))
        assert len(fleets.router._index) == 0


async def test_the_program_changes_while_it_serves() -> None:
    """Requests in flight end under the program they began with; none is lost."""
    async with routed(3) as fleets:
        router = fleets.router
        async with asyncio.TaskGroup() as group:
            for number, program in enumerate([*PROGRAMS, *reversed(PROGRAMS)] * 3):
                for length in (1, 7, 20, 40):
                    group.create_task(ask_well(router, body(length + number % 5, tokens=6, n=2)))
                await turns(3)
                router.set_program(load_program(program))
                assert router.program.name == program


async def test_a_request_keeps_its_program() -> None:
    async with routed(2, "disaggregate") as fleets:
        task = await fleets.begin_send(body(20), pace=20)
        fleets.router.set_program(load_program("data_parallel"))
        await ask_well(fleets.router, body(20))
        await task
        verbs = [call.verb for call in fleets.journal]
        assert verbs == ["prep_recv", "remote_send", "start_generate", "start_generate"]
        assert fleets.journal[-1].begin == -1


async def test_abort_goes_to_where_the_request_runs() -> None:
    async with routed(2, "disaggregate") as fleets:
        request = body(20, tokens=50, n=2)
        stream = fleets.router.start_generate(request)
        ended = {}
        async with aclosing(stream):
            async for frame in stream:
                for event in frame:
                    if isinstance(event, EndEvent):
                        ended[event.choice] = event.reason
                    elif isinstance(event, TokenEvent) and event.index == 3:
                        await fleets.router.abort(request.request, 1)
        assert ended == {0: "length", 1: "abort"}
        assert set(fleets.engines[1].aborts) == {(request.request, 1)}
        assert not fleets.engines[0].aborts
        await fleets.router.abort("unknown")


async def test_an_aborted_request_does_not_go_elsewhere() -> None:
    for turn in range(40):
        async with routed(2, "disaggregate") as fleets:
            fleets.engines[0].pace = 5
            request = body(20, tokens=50)
            task = asyncio.create_task(ask(fleets.router, request))
            await turns(turn)
            begun = len(fleets.journal)
            await fleets.router.abort(request.request)
            await asyncio.wait([task])
            error = task.exception()
            if error is None:
                assert task.result().ends[0].reason == ("abort" if turn else "length")
            else:
                assert isinstance(error, Unavailable | BadRequest)
            assert turn == 0 or len(fleets.journal) - begun <= 1


async def test_a_request_id_is_used_once_at_a_time() -> None:
    async with routed(2) as fleets:
        request = body()
        stream = fleets.router.start_generate(request)
        async with aclosing(stream):
            await anext(stream)
            with pytest.raises(BadRequest, match="is in use"):
                await ask(fleets.router, request)
        await ask_well(fleets.router, request)


async def test_frames_pass_through_as_they_are() -> None:
    async with routed(1) as fleets:
        [engine] = fleets.engines
        made: list[object] = []
        generate = engine.start_generate

        async def noted(request: object) -> object:
            async for frame in generate(request):  # type: ignore[arg-type]
                made.append(frame)
                yield frame

        engine.start_generate = noted  # type: ignore[method-assign,assignment]
        got = [frame async for frame in fleets.router.start_generate(body(tokens=20))]
        assert len(got) == len(made) == 23
        assert all(one is other for one, other in zip(got, made, strict=True))

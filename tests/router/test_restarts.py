"""Requests to a model whose only units are being restarted wait, and are answered in one piece."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvloom.router.programs import PROGRAMS
from kvloom.types.errors import Unavailable
from tests.router.fleets import Answer, ask, ask_well, begin, body, turns
from tests.router.managed import SHORT, Managed, managed


async def begin_restarts(played: Managed, *units: str) -> list[asyncio.Task[object]]:
    """All of them empty, and their new processes not there yet."""
    restarting: list[asyncio.Task[object]] = [
        asyncio.create_task(played.orders.restart(unit)) for unit in units
    ]
    await turns()
    assert [one for one in played.done if one.startswith("stop")] == [f"stop {unit}" for unit in units]
    return restarting


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("units", ["a", "ab"])
async def test_requests_wait_until_a_unit_is_back(program: str, units: str) -> None:
    async with managed(len(units), program) as played:
        restarting = await begin_restarts(played, *units)
        asking = [asyncio.create_task(ask_well(played.fleets.router, body(20))) for _ in range(5)]
        await turns()
        assert not played.fleets.journal
        assert set(played.states().values()) == {"restarting"}
        played.processes.starts.set()
        await asyncio.gather(*asking, *restarting)


async def test_who_waits_has_no_frame_yet_and_then_all_of_them() -> None:
    async with managed(1) as played:
        await begin_restarts(played, "a")
        stream = played.fleets.router.start_generate(body())
        first = await begin(anext(stream))
        assert not first.done()
        played.processes.starts.set()
        answer = Answer()
        answer.take(await first)
        async for frame in stream:
            answer.take(frame)
        assert answer.ends[0].reason == "length"


async def test_what_runs_while_its_unit_drains_does_not_wait_and_the_next_does() -> None:
    async with managed(1) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        restarting = await begin(played.orders.restart("a"))
        waiting = await begin(ask_well(played.fleets.router, body()))
        assert (played.state("a").calls, len(played.fleets.journal), played.done) == (1, 1, [])
        engine.gate.set()
        await running
        await turns()
        assert (len(played.fleets.journal), played.done[:1]) == (1, ["stop a"])
        played.processes.starts.set()
        await asyncio.gather(waiting, restarting)


async def test_what_the_old_process_did_not_begin_to_answer_the_new_one_does() -> None:
    """It was let in, but the drain has not waited for it."""
    async with managed(1, seconds=SHORT) as played:
        [engine] = played.fleets.engines
        engine.answering.clear()
        asking = await begin(ask_well(played.fleets.router, body()))
        restarting = await begin(played.orders.restart("a"))
        await played.fleets.clock.advance(SHORT)
        await played.processes.ended.wait()
        engine.answering.set()  # it finds that its process has gone
        await turns()
        assert not asking.done()
        played.processes.starts.set()
        await asyncio.gather(asking, restarting)
        assert [call.verb for call in played.fleets.journal] == ["start_generate"] * 2


async def test_another_unit_that_comes_up_ends_the_wait() -> None:
    async with managed(2) as played:
        await played.orders.drain("b")
        await begin_restarts(played, "a")
        waiting = await begin(ask_well(played.fleets.router, body()))
        await played.orders.admit("b")
        await waiting
        assert [call.unit for call in played.fleets.journal] == ["b"]


async def test_nobody_waits_for_longer_than_is_said() -> None:
    async with managed(1, patience=SHORT) as played:
        await begin_restarts(played, "a")
        with pytest.raises(Unavailable, match=r"a is being started, which .* than the 0\.01 s"):
            await ask(played.fleets.router, body())


async def test_a_new_process_that_dies_is_tried_again_and_requests_wait_for_that() -> None:
    async with managed(1) as played:
        played.processes.problem = "ended with exit code 3"
        [restarting] = await begin_restarts(played, "a")
        waiting = await begin(ask_well(played.fleets.router, body()))
        played.processes.starts.set()
        with pytest.raises(Unavailable, match="exit code 3"):
            await restarting
        await turns()
        assert (played.states(), waiting.done()) == ({"a": "down"}, False)
        played.processes.problem = ""
        await played.fleets.clock.advance(1)
        await waiting


@pytest.mark.parametrize("way", ["cancelled", "aborted"])
async def test_whoever_leaves_waits_no_more(way: str) -> None:
    async with managed(1) as played:
        await begin_restarts(played, "a")
        request = body()
        waiting = await begin(ask(played.fleets.router, request))
        if way == "cancelled":
            waiting.cancel()
        else:
            await played.fleets.router.abort(request.request)
        with suppress(asyncio.CancelledError, Unavailable):
            await asyncio.wait_for(waiting, 1)
        played.processes.starts.set()
        await turns()
        assert played.states() == {"a": "up"}
        assert not played.fleets.journal


async def test_a_unit_that_is_drained_or_cannot_be_started_is_not_waited_for() -> None:
    async with managed(2) as played:
        await played.orders.drain("a")
        await played.orders.stop("b")
        played.processes.problem = "ended with exit code 3"
        played.processes.starts.set()
        with pytest.raises(Unavailable, match="b ended with exit code 3 as it started"):
            await played.orders.start("b")
        assert played.states() == {"a": "drained", "b": "away"}
        with pytest.raises(Unavailable, match=r"no unit that serves m is up \(of a, b, which failed"):
            await ask(played.fleets.router, body())


async def test_requests_wait_for_a_unit_that_has_died_the_new_ones_too() -> None:
    async with managed(1) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        played.processes.die("a")
        engine.gate.set()
        new = await begin(ask_well(played.fleets.router, body()))
        assert (played.states(), running.done(), new.done()) == ({"a": "down"}, False, False)
        assert played.router.waiting == {"m": 2}
        played.processes.starts.set()
        await played.fleets.clock.advance(1)
        await asyncio.gather(running, new)
        assert played.done == ["start a"]


async def test_one_choice_that_is_aborted_while_the_request_waits_ends_and_the_other_is_answered() -> None:
    async with managed(1) as played:
        played.processes.die("a")
        await turns()
        request = body(n=2)
        waiting = await begin(ask(played.fleets.router, request))
        await played.fleets.router.abort(request.request, 0)
        await turns()
        assert not waiting.done()
        played.processes.starts.set()
        await played.fleets.clock.advance(1)
        answer = await waiting
        assert {choice: end.reason for choice, end in answer.ends.items()} == {0: "abort", 1: "length"}
        assert {choice: len(tokens) for choice, tokens in answer.tokens.items()} == {1: 3}


async def test_a_unit_that_dies_while_it_is_drained_is_not_waited_for() -> None:
    """Somebody has taken it out of service."""
    async with managed(1) as played:
        await played.orders.drain("a")
        played.processes.die("a")
        await turns()
        assert played.states() == {"a": "down"}
        with pytest.raises(Unavailable, match=r"no unit that serves m is up \(of a\)"):
            await ask(played.fleets.router, body())
        played.processes.starts.set()
        await played.fleets.clock.advance(1)
        await turns()
        assert played.states() == {"a": "drained"}


async def test_requests_wait_where_the_controller_has_yet_to_hear_of_the_death() -> None:
    async with managed(1) as played:
        [engine] = played.fleets.engines
        engine.restart()
        engine.down = True
        asking = await begin(ask_well(played.fleets.router, body()))
        later = await begin(ask_well(played.fleets.router, body()))
        assert not asking.done()
        engine.down = False
        await played.fleets.clock.advance(1)
        await asyncio.gather(asking, later)


async def test_nobody_waits_for_a_dead_unit_for_longer_than_is_said() -> None:
    async with managed(1, patience=SHORT) as played:
        played.processes.die("a")
        await turns()
        with pytest.raises(Unavailable, match=r"a is being started, which .* than the 0\.01 s"):
            await ask(played.fleets.router, body())

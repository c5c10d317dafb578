"""Units taken out of service and back: what runs there ends first, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.errors import Conflict, Unavailable
from tests.router.drained import LONG, SHORT, drained
from tests.router.fleets import ManualClock, ask_well, body, run, turns
from tests.router.ledger import World


def test_a_drain_ends_with_the_last_request() -> None:
    async def test() -> None:
        async with drained(2) as played:
            router, (first, _) = played.fleets.router, played.fleets.engines
            first.gate.clear()
            running = asyncio.create_task(ask_well(router, body()))
            await turns()
            draining = asyncio.create_task(played.drains.drain("a"))
            await turns()
            assert not draining.done()
            assert played.states() == {"a": "draining", "b": "up"}
            assert played.drains.state("a").calls == 1
            assert played.told == [{"a"}]
            for _ in range(3):
                await ask_well(router, body())
            assert {call.unit for call in played.fleets.journal[1:]} == {"b"}
            first.gate.set()
            await running
            state = await draining
            assert (state.state, state.calls, state.models) == ("drained", 0, ("m",))
            assert (await played.drains.admit("a")).state == "up"
            assert played.told == [{"a"}, set()]
            await played.drains.admit("a")
            assert played.told == [{"a"}, set()]
            await ask_well(router, body())
            assert played.fleets.journal[-1].unit == "a"

    run(test)


@pytest.mark.parametrize("asked", [None, 0.0])
def test_a_drain_waits_no_longer_than_it_is_told(asked: float | None) -> None:
    async def test() -> None:
        async with drained(1, seconds=SHORT if asked is None else LONG) as played:
            [engine] = played.fleets.engines
            engine.gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            state = await played.drains.drain("a", asked)
            assert (state.state, state.calls) == ("draining", 1)
            engine.gate.set()
            await running
            assert played.states() == {"a": "drained"}
            with pytest.raises(Unavailable, match=r"no unit that serves m is up \(of a\)"):
                await ask_well(played.fleets.router, body())

    run(test)


def test_a_drain_that_waits_ends_when_its_unit_is_admitted() -> None:
    """Its caller learns of it, even where the next drain has begun by then."""

    async def test() -> None:
        async with drained(1) as played:
            [engine] = played.fleets.engines
            engine.gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            first = asyncio.create_task(played.drains.drain("a"))
            await turns()
            admitting = asyncio.create_task(played.drains.admit("a"))
            await turns(1)
            second = asyncio.create_task(played.drains.drain("a"))
            await admitting
            await turns()
            with pytest.raises(Conflict, match="a was admitted while its drain waited; drain it again"):
                first.result()
            assert not second.done()
            engine.gate.set()
            await running
            assert (await second).state == "drained"

    run(test)


def test_a_restart_loses_no_request() -> None:
    async def test() -> None:
        async with drained(2) as played:
            router, (first, _) = played.fleets.router, played.fleets.engines
            first.gate.clear()
            running = asyncio.create_task(ask_well(router, body()))
            await turns()
            restarting = asyncio.create_task(played.drains.restart("a"))
            await turns()
            assert not played.ends
            assert played.states() == {"a": "restarting", "b": "up"}
            first.gate.set()
            await running
            await turns()
            assert played.ends == ["a"]
            for _ in range(3):
                await ask_well(router, body())
            played.starts.set()
            assert (await restarting).state == "up"
            await ask_well(router, body())
            assert played.fleets.journal[-1].unit == "a"
            assert played.told == [set()]

    run(test)


def test_what_runs_for_too_long_does_not_hold_a_restart_up() -> None:
    async def test() -> None:
        async with drained(1, seconds=SHORT) as played:
            [engine] = played.fleets.engines
            engine.gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body(tokens=9)))
            await turns()
            played.starts.set()
            assert (await played.drains.restart("a")).state == "up"
            assert played.ends == ["a"]
            engine.gate.set()
            await running

    run(test)


def test_one_thing_at_a_time() -> None:
    async def test() -> None:
        async with drained(2) as played:
            drains = played.drains
            await drains.drain("a")
            first = asyncio.create_task(drains.restart("a"))
            second = asyncio.create_task(drains.restart("a"))
            await turns()
            for order in (drains.drain, drains.admit):
                with pytest.raises(Conflict, match="a is being restarted"):
                    await order("a")
            await drains.drain("b")
            assert played.told[-1] == {"b"}  # a restart ends by itself
            first.cancel()  # its caller has gone, and it goes on
            await turns()
            played.starts.set()
            assert (await second).state == "up"
            assert played.ends == ["a"]
            assert played.states() == {"a": "up", "b": "drained"}

    run(test)


def test_a_new_process_that_dies() -> None:
    """Who asked learns of it, and the unit takes requests once it answers."""

    async def test() -> None:
        async with drained(1) as played:
            played.problem = Unavailable("a ended with exit code 3 as it started; it is tried again")
            played.starts.set()
            with pytest.raises(Unavailable, match="exit code 3"):
                await played.drains.restart("a")
            [state] = played.drains.states
            assert (state.state, state.problem) == ("down", "the engine cannot be reached")
            played.fleets.engines[0].down = False
            await played.fleets.clock.advance(1)
            assert played.states() == {"a": "up"}

    run(test)


def test_orders_are_given_up_with_their_gateway() -> None:
    async def test() -> None:
        async with drained(2) as played:
            played.fleets.engines[0].gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            orders = [
                asyncio.create_task(order) for order in (played.drains.drain("a"), played.drains.restart("b"))
            ]
            await turns()
            assert played.ends == ["b"]
            assert not any(order.done() for order in orders)
            played.drains.give_up()
            await asyncio.wait(orders)
            for order in orders:
                assert "the gateway is ending" in str(order.exception())
            assert played.states() == {"a": "draining", "b": "restarting"}
            played.fleets.engines[0].gate.set()
            await running
        assert played.states() == {"a": "drained", "b": "drained"}  # nobody restarts it any more

    run(test)


def test_a_unit_that_starts_withdrawn() -> None:
    """As after the gateway's own restart: it is known, and gets nothing until it is admitted."""

    async def test() -> None:
        world = World()
        for name in "ab":
            world.engine(name)
        async with Router(
            world.engines, load_program("data_parallel"), ManualClock(), withdrawn={"a"}
        ) as router:
            assert router.services == {"a": "drained", "b": "up"}
            assert set(router.units["a"].replicas) == {"m"}
            for _ in range(3):
                await ask_well(router, body())
            assert {call.unit for call in world.journal} == {"b"}
            router.withdraw("b")
            with pytest.raises(Unavailable, match="no unit that serves m is up"):
                await ask_well(router, body())
            await router.admit("a")
            await ask_well(router, body())

    run(test)

"""Units taken out of service and back: what runs there ends first, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.types.errors import Conflict, Unavailable
from tests.router.fleets import ask_well, begin, body, turns
from tests.router.managed import LONG, SHORT, Managed, managed


def drained(played: Managed) -> set[str]:
    """The units that the controller keeps drained, whichever gateway serves."""
    return {name for name, unit in played.controller.spec.units.items() if unit.drained}


async def test_a_drain_ends_with_the_last_request() -> None:
    async with managed(2) as played:
        router, (first, _) = played.fleets.router, played.fleets.engines
        first.gate.clear()
        running = await begin(ask_well(router, body()))
        draining = await begin(played.orders.drain("a"))
        assert not draining.done()
        assert played.states() == {"a": "draining", "b": "up"}
        assert played.state("a").calls == 1
        assert drained(played) == {"a"}
        for _ in range(3):
            await ask_well(router, body())
        assert {call.unit for call in played.fleets.journal[1:]} == {"b"}
        first.gate.set()
        await running
        state = await draining
        assert (state.state, state.calls, state.models) == ("drained", 0, ("m",))
        assert (await played.orders.admit("a")).state == "up"
        assert drained(played) == set()
        revision = played.controller.spec.revision
        await played.orders.admit("a")
        assert played.controller.spec.revision == revision
        await ask_well(router, body())
        assert played.fleets.journal[-1].unit == "a"


@pytest.mark.parametrize("asked", [None, 0.0])
async def test_a_drain_waits_no_longer_than_it_is_told(asked: float | None) -> None:
    async with managed(1, seconds=SHORT if asked is None else LONG) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        state = await played.orders.drain("a", asked)
        assert (state.state, state.calls) == ("draining", 1)
        engine.gate.set()
        await running
        assert played.states() == {"a": "drained"}
        with pytest.raises(Unavailable, match=r"no unit that serves m is up \(of a\)"):
            await ask_well(played.fleets.router, body())


async def test_a_drain_that_waits_ends_when_its_unit_is_admitted() -> None:
    """Its caller learns of it, even where the next drain has begun by then."""
    async with managed(1) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        first = await begin(played.orders.drain("a"))
        admitting = asyncio.create_task(played.orders.admit("a"))
        await turns(1)
        second = asyncio.create_task(played.orders.drain("a"))
        await admitting
        await turns()
        with pytest.raises(Conflict, match="a was admitted while its drain waited; drain it again"):
            first.result()
        assert not second.done()
        engine.gate.set()
        await running
        assert (await second).state == "drained"


async def test_a_restart_loses_no_request() -> None:
    async with managed(2) as played:
        router, (first, _) = played.fleets.router, played.fleets.engines
        first.gate.clear()
        running = await begin(ask_well(router, body()))
        restarting = await begin(played.orders.restart("a"))
        assert not played.done
        assert played.states() == {"a": "restarting", "b": "up"}
        first.gate.set()
        await running
        await turns()
        assert played.done == ["stop a", "start a"]
        for _ in range(3):
            await ask_well(router, body())
        played.processes.starts.set()
        assert (await restarting).state == "up"
        await ask_well(router, body())
        assert played.fleets.journal[-1].unit == "a"
        assert drained(played) == set()


async def test_what_runs_for_too_long_does_not_hold_a_restart_up() -> None:
    async with managed(1, seconds=SHORT) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body(tokens=9)))
        played.processes.starts.set()
        restarting = await begin(played.orders.restart("a"))
        assert not played.done
        await played.fleets.clock.advance(SHORT)
        assert (await restarting).state == "up"
        assert played.done == ["stop a", "start a"]
        engine.gate.set()
        await running


async def test_one_thing_at_a_time() -> None:
    async with managed(2) as played:
        drains = played.orders
        await drains.drain("a")
        first = asyncio.create_task(drains.restart("a"))
        second = await begin(drains.restart("a"))
        for order in (drains.drain, drains.admit):
            with pytest.raises(Conflict, match="a is being restarted"):
                await order("a")
        await drains.drain("b")
        assert drained(played) == {"b"}  # a restart ends by itself
        first.cancel()  # its caller has gone, and it goes on
        await turns()
        played.processes.starts.set()
        assert (await second).state == "up"
        assert played.done == ["stop a", "start a"]
        assert played.states() == {"a": "up", "b": "drained"}


async def test_a_new_process_that_dies() -> None:
    """Who asked learns of it, and the unit takes requests once another one answers."""
    async with managed(1) as played:
        played.processes.problem = "ended with exit code 3"
        played.processes.starts.set()
        with pytest.raises(Unavailable, match="a ended with exit code 3 as it started; it is tried again"):
            await played.orders.restart("a")
        [state] = played.orders.states
        assert (state.state, state.problem) == ("down", "ended with exit code 3")
        played.processes.problem = ""
        await turns()
        await played.fleets.clock.advance(1)
        await turns()
        assert played.states() == {"a": "up"}


async def test_orders_are_given_up_with_their_gateway_and_go_on() -> None:
    """Whoever gave them at it learns that it ends; the controller carries them out."""
    async with managed(2) as played:
        played.fleets.engines[0].gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        orders = [
            asyncio.create_task(order) for order in (played.orders.drain("a"), played.orders.restart("b"))
        ]
        await turns()
        assert played.done == ["stop b", "start b"]
        assert not any(order.done() for order in orders)
        played.orders.mirror.give_up()
        await asyncio.wait(orders)
        for order in orders:
            assert "the gateway is ending" in str(order.exception())
        assert played.states() == {"a": "draining", "b": "restarting"}
        played.fleets.engines[0].gate.set()
        await running
        played.processes.starts.set()
        await turns()
        assert played.states() == {"a": "drained", "b": "up"}


async def test_another_gateway_finds_a_unit_drained() -> None:
    """It is known, and gets nothing until it is admitted."""
    async with managed(2) as played:
        await played.orders.drain("a")
        async with played.another_gateway() as (router, orders):
            assert router.services == {"a": "drained", "b": "up"}
            assert set(router.units["a"].replicas) == {"m"}
            for _ in range(3):
                await ask_well(router, body())
            assert {call.unit for call in played.fleets.journal} == {"b"}
            await orders.drain("b")
            with pytest.raises(Unavailable, match="no unit that serves m is up"):
                await ask_well(router, body())
            await orders.admit("a")
            await ask_well(router, body())
            assert played.states() == {"a": "up", "b": "drained"}

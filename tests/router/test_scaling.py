"""Units that come and go: what runs ends well, what comes meanwhile waits, and no start is made twice."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.service import Scale, Steps
from tests.cluster.loads import model
from tests.router.fleets import ask, ask_well, begin, body, turns
from tests.router.managed import Managed, managed

TO_ZERO = Scale(least=0, most=2, idle=30)


async def gone(played: Managed, *units: str) -> None:
    for unit in units:
        await played.orders.stop(unit)
        assert played.states()[unit] == "away"


async def test_a_unit_goes_when_what_runs_there_has_ended() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        first = played.fleets.engines[0]
        first.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        going = await begin(played.orders.stop("a"))
        assert (played.states(), played.done) == ({"a": "draining", "b": "up"}, [])
        await ask_well(played.fleets.router, body())
        first.gate.set()
        await running
        await going
        assert played.states() == {"a": "away", "b": "up"}
        assert played.done == ["stop a"]
        await ask_well(played.fleets.router, body())
        assert {call.unit for call in played.fleets.journal[1:]} == {"b"}
        await played.orders.stop("a")
        assert played.done == ["stop a"]


async def test_a_model_without_a_unit_is_still_served() -> None:
    """It is listed, its requests wait and are counted, and one start answers them all."""
    async with managed(2, scale=TO_ZERO) as played:
        router = played.fleets.router
        await gone(played, "a", "b")
        assert [card.name for card in await router.models()] == ["m"]
        asking = [asyncio.create_task(ask_well(router, body())) for _ in range(3)]
        await turns()
        assert router.waiting == {"m": 3}
        assert not played.fleets.journal
        scheduler = FleetScheduler(played.rescheduler, played.fleets.clock)
        for _ in range(3):
            await scheduler.step()
            await turns()
        assert played.done[2:] == ["start a"]
        assert played.states() == {"a": "starting", "b": "away"}
        played.processes.starts.set()
        await asyncio.gather(*asking)
        assert played.states() == {"a": "up", "b": "away"}
        assert router.waiting == {}


async def test_a_scheduler_that_was_lost_starts_nothing_twice() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        await gone(played, "a", "b")
        asking = await begin(ask_well(played.fleets.router, body()))
        for _ in range(3):
            await FleetScheduler(played.rescheduler, played.fleets.clock).step()
            await turns()
        assert played.done[2:] == ["start a"]
        played.processes.starts.set()
        await asking


async def test_what_is_idle_for_long_enough_goes_and_not_before() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        scheduler = FleetScheduler(played.rescheduler, played.fleets.clock)
        played.fleets.clock._now = 29.0
        await ask_well(played.fleets.router, body())  # somebody asks in between
        played.fleets.engines[0].load_models = {"m": model(prompt_tokens_total=9)}
        both, one, none = ["up", "up"], ["up", "away"], ["away", "away"]
        for now, states in ((30, both), (39, both), (40, one), (58, one), (59, none)):
            played.fleets.clock._now = now
            await scheduler.step()
            await turns()
            assert list(played.states().values()) == states, now


async def test_one_that_is_to_go_is_called_back() -> None:
    async with managed(1, scale=TO_ZERO) as played:
        [engine] = played.fleets.engines
        engine.gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        going = await begin(played.orders.stop("a"))
        waiting = await begin(ask_well(played.fleets.router, body()))
        await FleetScheduler(played.rescheduler, played.fleets.clock).step()
        await turns()
        with pytest.raises(Conflict, match="started again"):
            await going
        assert (played.states(), played.done) == ({"a": "up"}, [])
        engine.gate.set()
        await asyncio.gather(running, waiting)


async def test_a_start_right_after_it_was_decided_that_the_unit_goes() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        played.processes.starts.set()
        await played.orders.scale(Steps(stop=("a",)))
        await played.orders.start("a")
        await turns()
        assert played.states() == {"a": "up", "b": "up"}


async def test_one_that_ends_already_is_started_once_it_has() -> None:
    async with managed(1, scale=TO_ZERO) as played:
        played.processes.ends.clear()
        played.processes.starts.set()
        going = await begin(played.orders.stop("a"))
        asking = await begin(ask_well(played.fleets.router, body()))
        await FleetScheduler(played.rescheduler, played.fleets.clock).step()  # it cannot be started now
        coming = await begin(played.orders.start("a"))
        assert played.done == ["stop a"]
        played.processes.ends.set()
        await asyncio.gather(going, coming, asking)
        assert played.done == ["stop a", "start a"]


async def test_a_start_that_fails_is_told_and_tried_again_later() -> None:
    async with managed(1, scale=TO_ZERO) as played:
        clock, router = played.fleets.clock, played.fleets.router
        await gone(played, "a")
        scheduler = FleetScheduler(played.rescheduler, clock)
        played.processes.problem = "ended with exit code 3"
        played.processes.starts.set()
        waiting = await begin(ask(router, body()))
        await scheduler.step()
        with pytest.raises(Unavailable, match=r"is up \(of a, which failed to start\)"):
            await waiting
        assert played.state("a").problem == "ended with exit code 3"
        await scheduler.step()
        assert played.done == ["stop a", "start a"]
        played.processes.problem = ""
        await clock.advance(11)
        asking = await begin(ask_well(router, body()))
        await scheduler.step()
        await asking
        assert played.done == ["stop a", "start a", "start a"]


async def test_least_is_kept_without_haste_where_starts_fail() -> None:
    async with managed(1, scale=Scale(least=1, most=1)) as played:
        await gone(played, "a")
        played.processes.problem = "ended with exit code 3"
        played.processes.starts.set()
        scheduler = FleetScheduler(played.rescheduler, played.fleets.clock)
        for _ in range(3):
            await scheduler.step()
            await turns()
        assert played.done == ["stop a", "start a"]
        await played.fleets.clock.advance(11)
        await scheduler.step()
        await turns()
        assert played.done == ["stop a", "start a", "start a"]


async def test_who_still_has_a_process_comes_back_first() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        router = played.fleets.router
        await gone(played, "a")
        played.fleets.engines[1].gate.clear()
        running = await begin(ask_well(router, body()))
        leaving = await begin(played.orders.stop("b"))
        assert played.rescheduler.groups["g"].away == ("b", "a")
        await played.orders.start("b")
        played.fleets.engines[1].gate.set()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def test_what_does_not_end_in_time_goes_on_elsewhere() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        played.fleets.engines[0].gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        await played.orders.stop("a", 0.0)
        played.fleets.engines[0].gate.set()
        await running
        assert {call.unit for call in played.fleets.journal if call.verb == "start_generate"} == {*"ab"}


async def test_another_gateway_finds_them_on_their_way_with_the_time_that_is_left() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        played.fleets.engines[0].gate.clear()
        running = await begin(ask_well(played.fleets.router, body()))
        stopping = await begin(played.orders.stop("a", 5.0))
        async with played.another_gateway() as (router, _):
            assert router.services == {"a": "drained", "b": "up"}
            await played.fleets.clock.advance(4.0)
            assert (played.done, stopping.done()) == ([], False)
            await played.fleets.clock.advance(1.0)
            await stopping
            assert router.services == {"a": "away", "b": "up"}
        played.fleets.engines[0].gate.set()
        await running


async def test_what_runs_at_a_gateway_that_another_one_has_replaced_is_waited_for() -> None:
    """The present one cannot see it."""
    async with managed(2) as played, played.another_gateway() as (router, _):
        played.fleets.engines[0].gate.clear()
        running = await begin(ask_well(router, body()))
        stopping = await begin(played.orders.stop("a"))
        assert (played.states(), played.done) == ({"a": "drained", "b": "up"}, [])
        played.fleets.engines[0].gate.set()
        await running
        await stopping
        assert played.done == ["stop a"]


async def test_what_is_under_way_is_left_alone() -> None:
    async with managed(2, scale=TO_ZERO) as played:
        restarting = await begin(played.orders.restart("a"))
        with pytest.raises(Conflict, match="being started"):
            await played.orders.stop("a")
        await played.orders.scale(Steps(stop=("a", "nobody"), start=("b", "nobody")))
        await turns()
        assert played.rescheduler.groups["g"].starting == 1
        assert played.done == ["stop a", "start a"]
        await played.orders.start("b")
        played.processes.starts.set()
        await restarting
        assert played.done == ["stop a", "start a"]

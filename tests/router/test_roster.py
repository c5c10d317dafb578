"""Units that come and go: what runs ends well, what comes meanwhile waits, and no start is made twice."""

from __future__ import annotations

import asyncio
import errno

import pytest

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.service import Scale, Steps
from tests.fleet.loads import model
from tests.router.fleets import ask, ask_well, body, run, turns
from tests.router.roster import Staged, staged

TO_ZERO = Scale(least=0, most=2, idle=30)


async def gone(played: Staged, *units: str) -> None:
    for unit in units:
        await played.roster.stop(unit)
        assert played.states()[unit] == "away"


def test_a_unit_goes_when_what_runs_there_has_ended() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            first = played.fleets.engines[0]
            first.gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            going = asyncio.create_task(played.roster.stop("a"))
            await turns()
            assert (played.states(), played.orders.done, played.told) == (
                {"a": "draining", "b": "up"},
                [],
                [{"a": None}],
            )
            await ask_well(played.fleets.router, body())
            first.gate.set()
            await running
            await going
            assert played.states() == {"a": "away", "b": "up"}
            assert (played.orders.done, played.told) == (["stop a"], [{"a": None}, {}])
            await ask_well(played.fleets.router, body())
            assert {call.unit for call in played.fleets.journal[1:]} == {"b"}
            await played.roster.stop("a")
            assert played.orders.done == ["stop a"]

    run(test)


def test_a_model_without_a_unit_is_still_served() -> None:
    """It is listed, its requests wait and are counted, and one start answers them all."""

    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
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
            assert played.orders.done[2:] == ["start a"]
            assert played.states() == {"a": "starting", "b": "away"}
            played.orders.starts.set()
            await asyncio.gather(*asking)
            assert played.states() == {"a": "up", "b": "away"}
            assert router.waiting == {}

    run(test)


def test_a_scheduler_that_was_lost_starts_nothing_twice() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            await gone(played, "a", "b")
            asking = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            for _ in range(3):
                await FleetScheduler(played.rescheduler, played.fleets.clock).step()
                await turns()
            assert played.orders.done[2:] == ["start a"]
            played.orders.starts.set()
            await asking

    run(test)


def test_what_is_idle_for_long_enough_goes_and_not_before() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
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

    run(test)


def test_one_that_is_to_go_is_called_back() -> None:
    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            [engine] = played.fleets.engines
            engine.gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            going = asyncio.create_task(played.roster.stop("a"))
            await turns()
            waiting = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            await FleetScheduler(played.rescheduler, played.fleets.clock).step()
            await turns()
            with pytest.raises(Conflict, match="started again"):
                await going
            assert (played.states(), played.orders.done) == ({"a": "up"}, [])
            engine.gate.set()
            await asyncio.gather(running, waiting)

    run(test)


def test_a_stop_that_fails_is_told_and_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit's process lives, and the unit counts as one that is to go."""

    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            with monkeypatch.context() as patch:

                async def full(*_: object) -> None:
                    raise OSError(errno.ENOSPC, "No space left on device")

                patch.setattr(played.orders, "stop", full)
                with pytest.raises(OSError, match="No space left"):
                    await played.roster.stop("a")
            assert played.states() == {"a": "drained", "b": "up"}
            assert played.roster.groups["g"].away == ("a",)
            await played.roster.start("a")
            assert played.states() == {"a": "up", "b": "up"}
            await played.roster.stop("a")
            assert (played.states()["a"], played.orders.done) == ("away", ["stop a"])

    run(test)


def test_a_start_right_after_it_was_decided_that_the_unit_goes() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            played.orders.starts.set()
            played.roster.begin(Steps(stop=("a",)))
            await played.roster.start("a")
            await turns()
            assert played.states() == {"a": "up", "b": "up"}

    run(test)


def test_one_that_ends_already_is_started_once_it_has() -> None:
    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            played.orders.ends.clear()
            played.orders.starts.set()
            going = asyncio.create_task(played.roster.stop("a"))
            await turns()
            asking = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            await FleetScheduler(played.rescheduler, played.fleets.clock).step()  # it cannot be started now
            coming = asyncio.create_task(played.roster.start("a"))
            await turns()
            assert played.orders.done == ["stop a"]
            played.orders.ends.set()
            await asyncio.gather(going, coming, asking)
            assert played.orders.done == ["stop a", "start a"]

    run(test)


def test_a_start_that_fails_is_told_and_tried_again_later() -> None:
    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            clock, router = played.fleets.clock, played.fleets.router
            await gone(played, "a")
            scheduler = FleetScheduler(played.rescheduler, clock)
            played.orders.problem = Unavailable("a ended with exit code 3 as it started")
            played.orders.starts.set()
            waiting = asyncio.create_task(ask(router, body()))
            await turns()
            await scheduler.step()
            with pytest.raises(Unavailable, match=r"is up \(of a, which failed to start\)"):
                await waiting
            assert played.fleets.router.units["a"].problem is played.orders.problem
            await scheduler.step()
            assert played.orders.done == ["stop a", "start a"]
            played.orders.problem = None
            await clock.advance(11)
            asking = asyncio.create_task(ask_well(router, body()))
            await turns()
            await scheduler.step()
            await asking
            assert played.orders.done == ["stop a", "start a", "start a"]

    run(test)


def test_least_is_kept_without_haste_where_starts_fail() -> None:
    async def test() -> None:
        async with staged(1, Scale(least=1, most=1)) as played:
            await gone(played, "a")
            played.orders.problem = Unavailable("a ended with exit code 3 as it started")
            played.orders.starts.set()
            scheduler = FleetScheduler(played.rescheduler, played.fleets.clock)
            for _ in range(3):
                await scheduler.step()
                await turns()
            assert played.orders.done == ["stop a", "start a"]
            await played.fleets.clock.advance(11)
            await scheduler.step()
            await turns()
            assert played.orders.done == ["stop a", "start a", "start a"]

    run(test)


def test_who_still_has_a_process_comes_back_first() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            router = played.fleets.router
            await gone(played, "a")
            played.fleets.engines[1].gate.clear()
            running = asyncio.create_task(ask_well(router, body()))
            await turns()
            leaving = asyncio.create_task(played.roster.stop("b"))
            await turns()
            assert played.roster.groups["g"].away == ("b", "a")
            await played.roster.start("b")
            played.fleets.engines[1].gate.set()
            await asyncio.gather(running, leaving, return_exceptions=True)

    run(test)


def test_what_does_not_end_in_time_goes_on_elsewhere() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            played.fleets.engines[0].gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            await played.roster.stop("a", 0.0)
            played.fleets.engines[0].gate.set()
            await running
            assert {call.unit for call in played.fleets.journal if call.verb == "start_generate"} == {*"ab"}

    run(test)


def test_another_gateway_gives_them_the_time_that_they_were_given() -> None:
    """What it is handed is what the first one told."""

    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            played.fleets.engines[0].gate.clear()
            running = asyncio.create_task(ask_well(played.fleets.router, body()))
            await turns()
            played.roster.leave({"a": 0.0, "nobody": None})
            await turns()
            assert (played.told, played.states()["a"]) == ([{"a": 0.0}, {}], "away")
            played.fleets.engines[0].gate.set()
            await running

    run(test)


def test_what_is_under_way_is_left_alone() -> None:
    async def test() -> None:
        async with staged(2, TO_ZERO) as played:
            with played.fleets.router.units["a"].restarts():
                with pytest.raises(Conflict, match="being started"):
                    await played.roster.stop("a")
                played.roster.begin(Steps(stop=("a", "nobody"), start=("b", "nobody")))
                await turns()
                assert played.roster.groups["g"].starting == 1
            assert played.orders.done == []
            await played.roster.start("a")
            assert played.orders.done == []

    run(test)

"""Units that are added and removed while the router serves."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.types.errors import BadRequest, Conflict, QueueFull, Unavailable, UnknownModel
from kvloom.types.service import Scale
from tests.router.fleets import ask, ask_well, body, run, turns
from tests.router.ledger import card
from tests.router.roster import spec, staged

TO_ZERO = Scale(least=0, most=2, idle=30)


def test_a_newcomer_whose_contexts_are_shorter_is_not_gone_on_at() -> None:
    """A request that was let in waits for one that keeps what it was promised."""

    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            router, [first] = played.fleets.router, played.fleets.engines
            first.gate.clear()
            running = asyncio.create_task(ask_well(router, body(40, tokens=9)))
            await turns()
            await played.roster.stop("a", 0.0)
            first.gate.set()
            await turns()
            short = router.units.add("z", played.fleets.world.engine("z", card(context_length=16)))
            await short.arrive()
            assert not running.done()
            long = router.units.add("y", played.fleets.world.engine("y"))
            await long.arrive()
            await running
            assert played.fleets.journal[-1].unit == "y"

    run(test)


def test_newcomers_answer_who_waits_already() -> None:
    """They were no candidates when the request came."""

    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            router = played.fleets.router
            await played.roster.stop("a")
            waiting = asyncio.create_task(ask_well(router, body()))
            await turns()
            unit = router.units.add("z", played.fleets.world.engine("z"))
            with pytest.raises(Conflict, match="another name"):
                router.units.add("z", unit.client)
            assert played.states() == {"a": "away", "z": "away"}
            await unit.arrive()
            await waiting
            unit.leave()
            with pytest.raises(Conflict, match="away can be removed"):
                router.units.remove("z")
            unit.gone()
            router.units.remove("a")
            router.units.remove("z")
            with pytest.raises(UnknownModel):
                await ask(router, body())

    run(test)


def test_a_newcomer_is_asked_where_all_others_refuse() -> None:
    """It came while one of them had yet to answer."""

    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            router, [first] = played.fleets.router, played.fleets.engines
            first.refusal = QueueFull("the queue is full")
            asking = asyncio.create_task(ask_well(router, body()))
            unit = router.units.add("z", played.fleets.world.engine("z"))
            arriving = asyncio.create_task(unit.arrive())
            await asking
            await arriving
            assert [call.unit for call in played.fleets.journal if call.verb == "start_generate"] == [*"az"]

    run(test)


def test_a_newcomer_that_speaks_another_way_stays_out() -> None:
    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            other = played.fleets.world.engine("z", card(vocab_size=5))
            await played.fleets.router.units.add("z", other).arrive()
            assert played.states() == {"a": "up", "z": "down"}

    run(test)


def test_a_unit_is_added_and_removed() -> None:
    async def test() -> None:
        async with staged(1, None) as played:
            played.orders.starts.set()
            await played.roster.add(spec("z"))
            assert played.states() == {"a": "up", "z": "up"}
            placement = played.roster.placement
            assert [one.unit for one in placement.units] == ["a", "z"]
            assert (placement.away, placement.scaled, placement.cores) == ((), (), 4)
            with pytest.raises(Conflict, match="another name"):
                await played.roster.add(spec("z"))
            with pytest.raises(Conflict, match="away can be removed"):
                played.roster.remove("a")
            await played.roster.stop("a")
            await ask_well(played.fleets.router, body())
            assert [one.unit for one in played.roster.placement.away] == ["a"]
            played.roster.remove("a")
            assert played.states() == {"z": "up"}
            assert played.orders.done == ["start z", "stop a", "forget a"]

    run(test)


def test_who_comes_later_learns_what_has_changed_since() -> None:
    """A unit that lost its process meanwhile, and one that got one."""

    async def test() -> None:
        async with staged(3, TO_ZERO) as played:
            played.orders.starts.set()
            await played.roster.stop("b")
            played.fleets.engines[0].down = True
            going = asyncio.create_task(played.roster.stop("c"))
            await turns(1)
            played.roster.heed({"a", "c"})
            await going
            await turns()
            assert played.states() == {"a": "away", "b": "up", "c": "away"}
            assert played.orders.done == ["stop b", "stop c", "start b"]
            await ask_well(played.fleets.router, body())

    run(test)


def test_one_that_dies_or_speaks_another_way_is_not_added() -> None:
    async def test() -> None:
        async with staged(1, TO_ZERO) as played:
            played.orders.starts.set()
            played.orders.problem = Unavailable("z ended with exit code 3")
            with pytest.raises(Unavailable, match="exit code 3"):
                await played.roster.add(spec("z"))
            played.orders.problem = None
            played.fleets.world.engine("y", card(vocab_size=5))
            with pytest.raises(Conflict, match="m differs in vocab_size"):
                await played.roster.add(spec("y"))
            assert played.orders.done == ["start z", "forget z", "start y", "stop y", "forget y"]
            for name in ("../z", "", "z/z", "z" * 65, "gateway", "scheduler"):
                with pytest.raises(BadRequest, match="is no name"):
                    await played.roster.add(spec(name))
            with pytest.raises(Conflict, match="comes and goes by itself"):
                played.roster.remove("a")
            assert played.states() == {"a": "up"}

    run(test)

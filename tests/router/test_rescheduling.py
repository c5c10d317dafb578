"""The fleet scheduler's pairs, and the requests that follow them: law 2 all the while."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.engine.freeness import Arrival, Thresholds
from kvloom.router.rescheduling import Rescheduler
from kvloom.types.clock import WallClock
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.service import FleetState, Pair, Pairs, Steps
from kvloom.types.spec import Policy
from kvloom.types.verbs import Offer, Offered, PrepRecv
from tests.engine.plays import Reader
from tests.modelled import expected, turns
from tests.modelled_units import MODEL, generate, prompt, sending, units
from tests.router.crowds import disperse, fill, until_waiting
from tests.router.worlds import World, world

THERE = Pair("unit-0", "unit-1")


def pairs(*some: Pair, seconds: float = 60.0, floor: float = 0.0) -> Pairs:
    return Pairs(pairs=some, seconds=seconds, floor=floor)


async def three_at_the_first(
    w: World, lengths: Sequence[int] = (24, 16, 8), **sampling: Any
) -> list[asyncio.Task[None]]:
    """Requests of 8, 16 and 24 tokens that decode at unit-0, the longest asked first."""
    w.router.units["unit-1"].withdraw()
    tasks = []
    for length in lengths:
        params = {"max_tokens": 60, "temperature": 1.0} | sampling
        tasks.append(w.ask(generate(prompt(length, first=length), request=f"r{length}", **params)))
    for length in lengths:
        await w.until(f"r{length}", 2)
    await w.router.units["unit-1"].admit()
    return tasks


async def test_the_shortest_goes_first_and_all_go_while_there_is_room() -> None:
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        offered = await w.units[0].engine.offer(Offer(destination=await w.units[1].engine.load()))
        assert offered.request == "r8"
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE))
            await asyncio.gather(*tasks)
            assert (rescheduler.moved, rescheduler.stayed) == (3, 0)
        assert w.units[1].computed > 60
        for length in (8, 16, 24):
            w.check(
                generate(prompt(length, first=length), request=f"r{length}", max_tokens=60, temperature=1.0)
            )


async def test_a_destination_keeps_what_it_is_told_to_keep_free() -> None:
    """More than half of its steps: with two requests it had fewer."""
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        load = await w.units[1].engine.load()
        floor = 0.6 * load.total_blocks / load.models[MODEL].token_blocks
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE, floor=floor))
            await asyncio.gather(*tasks)
            assert rescheduler.moved == 1


async def test_what_is_about_to_end_stays() -> None:
    async with world(2) as w:
        tasks = await three_at_the_first(w, max_tokens=12)
        offer = Offer(destination=await w.units[1].engine.load())
        assert (await w.units[0].engine.offer(offer)).request is None
        await asyncio.gather(*tasks)


async def test_who_is_named_besides_is_not_offered_nor_what_finds_no_room() -> None:
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        load = await w.units[1].engine.load()
        offer = w.units[0].engine.offer
        assert (await offer(Offer(destination=load, besides=["r8"]))).request == "r16"
        assert (await offer(Offer(destination=replace(load, models={})))).request is None
        assert (await offer(Offer(destination=replace(load, draining=True)))).request is None
        assert (await offer(Offer(destination=load, floor=1e9))).request is None
        await asyncio.gather(*tasks)


async def test_a_draining_source_may_fill_the_destination() -> None:
    """What the destination is to keep free it would never have with a request."""
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            w.router.units["unit-0"].withdraw()
            await rescheduler.pair(pairs(THERE, floor=1e9))
            await asyncio.gather(*tasks)
            assert (rescheduler.moved, rescheduler.stayed) == (3, 0)


async def test_a_request_that_moves_is_not_offered_again_to_another() -> None:
    """Pairs change while the first one's request is copied."""
    async with world(3) as w:
        w.router.units["unit-2"].withdraw()
        tasks = await three_at_the_first(w, (8,))
        await w.router.units["unit-2"].admit()
        engine, gate, copying = w.units[1].engine, asyncio.Event(), asyncio.Event()
        prep_recv = engine.prep_recv

        async def wait(body: Any) -> Any:
            copying.set()
            await gate.wait()
            return await prep_recv(body)

        engine.prep_recv = wait  # type: ignore[method-assign]
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE))
            await copying.wait()
            moving = w.router.moving
            await rescheduler.pair(pairs(Pair("unit-0", "unit-2")))
            await turns()
            gate.set()
            await asyncio.gather(*tasks)
            assert (rescheduler.moved, rescheduler.stayed) == (1, 0)
        assert (moving, w.router.moving) == (["r8"], [])


async def test_what_a_request_has_made_counts_where_it_comes() -> None:
    async with world(2) as w:
        [task] = await three_at_the_first(w, (8,))
        sent: list[Arrival] = []
        w.replica(1).unit.report.sent = sent.append  # type: ignore[method-assign, assignment]
        await w.router.move("r8", "unit-1")
        await task
        [one] = sent
        assert (one.prompt, one.choices) == (8, 1)
        assert 2 <= one.made < 60


async def test_a_pair_stands_no_longer_than_it_was_told_to() -> None:
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE, seconds=1e-9))
            await turns()
            await rescheduler.pair(pairs(Pair("unit-0", "unit-9"), Pair("unit-8", "unit-1")))
            await asyncio.gather(*tasks)
            assert rescheduler.moved == 0


async def test_a_destination_that_refuses_is_left_in_peace() -> None:
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        asked = 0

        async def refuse(_: object) -> None:
            nonlocal asked
            asked += 1
            raise Unavailable("not now")

        w.units[1].engine.prep_recv = refuse  # type: ignore[assignment, method-assign]
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE))
            await asyncio.gather(*tasks)
            assert (rescheduler.moved, rescheduler.stayed) == (0, asked)
            assert 1 <= asked <= 3


@pytest.mark.parametrize("why", ["a drain", "a restart", None])
async def test_a_scheduler_empties_a_unit_that_drains_and_no_other(why: str | None) -> None:
    drained = why is not None
    async with world(2) as w:
        tasks = await three_at_the_first(w)
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            if why == "a restart":
                w.router.units["unit-0"].stand("restarting", drained=False, life=None, problem=None)
            elif drained:
                w.router.units["unit-0"].withdraw()
            scheduler = FleetScheduler(rescheduler, WallClock(), thresholds=Thresholds(0, 0))
            period = await scheduler.step()
            assert period.pairs == ((THERE,) if drained else ())
            await asyncio.gather(*tasks)
            assert rescheduler.moved == 3 * drained


async def test_requests_of_another_gateway_are_passed_over_a_few_in_each_period() -> None:
    """They are offered first, and cannot be moved from here."""
    async with world(2) as w:
        tasks = await three_at_the_first(w, (40, 32, 24, 16, 8))
        before = [w.router.sessions.pop(f"r{length}") for length in (8, 16, 24, 32)]
        offers = count_offers(w)
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            for asked, moved in ((3, 0), (6, 1), (9, 1)):  # and then they may have become known
                await rescheduler.pair(pairs(THERE))
                while rescheduler._moving:
                    await turns()
                assert (len(offers), rescheduler.moved) == (asked, moved)
            assert rescheduler.stayed == 0
        w.router.sessions |= {call.body.request: call for call in before}
        await asyncio.gather(*tasks)


def count_offers(w: World) -> list[Offer]:
    """Of the first unit, as they come."""
    engine = w.units[0].engine
    offer, offers = engine.offer, []

    async def counted(body: Offer) -> Offered:
        offers.append(body)
        return await offer(body)

    engine.offer = counted  # type: ignore[method-assign]
    return offers


async def test_who_could_not_go_comes_last_in_the_next_period() -> None:
    """Three that a destination always refuses do not keep the others here."""
    async with world(2) as w:
        tasks = await three_at_the_first(w, (40, 32, 24, 16, 8))
        real = w.units[1].engine.prep_recv
        refused = [prompt(1, first=length)[0] for length in (8, 16, 24)]

        async def refuse(body: PrepRecv) -> Any:
            if body.prompt[0] in refused:
                raise Unavailable("not now")
            return await real(body)

        w.units[1].engine.prep_recv = refuse  # type: ignore[method-assign]
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            for moved, stayed in ((0, 3), (2, 3)):
                await rescheduler.pair(pairs(THERE))
                while rescheduler._moving:
                    await turns()
                assert (rescheduler.moved, rescheduler.stayed) == (moved, stayed)
            await rescheduler.pair(pairs(Pair("unit-1", "unit-0")))
            assert rescheduler._passed.keys() <= {"unit-1"}
        await asyncio.gather(*tasks)


class LostFleet:
    """Cannot be reached at first."""

    def __init__(self) -> None:
        self.asked = 0
        self.told: asyncio.Future[Pairs] = asyncio.get_running_loop().create_future()

    async def state(self) -> FleetState:
        self.asked += 1
        if self.asked < 3:
            raise Unavailable("the gateway cannot be reached")
        return FleetState(loads={})

    async def pair(self, pairs: Pairs) -> None:
        if not self.told.done():
            self.told.set_result(pairs)

    async def scale(self, steps: Steps) -> None:
        raise AssertionError(f"{steps}, though there is nothing to scale")


async def test_a_fleet_that_cannot_be_reached_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    fleet = LostFleet()
    running = asyncio.create_task(FleetScheduler(fleet, WallClock(), period=0.001).run())
    told = await fleet.told
    running.cancel()
    assert told == Pairs(pairs=(), seconds=0.003, floor=Thresholds().out)
    assert len(caplog.records) == 1  # and not one a period


async def test_who_waits_where_the_first_finds_no_room_goes_first_and_nothing_is_copied() -> None:
    """In the order in which they wait there: the urgent one first. What fits is not offered."""
    async with world(2) as w:
        crowd = await fill(w.units[0], 30)
        w.router.units["unit-1"].withdraw()
        bodies = [
            replace(generate(prompt(30, first=i), request=f"r{i}", temperature=1.0), priority=-(i == 1))
            for i in range(2)
        ]
        tasks = [w.ask(body) for body in bodies]
        await until_waiting(w.units[0], 2)
        await w.router.units["unit-1"].admit()
        load, offer = await w.units[1].engine.load(), w.units[0].engine.offer
        assert (await offer(Offer(destination=load))).request == "r1"
        assert (await offer(Offer(destination=load, besides=["r1"]))).request == "r0"
        assert (await offer(Offer(destination=load, floor=1e9))).request is None
        async with Rescheduler(w.router, WallClock()) as rescheduler:
            await rescheduler.pair(pairs(THERE))
            await asyncio.gather(*tasks)
            assert (rescheduler.moved, rescheduler.stayed) == (2, 0)
        assert (await w.units[1].engine.load()).models[MODEL].received_tokens_total == 0
        await disperse(w.units[0], crowd)
        for body in bodies:
            w.check(body)


async def test_who_waits_stays_under_the_policy_of_the_papers_engine() -> None:
    cases: list[tuple[Policy, str | None]] = [("fcfs", "r"), ("vllm-2023", None)]
    for policy, offered in cases:
        async with units(2, blocks=260, policy=policy) as (here, there):
            crowd = await fill(here, 30)
            reader = Reader(here, generate(prompt(30)))
            await until_waiting(here)
            offer = Offer(destination=await there.engine.load())
            assert (await here.engine.offer(offer)).request == offered
            await disperse(here, crowd)
            await reader.task


async def test_who_moved_while_it_waited_is_told_what_the_cache_there_has_spared_it() -> None:
    async with world(2) as w:
        crowd = await fill(w.units[0], 30)
        before = Reader(w.units[1], generate(prompt(30), request="before"))
        await before.task
        task = w.ask(generate(prompt(30)))
        await until_waiting(w.units[0])
        await w.router.move("r", "unit-1")
        await task
        [end] = w.answers["r"].ends.values()
        assert end.cached_tokens == 29  # all but the last, whose logits are needed
        await disperse(w.units[0], crowd)


async def test_who_waits_goes_where_nobody_else_does_and_stays_with_what_is_here_of_it() -> None:
    """And with several choices: those stay until they run."""
    async with world(2) as w:
        crowd = await fill(w.units[0], 30)
        asked = [generate(prompt(30), request="two"), generate(prompt(30, first=1), request="one")]
        readers = [Reader(w.units[0], replace(asked[0], n=2)), Reader(w.units[0], asked[1])]
        await until_waiting(w.units[0], 2)
        load, offer = await w.units[1].engine.load(), w.units[0].engine.offer
        assert (await offer(Offer(destination=load))).request == "one"
        full = replace(load.models[MODEL], waiting=1)
        busy = replace(load, models=load.models | {MODEL: full})
        assert (await offer(Offer(destination=busy))).request is None
        assert (await offer(Offer(destination=replace(load, models={})))).request is None
        await disperse(w.units[0], crowd)
        await asyncio.gather(*(reader.task for reader in readers))


async def test_who_waits_for_a_moment_stays() -> None:
    """There is room for the first, and the next job lets it in."""
    async with world(2) as w:
        offers = []
        tasks = [w.ask(generate(prompt(30, first=i), request=f"r{i}")) for i in range(4)]
        load = await w.units[1].engine.load()
        while not all(task.done() for task in tasks):
            if (await w.units[0].engine.load()).models[MODEL].waiting:
                offers.append((await w.units[0].engine.offer(Offer(destination=load))).request)
            await turns(1)
        assert offers
        assert not any(offers)  # and those that run are about to end


async def test_who_has_received_a_part_of_its_prompt_stays_with_it() -> None:
    async with world(2) as w:
        source, target = w.units
        tokens = prompt(30)
        spot = await source.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=16))
        await target.engine.remote_send(sending(tokens, spot, spot.matched, spot.end))
        crowd = await fill(source, 30)
        reader = Reader(source, generate(tokens, begin=16))
        await until_waiting(source)
        load = await target.engine.load()
        assert (await source.engine.offer(Offer(destination=load))).request is None
        with pytest.raises(BadRequest, match="has a choice without a token"):
            await source.engine.hold("r")
        await disperse(source, crowd)
        await reader.task
        assert reader.answer.tokens == expected(source.executor, reader.body)

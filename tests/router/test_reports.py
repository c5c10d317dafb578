"""What the router knows of its units' loads, and where `freest` sends requests by it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from kvloom.engine.freeness import Arrival
from kvloom.router.replicas import LINGER, PERIOD, LoadReport
from kvloom.types.load import UnitLoad
from kvloom.types.request import Level
from tests.cluster.loads import model, unit
from tests.lab.sim.fleets import virtually
from tests.router.fleets import Fleets, ManualClock, ask_well, begin, body, routed, turns


class Asked:
    """A unit's load, and how often it was asked for. An answer waits for its leave."""

    def __init__(self, load: UnitLoad | None) -> None:
        self.load = load
        self.times = 0
        self.leave = asyncio.Event()
        self.leave.set()

    async def __call__(self) -> UnitLoad | None:
        self.times += 1
        load = self.load
        await self.leave.wait()
        return load


def running(load: UnitLoad | None) -> tuple[int, int]:
    assert load is not None
    return load.models["m"].running, load.models["m"].used_blocks


async def test_a_unit_is_asked_as_long_as_somebody_wants_to_know() -> None:
    clock, asked = ManualClock(), Asked(unit(model(2, 320)))
    report = LoadReport(asked, clock)
    watching = asyncio.create_task(report.watch())
    await clock.advance(60)
    assert asked.times == 0
    assert report.expected() is None
    await turns()
    assert asked.times == 1
    assert running(report.expected()) == (2, 20)
    asked.load = unit(model(5, 320))
    await clock.advance(PERIOD)
    assert running(report.expected()) == (5, 20)
    await clock.advance(100 * LINGER)
    assert asked.times <= 2 + LINGER / PERIOD
    assert report.expected() is None  # it would be old
    watching.cancel()


async def test_what_was_sent_since_it_was_asked_counts_once() -> None:
    clock, asked = ManualClock(), Asked(unit(model(2, 320)))
    report = LoadReport(asked, clock)
    watching = asyncio.create_task(report.watch())
    report.expected()
    await turns()
    report.sent(Arrival("m", 13, 2, made=20))  # 3 pages
    report.sent(Arrival("unknown", 33, 2))
    assert running(report.expected()) == (4, 23)
    asked.leave.clear()
    await clock.advance(PERIOD)
    report.sent(Arrival("m", 16))  # the unit may have told before that
    assert running(report.expected()) == (5, 24)
    asked.leave.set()
    await turns()
    assert running(report.expected()) == (3, 21)
    report.forget()
    assert report.expected() is None
    await clock.advance(PERIOD)
    assert running(report.expected()) == (2, 20)
    asked.load = None
    await clock.advance(PERIOD)
    assert report.expected() is None
    watching.cancel()


async def reported(fleets: Fleets, *loads: UnitLoad) -> None:
    for engine, load in zip(fleets.engines, loads, strict=True):
        engine.load_models = load.models
        engine.total_blocks = load.total_blocks
        engine.levels = load.priorities
    await ask_well(fleets.router, body())
    await turns()
    fleets.journal.clear()


async def test_freest_goes_by_the_reports_and_what_was_sent() -> None:
    """Though unit a has as few calls in flight as any."""
    async with routed(3, "freest") as fleets:
        await reported(fleets, unit(model(9, 16 * 900)), unit(model(4, 640)), unit(model(2, 320)))
        for engine in fleets.engines:
            engine.gate.clear()
        tasks = [asyncio.create_task(ask_well(fleets.router, body(160))) for _ in range(10)]
        await turns()
        assert Counter(call.unit for call in fleets.journal) == {"b": 4, "c": 6}
        for engine in fleets.engines:
            engine.gate.set()
        await asyncio.gather(*tasks)


async def test_urgent_requests_follow_the_first_of_them_before_any_report_tells_of_it() -> None:
    """To the emptiest unit, which counts as fuller than the others from then on."""
    async with routed(3, "freest") as fleets:
        level = (Level(-1, 48 * 16),)
        used = (640, 320, 640)
        await reported(fleets, *[unit(model(2, one), blocks=80, priorities=level) for one in used])
        for engine in fleets.engines:
            engine.gate.clear()
        tasks = []
        for priority in (-1, 0, -1, 0, -1, 0):
            request = replace(body(16), priority=priority)
            tasks.append(asyncio.create_task(ask_well(fleets.router, request)))
            await turns()
        assert "".join(call.unit for call in fleets.journal) == "bcbabc"
        for engine in fleets.engines:
            engine.gate.set()
        await asyncio.gather(*tasks)


async def test_infaas_goes_by_memory_whatever_the_batch() -> None:
    async with routed(3, "infaas") as fleets:
        await reported(fleets, unit(model(9, 160)), unit(model(1, 640)), unit(model(2, 320)))
        for _ in range(4):
            await ask_well(fleets.router, body())
        assert {call.unit for call in fleets.journal} == {"a"}


async def test_what_was_sent_counts() -> None:
    """A burst between two reports."""
    async with routed(3, "infaas") as fleets:
        await reported(fleets, *(unit(model(1, used)) for used in (160, 161, 162)))
        for engine in fleets.engines:
            engine.gate.clear()
        asked = [asyncio.create_task(ask_well(fleets.router, body(64))) for _ in range(6)]
        await turns()
        assert "".join(call.unit for call in fleets.journal) == "abcabc"
        for engine in fleets.engines:
            engine.gate.set()
        await asyncio.gather(*asked)


async def test_freest_sends_nothing_to_a_unit_that_drains_or_is_down() -> None:
    async with routed(3, "freest") as fleets:
        await reported(fleets, *[unit(model())] * 3)
        fleets.engines[0].draining = True
        await fleets.clock.advance(PERIOD)
        fleets.router.units["b"].withdraw()
        assert fleets.router.units["b"].report.expected() is None  # it may come back as another
        for _ in range(4):
            await ask_well(fleets.router, body())
        assert {call.unit for call in fleets.journal} == {"c"}
        await fleets.router.units["b"].admit()
        await fleets.clock.advance(PERIOD)
        fleets.journal.clear()
        for _ in range(4):
            await ask_well(fleets.router, body())
        assert Counter(call.unit for call in fleets.journal) == {"b": 2, "c": 2}


async def test_freest_without_reports_goes_by_what_is_in_flight() -> None:
    async with routed(3, "freest") as fleets:
        tasks = [asyncio.create_task(ask_well(fleets.router, body(30))) for _ in range(6)]
        await asyncio.gather(*tasks)
        assert Counter(call.unit for call in fleets.journal) == {"a": 2, "b": 2, "c": 2}


async def test_no_other_program_has_units_asked() -> None:
    async with routed(2, "least_loaded") as fleets:
        for _ in range(3):
            await ask_well(fleets.router, body())
            await fleets.clock.advance(PERIOD)
        assert [unit.report.expected() for unit in fleets.router.units.values()] == [None, None]


@virtually
async def test_a_unit_that_hangs_costs_a_report_of_all_loads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in vain costs virtual time."""
    async with routed(2) as fleets:
        engine, asked = fleets.engines[1], Asked(unit())
        asked.leave.clear()
        monkeypatch.setattr(engine, "load", asked)
        for _ in range(3):
            assert set(await fleets.router.loads()) == {"a"}  # nobody knows what the other has
        assert asked.times == 1
        asked.leave.set()
        await turns()
        asked.load = unit(model(2, 320))
        assert (await fleets.router.loads())["b"] == asked.load
        asked.leave.clear()
        for _ in range(3):  # it is late, and not yet lost: nobody is to start one in its place
            assert (await fleets.router.loads())["b"] == asked.load
        assert fleets.router.services["b"] == "up"
    assert asked.times == 3  # and nobody waits for the last one


async def test_loads_are_those_of_the_moment_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's question, asked before and not answered yet, is none of them."""
    async with routed(2) as fleets:
        engine, asked = fleets.engines[1], Asked(unit())
        asked.leave.clear()
        monkeypatch.setattr(engine, "load", asked)
        earlier = await begin(fleets.router.loads())
        asked.load = unit(model(2, 320))
        later = await begin(fleets.router.loads())
        asked.leave.set()
        assert (await later)["b"] == asked.load
        await earlier

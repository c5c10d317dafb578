"""Programs that evict and keep, and an index that hears of it, over real engines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvloom.engine.engine import Engine
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program, ProgramFailed
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate
from kvloom.types.verbs import Prefix
from tests.lab.sim.fleets import unit, virtually

PROMPT = [number * 7 % 500 for number in range(100)]
answers: list[int] = []


async def evicting(call: Call, fleet: Fleet, *, end: int = 100) -> Frames:
    replica = fleet.nearest(call.prompt, slack=4096)
    try:
        async for frame in call.start_generate(replica):
            yield frame
    finally:
        answers.append(await call.evict(replica, end))


async def keeping(call: Call, fleet: Fleet, *, end: int = 100, seconds: int = 60) -> Frames:
    replica = fleet.nearest(call.prompt, slack=4096)
    try:
        async for frame in call.start_generate(replica):
            yield frame
    finally:
        answers.append(await call.keep(replica, end, seconds=seconds))


async def nearest(call: Call, fleet: Fleet) -> Frames:
    async for frame in call.start_generate(fleet.nearest(call.prompt, slack=4096)):
        yield frame


@asynccontextmanager
async def fleet_of(function: object, **options: object) -> AsyncIterator[SimulatedFleet]:
    answers.clear()
    units = [unit(name, ("small",)) for name in ("a", "b")]
    async with run_fleet(units, Program("own", function, options)) as fleet:  # type: ignore[arg-type]
        yield fleet


async def ask(
    fleet: SimulatedFleet, request: str, prompt: list[int], *, tenant: str = "", salt: str = ""
) -> int:
    """Returns how many tokens of the prompt were cached."""
    body = StartGenerate(
        model="small",
        request=request,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=4, seed=1),
        tenant=tenant,
        salt=salt,
    )
    cached = -1
    async for frame in fleet.router.start_generate(body):
        for event in frame:
            if isinstance(event, EndEvent):
                assert event.reason == "length"
                cached = event.cached_tokens
    return cached


def cached_blocks(fleet: SimulatedFleet) -> dict[str, int]:
    return {name: engine.pool.cached for name, engine in fleet.engines.items()}


def pinned_blocks(engine: Engine) -> int:
    return engine.pool.caches["small"].prefixes.pinned_blocks


@virtually
async def test_a_program_evicts_what_it_has_answered() -> None:
    async with fleet_of(evicting) as fleet:
        assert await ask(fleet, "one", PROMPT) == 0
        assert answers == [103]  # the last token made has no K and V
        assert set(cached_blocks(fleet).values()) == {0}
        assert await ask(fleet, "two", PROMPT) == 0


@virtually
async def test_no_eviction_takes_all() -> None:
    """Without tokens a program drops nothing."""
    async with fleet_of(evicting, end=0) as fleet:
        await ask(fleet, "one", PROMPT)
        assert answers == [0]
        assert await ask(fleet, "two", PROMPT) == 99


@virtually
async def test_what_a_program_keeps_outlives_its_request_and_is_renewed() -> None:
    async with fleet_of(keeping) as fleet:
        await ask(fleet, "one", PROMPT)
        [home] = [engine for engine in fleet.engines.values() if pinned_blocks(engine)]
        assert answers == [100]
        await asyncio.sleep(50)
        body = Prefix(model="small", prompt=PROMPT)
        assert (await home.evict(body)).pinned == 100
        assert await ask(fleet, "two", PROMPT) == 99  # renews it
        assert answers == [100, 100]
        await asyncio.sleep(50)
        assert pinned_blocks(home)
        await asyncio.sleep(15)
        assert not pinned_blocks(home)
        assert (await home.evict(body)).pinned == 0


@virtually
async def test_pins_of_tenants_and_salts_are_apart() -> None:
    async with fleet_of(keeping) as fleet:
        await ask(fleet, "one", PROMPT, tenant="alice", salt="alice")
        await ask(fleet, "two", PROMPT, tenant="bob", salt="bob")
        assert answers == [100, 100]
        pinned = sum(pinned_blocks(engine) for engine in fleet.engines.values())
        await ask(fleet, "three", PROMPT, tenant="bob", salt="bob")
        assert sum(pinned_blocks(engine) for engine in fleet.engines.values()) == pinned
        assert await ask(fleet, "four", PROMPT) == 0  # nothing of theirs is found without their salt


@virtually
async def test_a_pin_of_no_time_fails_its_program_and_not_its_request() -> None:
    async with fleet_of(keeping, seconds=0) as fleet:
        with pytest.raises(ProgramFailed):
            await ask(fleet, "one", PROMPT)
        assert not answers


@virtually
async def test_the_index_hears_of_what_others_had_computed_and_dropped() -> None:
    async with fleet_of(nearest) as fleet:
        await ask(fleet, "warm", [1, 2, 3])
        by_hand = StartGenerate(
            model="small", request="other", prompt=PROMPT, sampling=SamplingParams(max_tokens=4, seed=1)
        )
        for name in ("b", "a"):  # as another gateway asks for it
            async for _ in fleet.engines[name].start_generate(by_hand):
                pass
            await asyncio.sleep(1)
            matched = fleet.router._index.match("small", PROMPT, width=width(fleet))
            assert matched == {name: 100 // width(fleet) * width(fleet)}
            assert await ask(fleet, f"near {name}", PROMPT) == 99
            for engine in fleet.engines.values():
                await engine.evict(Prefix(model="small", prompt=[]))
            await asyncio.sleep(1)
            matched = fleet.router._index.match("small", PROMPT, width=width(fleet))
            assert matched == {}


def width(fleet: SimulatedFleet) -> int:
    return fleet.engines["a"].pool.caches["small"].geometry.tokens_per_block

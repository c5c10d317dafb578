"""What a program pins stays for the time of its request, and goes with it, however that ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from tests.router.fleets import Fleets, ask_well, begin, body, routed, turns

PROMPT = 40


async def pinning(call: Call, fleet: Fleet) -> Frames:
    """The context stays at the first replica while the second one answers."""
    first, *others = fleet.up
    await call.pin(first, -1)
    async for frame in call.start_generate(others[0] if others else first):
        yield frame


PROGRAM = Program("pinning", pinning, {})


async def warm(fleets: Fleets) -> None:
    """The first unit has the prompt cached."""
    fleets.engines[0].cached.append(body(PROMPT).prompt)


async def test_a_pin_lasts_as_long_as_its_request() -> None:
    async with routed(2, PROGRAM) as fleets:
        await warm(fleets)
        first, second = fleets.engines
        second.gate.clear()
        request = body(PROMPT)
        task = await begin(ask_well(fleets.router, request))
        assert first.pins == {request.request: 36}
        await fleets.clock.advance(10.5)
        assert first.renewals == 10  # three in a lease of 3 s
        assert fleets.router.units["a"].replicas["m"].calls == 1
        second.gate.set()
        await task
        assert not first.pins
        assert first.aborts == [(request.request, None)]
        await fleets.clock.advance(10)
        assert first.renewals == 10


@pytest.mark.parametrize("units", [1, 2])
async def test_a_request_that_is_cancelled_unpins(units: int) -> None:
    """At every turn of the event loop."""
    seen = 0
    for turn in range(1000):
        async with routed(units, PROGRAM) as fleets:
            await warm(fleets)
            task = asyncio.create_task(ask_well(fleets.router, body(PROMPT)))
            await turns(turn)
            seen += bool(fleets.engines[0].pins)
            over = task.done()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await turns()
            assert not fleets.world.held
            renewals = fleets.engines[0].renewals
            await fleets.clock.advance(5)
            assert fleets.engines[0].renewals == renewals
        if over:
            assert seen
            return


async def test_a_client_that_hangs_up_unpins() -> None:
    for frames in range(1, 5):
        async with routed(2, PROGRAM) as fleets:
            await warm(fleets)
            async with aclosing(fleets.router.start_generate(body(PROMPT))) as stream:
                for _ in range(frames):
                    await anext(stream)
                assert fleets.engines[0].pins
            assert not fleets.world.held


@pytest.mark.parametrize(
    ("fault", "after"),
    [
        (Unavailable("broken"), False),
        (Unavailable("broken"), True),
        (KvloomError("a bug"), False),
        (KvloomError("a bug"), True),
        (BadRequest("no"), False),
        (OutOfBlocks("no room"), False),
        (QueueFull("many"), False),
    ],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, Exception) else "after" if value else "before"
    ),
)
async def test_a_pin_that_fails(fault: KvloomError, after: bool) -> None:
    """A replica that has promised too much costs nothing but the pin; after other errors the request is
    answered as after those of any verb."""
    async with routed(2, PROGRAM) as fleets:
        await warm(fleets)
        world = fleets.world
        world.fault, world.fault_at, world.fault_after = fault, 0, after
        await ask_well(fleets.router, body(PROMPT))
        assert not world.held
        refused = isinstance(fault, OutOfBlocks | QueueFull)
        assert [call.verb for call in fleets.journal] == ["pin", "start_generate"]
        assert fleets.journal[1].unit == "b" or not refused


async def test_a_second_pin_takes_the_first_ones_place() -> None:
    kept: list[int] = []

    async def twice(call: Call, fleet: Fleet) -> Frames:
        first = fleet.up[0]
        kept.extend([await call.pin(first, end) for end in (20, None, 3)])
        async for frame in call.start_generate(fleet.up[1]):
            yield frame

    async with routed(2, Program("twice", twice, {})) as fleets:
        await warm(fleets)
        await ask_well(fleets.router, body(PROMPT))
        assert kept == [20, 40, 0]
        assert not fleets.world.held


async def test_nothing_cached_is_nothing_pinned() -> None:
    async with routed(2, PROGRAM) as fleets:
        await ask_well(fleets.router, body(PROMPT))
        assert [call.verb for call in fleets.journal] == ["pin", "start_generate"]
        assert not fleets.engines[0].aborts


async def test_a_pin_whose_lease_is_lost_is_no_error() -> None:
    async with routed(2, PROGRAM) as fleets:
        await warm(fleets)
        first, second = fleets.engines
        second.gate.clear()
        task = await begin(ask_well(fleets.router, body(PROMPT)))
        first.pins.clear()
        await fleets.clock.advance(5)
        second.gate.set()
        await task

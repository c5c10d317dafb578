"""What counts as a replica's queue, from when to when."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program, load_program
from kvloom.types.errors import OutOfBlocks
from tests.router.fleets import Fleets, ask_well, begin, body, routed, turns
from tests.router.ledger import PAGE


def queues(fleets: Fleets) -> dict[str, int]:
    return {name: unit.replicas["m"].queue for name, unit in fleets.router.units.items()}


async def test_balanced_counts_what_others_are_about_to_send() -> None:
    """Requests that come together: none of them has been sent when the last is placed."""
    async with routed(2, "balanced") as fleets:
        fleets.engines[0].pace = 1000
        tasks = [asyncio.create_task(ask_well(fleets.router, body([own] * 100))) for own in (7, 8, 9)]
        await turns(2)
        assert not fleets.journal
        assert queues(fleets) == {"a": 99 + 51 + 50, "b": 1 + 49 + 50}
        await asyncio.gather(*tasks)
        assert [call.end for call in fleets.journal if call.verb == "prep_recv"] == [99, 51, 50]
        assert queues(fleets) == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("sender", "receiver", "queue"),
    [
        (0, 0, {"a": 99, "b": 1}),
        (0, 64, {"a": 99, "b": 1}),  # what is there already is computed here all the same, to attend to
        (64, 0, {"a": 35, "b": 1}),
        (98, 0, {"a": 3, "b": 1}),  # the router knows of whole pages
    ],
)
async def test_a_send_counts_as_its_prefillers_queue(
    sender: int, receiver: int, queue: dict[str, int]
) -> None:
    """With all that it has not cached, until it has arrived."""
    async with routed(2, "disaggregate") as fleets:
        for engine, cached in zip(fleets.engines, (sender, receiver), strict=True):
            context = body(cached).prompt
            engine.cached = [context]
            fleets.router._index.note("m", context, engine.name, width=PAGE)
        fleets.engines[0].pace = 1000
        task = asyncio.create_task(ask_well(fleets.router, body(100)))
        await turns(2)
        assert queues(fleets) == queue
        await turns()
        assert queues(fleets) == queue
        assert [unit.calls for unit in fleets.router.units.values()] == [1, 1]
        await task


async def test_who_has_nothing_to_send_has_nothing_to_compute() -> None:
    async with routed(2, "disaggregate") as fleets:
        decoder = fleets.engines[1]
        decoder.cached = [body(96).prompt]
        decoder.answering.clear()
        task = asyncio.create_task(ask_well(fleets.router, body(97)))
        await turns(2)
        assert queues(fleets) == {"a": 96, "b": 1}  # before it is known
        await turns()
        assert queues(fleets) == {"a": 0, "b": 1}
        decoder.answering.set()
        await task


async def undeterred(call: Call, fleet: Fleet) -> Frames:
    """Does without what it cannot reserve."""
    prefiller, decoder = fleet.replicas
    with suppress(OutOfBlocks):
        await call.prep_recv(decoder, end=-1, sender=prefiller)
    async for frame in call.start_generate(prefiller):
        yield frame


@pytest.mark.parametrize("program", [load_program("disaggregate"), Program("undeterred", undeterred, {})])
async def test_a_refused_reservation_is_nobodys_queue(program: Program) -> None:
    async with routed(2, program) as fleets:
        fleets.engines[1].free = 0
        fleets.engines[0].gate.clear()  # where it goes instead
        task = await begin(ask_well(fleets.router, body(100)))
        assert [call.verb for call in fleets.journal] == ["prep_recv", "start_generate"]
        assert queues(fleets) == {"a": 0, "b": 0}
        fleets.engines[0].gate.set()
        await task

"""Who is answered when the gateway ends hears of it."""

from __future__ import annotations

import asyncio

from kvloom.serve.gateway_process import GRACE_SECONDS, _end_streams
from tests.router.fleets import ask, body, routed, run, turns


def test_what_has_not_ended_by_itself_is_ended_before_the_grace_is_over() -> None:
    async def test() -> None:
        async with routed(1) as fleets:
            [engine] = fleets.engines
            ending = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(_end_streams(fleets.router, ending, fleets.clock))
                engine.gate.clear()
                asked = [group.create_task(ask(fleets.router, body())) for _ in range(3)]
                await turns()
                ending.set()
                await turns()
                await fleets.clock.advance(0.49 * GRACE_SECONDS)
                assert not any(one.done() for one in asked)
                await fleets.clock.advance(0.02 * GRACE_SECONDS)
                await turns()
                engine.gate.set()
            assert {end.reason for one in asked for end in one.result().ends.values()} == {"abort"}

    run(test)

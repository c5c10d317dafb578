"""The line that says how a fleet does: while something runs, and never while nothing does."""

from __future__ import annotations

import asyncio

from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.serve.processes.pulse import tell_pulse
from kvloom.types.load import UnitLoad
from tests.cluster.loads import model, unit


class Router:
    """It has begun so many requests, and counts how often engines are asked."""

    begun = 0
    busy = False
    asked = 0

    async def loads(self) -> dict[str, UnitLoad]:
        self.asked += 1
        return {"unit-0": unit(model(output_tokens_total=100 * self.begun, used_blocks=5, waiting=2))}


def test_a_line_comes_while_something_runs() -> None:
    router, lines = Router(), list[str]()

    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        telling = asyncio.get_running_loop().create_task(tell_pulse(router, clock, lines.append))
        await clock.sleep(100)
        assert (lines, router.asked) == ([], 0)
        router.begun = 5
        await clock.sleep(10)
        router.busy = True
        await clock.sleep(10)
        router.busy = False
        await clock.sleep(100)
        telling.cancel()

    run_virtual(main())
    assert router.asked == len(lines) == 2
    assert lines[0].startswith("0.5 requests/s, 50 tokens/s, pool ")
    assert "2 waiting" in lines[0]
    assert lines[1].startswith("0.0 requests/s, 0 tokens/s, pool ")

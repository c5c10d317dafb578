"""The line that says how a fleet does: while something runs, and never while nothing does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress

import pytest
from msgspec.structs import replace

from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.serve.processes.pulse import tell_pulse
from kvloom.types.errors import Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.service import Service
from tests.cluster.loads import model, unit


class Router:
    """It has begun so many requests, and counts how often engines are asked."""

    begun = 0
    busy = False
    asked = 0
    services: Mapping[str, Service] = {"unit-0": "up"}

    async def loads(self) -> dict[str, UnitLoad]:
        self.asked += 1
        return {"unit-0": unit(model(output_tokens_total=100 * self.begun, used_blocks=5, waiting=2))}


def test_a_line_comes_while_something_runs() -> None:
    router, lines = Router(), list[str]()

    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        telling = asyncio.get_running_loop().create_task(tell_pulse(router, clock, lines.append))
        await clock.sleep(100)
        assert (lines, router.asked) == ([], 1)
        router.begun = 5
        await clock.sleep(10)
        router.busy = True
        await clock.sleep(10)
        router.busy = False
        await clock.sleep(100)
        telling.cancel()

    run_virtual(main())
    assert (router.asked, len(lines)) == (4, 3), "at first, while something runs, and once more"
    assert lines[0].startswith("0.5 requests/s, 50 tokens/s, pool ")
    assert "2 waiting" in lines[0]
    assert lines[1].startswith("0.0 requests/s, 0 tokens/s, pool ")
    assert lines[2] == lines[1]


Units = dict[str, tuple[int, ...]]
"""Tokens made, computed and found cached, by unit, and when its engine began, if not at 0."""


class Scripted:
    """A router whose units tell one after the other of these counts."""

    def __init__(
        self,
        first: Units | None,
        *ticks: tuple[int, bool, Units | None],
        services: Mapping[str, Service] | None = None,
    ) -> None:
        """ticks: requests that begin before each, whether it is busy then, and the counts, None for an error
        or if nobody is to ask. services: the states of the units at first; by itself, those that answer are
        up."""
        self.begun = 0
        self.busy = False
        self.services: Mapping[str, Service] = services or dict.fromkeys(first or (), "up")
        self._ticks = list(ticks)
        self._counts: Units | None = first

    def now(self) -> float:
        return self.clock.now()

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        if not self._ticks:
            raise asyncio.CancelledError
        new, self.busy, self._counts = self._ticks.pop(0)
        self.begun += new

    async def loads(self) -> dict[str, UnitLoad]:
        if self._counts is None:
            raise Unavailable("no unit answers")
        loads = {}
        for name, (made, computed, cached, *began) in self._counts.items():
            counts = {
                "output_tokens_total": made,
                "prompt_tokens_total": computed,
                "cached_tokens_total": cached,
            }
            loads[name] = replace(unit(model(**counts)), began=float(sum(began)))
        return loads

    def tell(self) -> list[tuple[str, str, str]]:
        """The lines' requests, tokens and prefix hits."""
        lines: list[str] = []

        async def main() -> None:
            self.clock = LoopClock(asyncio.get_running_loop())
            with suppress(asyncio.CancelledError):
                await tell_pulse(self, self, lines.append)

        run_virtual(main())
        found = [
            re.fullmatch(r"(\S+) requests/s, (\S+) tokens/s, .*, prefix hits (.*)", line) for line in lines
        ]
        return [(one[1], one[2], one[3]) for one in found if one]


def test_a_new_gateway_tells_what_is_made_from_now_on() -> None:
    router = Scripted({"a": (5_000_000, 1000, 0)}, (1, True, {"a": (5_000_100, 1010, 30)}))
    assert router.tell() == [("0.1", "10", "75 %")]


def test_a_unit_that_begins_anew_or_is_not_heard_adds_what_it_has_made_only() -> None:
    million = 10**6
    router = Scripted(
        {"a": (million, 0, 0), "b": (million, 0, 0)},
        (1, True, {"a": (million + 100, 0, 0), "b": (50, 0, 0, 1)}),
        (0, True, {"a": (million + 200, 0, 0)}),
        (0, True, {"a": (million + 300, 0, 0), "b": (90, 0, 0, 1)}),
        (0, True, {"a": (million + 400, 0, 0), "b": (100, 0, 0, 1)}),
    )
    assert [tokens for _, tokens, _ in router.tell()] == ["15", "10", "14", "11"]


@pytest.mark.parametrize("before", ["starting", "restarting", "away", None])
def test_a_new_process_counts_from_the_beginning(before: Service | None) -> None:
    """None: the unit was added later."""
    services: dict[str, Service] = {"a": "up"}
    if before is not None:
        services["b"] = before
    router = Scripted({"a": (7, 0, 0)}, (1, True, {"a": (7, 0, 0), "b": (300, 20, 60, 1)}), services=services)
    assert router.tell() == [("0.1", "30", "75 %")]


def test_a_restarted_process_that_did_more_than_the_one_before_counts_whole() -> None:
    router = Scripted({"a": (200, 10, 0)}, (1, True, {"a": (300, 20, 60, 1)}))
    assert router.tell() == [("0.1", "30", "75 %")]


@pytest.mark.parametrize("first", [{}, None])
def test_an_older_process_that_does_not_answer_at_first_counts_from_its_first_answer(
    first: Units | None,
) -> None:
    router = Scripted(
        first,
        (1, True, {"a": (5_000_000, 0, 0)}),
        (0, True, {"a": (5_000_100, 0, 0)}),
        services={"a": "down"},
    )
    assert [tokens for _, tokens, _ in router.tell()] == ["0", "10"]


def test_the_tail_of_a_stream_is_told_at_its_end() -> None:
    idle = [(0, False, None)] * 360
    router = Scripted(
        {"a": (0, 0, 0)},
        (1, True, {"a": (100, 0, 0)}),
        (0, False, {"a": (20_100, 0, 0)}),
        *idle,
        (1, False, {"a": (20_110, 0, 0)}),
    )
    assert [tokens for _, tokens, _ in router.tell()] == ["10", "2000", "1"]


def test_what_cannot_be_asked_in_time_is_told_over_the_time_that_passed() -> None:
    router = Scripted({"a": (0, 0, 0)}, (4, True, None), (2, False, None), (0, False, {"a": (600, 0, 0)}))
    assert router.tell() == [("0.2", "20", "none asked")]

"""A rolling restart: one component after the other, and what goes wrong ends it."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.router.rolling import Rolling
from kvloom.types.clock import WallClock
from kvloom.types.errors import Conflict, Unavailable
from tests.router.drained import Played, drained
from tests.router.fleets import run, turns


def rolling(
    played: Played,
    *beside: str,
    gate: asyncio.Event | None = None,
    problem: Unavailable | None = None,
) -> tuple[Rolling, list[str]]:
    """And the components beside the units that were restarted; each waits for `gate`, if there is
    one. problem: what their new processes die of."""
    renewed: list[str] = []

    async def restart(component: str) -> None:
        if component in played.fleets.world.engines:
            played.ends.append(component)
            return
        renewed.append(component)
        if gate is not None:
            await gate.wait()
        if problem is not None:
            raise problem

    return Rolling(played.drains, WallClock(), restart=restart, beside=beside), renewed


async def told(one: Rolling) -> list[tuple[str, str]]:
    return [(step.component, step.state) async for step in one.steps()]


def test_every_component_in_turn() -> None:
    async def test() -> None:
        async with drained(2) as played:
            one, renewed = rolling(played, "scheduler", "gateway")
            async with one:
                one.begin()
                hearing = asyncio.create_task(told(one))
                await turns()
                assert (played.ends, renewed) == (["a"], [])
                assert played.states() == {"a": "restarting", "b": "up"}
                with pytest.raises(Conflict, match="under way, at a"):
                    one.begin()
                one.refuse_while_leaving()
                played.starts.set()
                steps = await hearing
                assert played.ends == ["a", "b"]
                assert renewed == ["scheduler", "gateway"]
                assert steps == [
                    (component, state)
                    for component in ("a", "b", "scheduler", "gateway")
                    for state in ("restarting", "restarted")
                ]
                assert await told(one) == steps  # whoever comes late hears the same
                with pytest.raises(Conflict, match="another gateway"):
                    one.refuse_while_leaving()

    run(test)


def test_a_unit_that_was_taken_out_of_service_stays_out() -> None:
    async def test() -> None:
        async with drained(2) as played:
            await played.drains.drain("a")
            played.starts.set()
            one, _ = rolling(played, "gateway")
            async with one:
                one.begin()
                assert len(await told(one)) == 6
                assert played.ends == ["a", "b"]
                assert played.states() == {"a": "drained", "b": "up"}

    run(test)


def test_a_new_process_that_dies_ends_it() -> None:
    async def test() -> None:
        async with drained(2) as played:
            played.problem = Unavailable("a ended with exit code 3 as it started; it is tried again")
            played.starts.set()
            one, renewed = rolling(played, "gateway")
            async with one:
                one.begin()
                steps = [step async for step in one.steps()]
                assert [step.state for step in steps] == ["restarting", "failed"]
                assert "exit code 3" in steps[-1].problem
                assert (played.ends, renewed) == (["a"], [])
                played.problem = None
                played.fleets.engines[0].down = False
                one.begin()
                assert (await told(one))[-1] == ("gateway", "restarted")

    run(test)


def test_a_gateway_that_finds_no_successor_serves_on() -> None:
    async def test() -> None:
        async with drained(1) as played:
            played.starts.set()
            died = Unavailable("the new gateway ended with exit code 3 as it started")
            one, _ = rolling(played, "gateway", problem=died)
            async with one:
                one.begin()
                assert (await told(one))[2:] == [("gateway", "restarting"), ("gateway", "failed")]
                one.refuse_while_leaving()

    run(test)


def test_it_waits_for_a_restart_that_somebody_else_has_asked_for_before_its_gateway_leaves() -> None:
    async def test() -> None:
        async with drained(2) as played:
            played.starts.set()
            gate = asyncio.Event()
            one, renewed = rolling(played, "scheduler", "gateway", gate=gate)
            async with one:
                one.begin()
                await turns()
                played.starts.clear()
                asking = asyncio.create_task(played.drains.restart("b"))
                await turns()
                gate.set()
                await turns()
                assert renewed == ["scheduler"]
                played.starts.set()
                await asking
                assert (await told(one))[-1] == ("gateway", "restarted")

    run(test)


def test_units_that_come_and_go_are_left_alone() -> None:
    """One that has no process needs no new one, nor does one that is about to lose it."""

    async def test() -> None:
        async with drained(3) as played:
            played.starts.set()
            units = played.fleets.router.units
            units["a"].leave()
            units["b"].leave()
            units["b"].gone()
            one, _ = rolling(played, "gateway")
            async with one:
                one.begin()
                await told(one)
                assert played.ends == ["c"]

    run(test)

"""A rolling restart: one component after the other, and what goes wrong ends it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvloom.cluster.launcher import Change
from kvloom.types.errors import Conflict
from tests.router.fleets import begin, turns
from tests.router.ledger import card
from tests.router.managed import GATEWAY, Managed, managed


async def told(played: Managed) -> list[tuple[str, str]]:
    return [(step.component, step.state) async for step in played.orders.steps()]


def restarted(*components: str) -> list[tuple[str, str]]:
    return [(component, state) for component in components for state in ("restarting", "restarted")]


async def test_every_component_in_turn() -> None:
    async with managed(2, scheduler=True) as played:
        await played.orders.roll()
        hearing = await begin(told(played))
        assert played.done == ["stop a", "start a"]
        assert played.states() == {"a": "restarting", "b": "up"}
        with pytest.raises(Conflict, match="under way, at a"):
            await played.orders.roll()
        played.processes.starts.set()
        steps = await hearing
        assert played.done == [
            *("stop a", "start a", "stop b", "start b"),
            *("stop scheduler", "start scheduler", "start gateway/2", f"retire {GATEWAY}"),
        ]
        assert steps == restarted("a", "b", "scheduler", "gateway")
        assert await told(played) == steps  # whoever comes late hears the same
        assert played.states() == {"a": "up", "b": "up"}


@pytest.mark.parametrize("units", [2, 8])
async def test_each_step_is_told_once(units: int) -> None:
    async with managed(units) as played:
        played.processes.starts.set()
        await played.orders.roll()
        steps = await told(played)
        heard = [news for name, news in played.processes.news if name == GATEWAY]
        changes = [news for news in heard if isinstance(news, Change)]
        assert sum(len(change.steps) for change in changes) == len(steps) == 2 * (units + 1)


async def test_a_unit_that_was_taken_out_of_service_stays_out() -> None:
    async with managed(2) as played:
        await played.orders.drain("a")
        played.processes.starts.set()
        await played.orders.roll()
        assert await told(played) == restarted("a", "b", "gateway")
        assert played.done[:4] == ["stop a", "start a", "stop b", "start b"]
        assert played.states() == {"a": "drained", "b": "up"}


async def test_a_new_process_that_dies_ends_it() -> None:
    async with managed(2) as played:
        played.processes.problem = "ended with exit code 3"
        played.processes.starts.set()
        await played.orders.roll()
        steps = [step async for step in played.orders.steps()]
        assert [step.state for step in steps] == ["restarting", "failed"]
        assert steps[-1].problem == "a ended with exit code 3"
        assert played.done == ["stop a", "start a"]
        played.processes.problem = ""
        await turns()
        await played.fleets.clock.advance(1)
        await played.orders.roll()
        assert (await told(played))[-1] == ("gateway", "restarted")


async def test_a_unit_that_serves_something_else_with_its_new_process_ends_it() -> None:
    """As after its checkpoint was overwritten: the others serve on as they are."""
    async with managed(2) as played:
        played.fleets.world.engines["a"].cards = (card(vocab_size=5),)
        played.processes.starts.set()
        await played.orders.roll()
        steps = [step async for step in played.orders.steps()]
        assert [step.state for step in steps] == ["restarting", "failed"]
        assert "m differs in vocab_size between b and a" in steps[-1].problem
        assert played.done == ["stop a", "start a"]
        assert played.states() == {"a": "down", "b": "up"}


async def test_a_gateway_that_finds_no_successor_serves_on() -> None:
    async with managed(1) as played:
        played.processes.problems["gateway/2"] = "ended with exit code 3"
        played.processes.starts.set()
        await played.orders.roll()
        assert (await told(played))[2:] == [("gateway", "restarting"), ("gateway", "failed")]
        said = played.steps[-1].problem
        assert said == "the new gateway ended with exit code 3 as it started; the present one serves on"
        assert f"retire {GATEWAY}" not in played.done
        assert played.controller.status.processes[GATEWAY].phase == "ready"


async def test_it_waits_for_a_restart_that_somebody_else_has_asked_for() -> None:
    """No more units are out of service at once than its budget says."""
    async with managed(3) as played:
        asking = await begin(played.orders.restart("c"))
        await played.orders.roll()
        await turns()
        assert played.done == ["stop c", "start c"]
        played.processes.starts.set()
        await asking
        assert await told(played) == restarted("a", "b", "c", "gateway")


async def test_units_that_come_and_go_are_left_alone() -> None:
    """One that has no process needs no new one, nor does one that is about to lose it."""
    async with managed(3) as played:
        played.processes.starts.set()
        await played.orders.stop("b")
        played.processes.ends.clear()
        stopping = await begin(played.orders.stop("a"))
        await played.orders.roll()
        await turns()
        played.processes.ends.set()
        assert await told(played) == restarted("c", "gateway")
        await stopping
        assert played.states() == {"a": "away", "b": "away", "c": "up"}


async def test_it_goes_on_under_another_controller() -> None:
    async with managed(2) as played:
        await played.orders.roll()
        await turns()
        spec = played.controller.spec
        assert (spec.rolling and spec.rolling.left, spec.rolling and spec.rolling.active) == (
            ("b", "gateway"),
            ("a",),
        )
        played.processes.starts.set()
        await told(played)


async def test_a_gateway_says_again_what_a_controller_that_was_away_has_not_heard() -> None:
    async with managed(1) as played:
        process = played.controller.status.processes["a"]
        assert process.seen
        played.controller.status.processes["a"] = replace(process, seen=False)
        played.orders.mirror.heed(played.controller.snapshot)
        assert played.controller.status.processes["a"].seen

"""Adapters that come and go at the units of a fleet, none of which starts anew for it."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvloom.cluster.models import Apply, Wanted
from kvloom.cluster.state import FleetSpec
from kvloom.types.errors import BadRequest, Conflict, Unavailable, UnknownModel
from kvloom.types.spec import AdapterSpec, EngineSpec
from tests.router.fleets import ask_well, body, turns
from tests.router.managed import Managed, managed, spec

X = AdapterSpec("x", "/x")


def adapters(played: Managed) -> dict[str, list[str]]:
    """What each unit is to serve beside its model."""
    units = played.controller.spec.units
    return {name: [one.name for one in unit.engine.models[0].adapters] for name, unit in units.items()}


def at_units(played: Managed) -> dict[str, list[str]]:
    """What the engines have."""
    return {one.name: [card.name for card in one.cards if card.parent] for one in played.fleets.engines}


async def listed(played: Managed) -> list[str]:
    return sorted(card.name for card in await played.router.models())


def adapted(name: str, *own: AdapterSpec) -> EngineSpec:
    engine = spec(name)
    return replace(engine, models=(replace(engine.models[0], adapters=own),))


async def test_all_units_of_the_base_serve_it_and_none_starts_anew() -> None:
    async with managed(2) as played:
        await played.orders.adapters.load("x", "/x")
        assert adapters(played) == at_units(played) == {"a": ["x"], "b": ["x"]}
        assert await listed(played) == ["m", "x"]
        for _ in range(2):
            await ask_well(played.router, replace(body(), model="x"))
        await played.orders.adapters.unload("x")
        assert adapters(played) == at_units(played) == {"a": [], "b": []}
        assert await listed(played) == ["m"]
        with pytest.raises(UnknownModel, match="The lora adapter 'x' cannot be found"):
            await played.orders.adapters.unload("x")
        assert played.done == []


async def test_if_one_unit_refuses_nobody_has_it() -> None:
    async with managed(2) as played:
        played.fleets.engines[1].refuses = "its weights are NaN"
        with pytest.raises(BadRequest, match="b: its weights are NaN"):
            await played.orders.adapters.load("x", "/x")
        assert adapters(played) == at_units(played) == {"a": [], "b": []}
        assert await listed(played) == ["m"]


async def test_names_and_bases_that_are_wrong() -> None:
    async with managed(1) as played:
        orders = played.orders.adapters
        await orders.load("x", "/x", "m")
        with pytest.raises(BadRequest, match="m is the name of a model; another one is right"):
            await orders.load("m", "/x")
        with pytest.raises(BadRequest, match="The lora adapter 'x' has already been loaded"):
            await orders.load("x", "/other")
        with pytest.raises(BadRequest, match="base_model_name: no model 'z'; served: m"):
            await orders.load("y", "/y", "z")
        with pytest.raises(UnknownModel):
            await orders.unload("m")
        assert adapters(played) == {"a": ["x"]}


async def test_a_unit_that_is_down_has_it_when_it_is_back() -> None:
    async with managed(2) as played:
        played.processes.die("b")
        await turns()
        await played.orders.adapters.load("x", "/x")
        assert (adapters(played), at_units(played)["b"]) == ({"a": ["x"], "b": ["x"]}, [])
        played.processes.starts.set()
        await played.fleets.clock.advance(1.0)
        await turns()
        assert at_units(played) == {"a": ["x"], "b": ["x"]}
        assert played.states() == {"a": "up", "b": "up"}


async def test_without_a_unit_that_proves_it_nothing_is_added() -> None:
    async with managed(1) as played:
        played.processes.die("a")
        await turns()
        with pytest.raises(Unavailable, match="no unit of a is there to prove an adapter"):
            await played.orders.adapters.load("x", "/x")
        assert adapters(played) == {"a": []}


async def test_a_process_that_was_started_before_gets_it_afterwards() -> None:
    async with managed(2) as played:
        restarting = asyncio.create_task(played.orders.restart("b"))
        await turns()
        assert played.done == ["stop b", "start b"]
        await played.orders.adapters.load("x", "/x")
        assert at_units(played) == {"a": ["x"], "b": []}
        played.processes.starts.set()
        await restarting
        await turns()
        assert at_units(played) == {"a": ["x"], "b": ["x"]}
        assert "x" in played.router.units["b"].replicas


async def test_another_gateway_serves_it_too() -> None:
    async with managed(1) as played, played.another_gateway() as (router, _):
        await played.orders.adapters.load("x", "/x")
        await turns()
        assert sorted(card.name for card in await router.models()) == ["m", "x"]
        await played.orders.adapters.unload("x")
        await turns()
        assert [card.name for card in await router.models()] == ["m"]


async def test_a_restarted_unit_has_it() -> None:
    async with managed(1) as played:
        await played.orders.adapters.load("x", "/x")
        played.processes.starts.set()
        await played.orders.restart("a")
        assert at_units(played) == {"a": ["x"]}
        assert await listed(played) == ["m", "x"]


async def test_a_config_with_other_adapters_drains_no_unit() -> None:
    async with managed(2) as played:
        wanted = Wanted(engines=(adapted("a", X), adapted("b", X)), first=("a", "b"))
        applied = await played.orders.apply(Apply(wanted=wanted, really=True))
        assert (applied.changes, applied.problems) == (("a loads x", "b loads x"), ())
        assert adapters(played) == at_units(played) == {"a": ["x"], "b": ["x"]}
        other = AdapterSpec("y", "/y")
        wanted = Wanted(engines=(adapted("a", other), adapted("b", other)), first=("a", "b"))
        applied = await played.orders.apply(Apply(wanted=wanted, really=True))
        assert applied.changes == ("a unloads x, loads y", "b unloads x, loads y")
        assert adapters(played) == at_units(played) == {"a": ["y"], "b": ["y"]}
        assert await listed(played) == ["m", "y"]
        assert played.done == []
        played.fleets.engines[0].refuses = "no"
        wanted = Wanted(engines=(adapted("a", X), adapted("b", X)), first=("a", "b"))
        applied = await played.orders.apply(Apply(wanted=wanted, really=True))
        assert applied.problems == ("a: no",)
        assert adapters(played) == at_units(played) == {"a": ["y"], "b": ["y"]}


async def test_units_that_serve_no_adapters() -> None:
    async with managed(1) as played:
        units = played.controller.spec.units
        ranks = replace(units["a"].engine, tensor_parallel=2)
        mirror = played.orders.mirror
        mirror.spec = FleetSpec(units={"a": replace(units["a"], engine=ranks)})
        with pytest.raises(BadRequest, match="a serves no adapters; units of one rank on `cpu`"):
            await played.orders.adapters.load("x", "/x")


async def test_one_name_at_two_gateways() -> None:
    async with managed(1) as played, played.another_gateway() as (_, other):
        await played.orders.adapters.load("x", "/x")
        with pytest.raises((BadRequest, Conflict)):
            await other.adapters.load("x", "/other")
        assert adapters(played) == at_units(played) == {"a": ["x"]}

"""Models that come and go while a fleet serves, and another config for it: nobody's request is lost."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvloom.cluster.models import AddModel, Apply, Wanted, differences, units_to_serve
from kvloom.cluster.state import FleetSpec, UnitSpec
from kvloom.types.errors import BadRequest, Conflict, Unavailable, UnknownModel
from kvloom.types.service import GroupSpec, Scale, Steps
from kvloom.types.spec import ModelSpec, ProgramSpec
from tests.cluster.histories import engine
from tests.router.fleets import ask, ask_well, begin, body, turns
from tests.router.managed import managed, spec

OTHER = ModelSpec(name="other", path="/other")


async def test_a_model_is_added_and_removed() -> None:
    async with managed(2) as played:
        played.processes.starts.set()
        made = await played.orders.add_model(AddModel(model=OTHER, unit="b"))
        assert (made.path, made.units) == ("/other", {"b": "up"})
        assert played.done == ["stop b", "start b"]
        await ask_well(played.router, body(model="other"))
        await ask_well(played.router, body())
        assert [one.name for one in played.orders.models] == ["m", "other"]
        gone = await played.orders.remove_model("other")
        assert gone.units == {"b": "up"}
        with pytest.raises(UnknownModel):
            await ask(played.router, body(model="other"))
        await ask_well(played.router, body())


async def test_requests_of_a_model_that_is_removed_end_first_and_no_new_ones_come() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        await played.orders.add_model(AddModel(model=OTHER))
        played.done.clear()
        [unit] = played.fleets.engines
        unit.gate.clear()
        running = await begin(ask_well(played.router, body(model="other")))
        removing = await begin(played.orders.remove_model("other"))
        with pytest.raises(UnknownModel):
            await ask(played.router, body(model="other"))
        waiting = await begin(ask_well(played.router, body()))
        assert (played.done, removing.done(), waiting.done()) == ([], False, False)
        unit.gate.set()
        await asyncio.gather(running, removing, waiting)
        assert played.done == ["stop a", "start a"]


async def test_a_unit_that_would_serve_nothing_goes_with_its_model() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        await played.orders.add(replace(spec("z"), models=(OTHER,)))
        await played.orders.remove_model("other")
        assert played.states() == {"a": "up"}
        assert played.done == ["start z", "stop z", "forget z"]


async def test_a_model_that_drafts_for_another_is_not_removed_before_that() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        fast = ModelSpec(name="fast", path="/fast", speculation="other")
        await played.orders.add(replace(spec("z"), models=(OTHER, fast)))
        with pytest.raises(Conflict, match=r"^other drafts for fast on z; to remove fast first is right$"):
            await played.orders.remove_model("other")
        await played.orders.remove_model("fast")
        await played.orders.remove_model("other")
        assert played.states() == {"a": "up"}


async def test_a_model_whose_files_are_refused_touches_no_unit() -> None:
    async with managed(2) as played:
        played.fleets.world.engines["a"].refuses = "models.other: its config.json is no object"
        with pytest.raises(BadRequest, match=r"^a: models\.other: its config\.json is no object$"):
            await played.orders.add_model(AddModel(model=OTHER, unit="a"))
        assert played.done == []
        assert [one.name for one in played.orders.models] == ["m"]


async def test_a_model_that_cannot_be_loaded_leaves_its_unit_as_it_was() -> None:
    async with managed(1) as played:
        played.processes.problem = "models.other: /other: no such checkpoint"
        played.processes.starts.set()
        with pytest.raises(
            Unavailable, match=r"a models\.other: /other: no such checkpoint as it started; it serves what"
        ):
            await played.orders.add_model(AddModel(model=OTHER))
        played.processes.problem = ""
        await turns()
        await played.fleets.clock.advance(1)
        await ask_well(played.router, body())
        assert played.states() == {"a": "up"}
        assert [one.name for one in played.orders.models] == ["m"]


async def test_models_that_are_added_to_a_unit_at_once_are_all_served() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        third = ModelSpec(name="third", path="/third")
        adding = [played.orders.add_model(AddModel(model=model)) for model in (OTHER, third)]
        await asyncio.gather(*adding)
        assert [one.name for one in played.orders.models] == ["m", "other", "third"]


async def test_a_model_that_is_added_while_another_is_removed_stays() -> None:
    async with managed(2) as played:
        played.processes.starts.set()
        for unit in "ab":
            await played.orders.add_model(AddModel(model=replace(OTHER, name=f"other-{unit}"), unit=unit))
        third = ModelSpec(name="third", path="/third")
        await asyncio.gather(
            played.orders.remove_model("m"), played.orders.add_model(AddModel(model=third, unit="b"))
        )
        assert [one.name for one in played.orders.models] == ["other-a", "other-b", "third"]


async def test_a_unit_whose_models_are_all_removed_at_once_goes_with_them() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        third = ModelSpec(name="third", path="/third")
        await played.orders.add(replace(spec("z"), models=(OTHER, third)))
        await asyncio.gather(*map(played.orders.remove_model, ("other", "third")))
        assert [one.name for one in played.orders.models] == ["m"]
        assert played.states() == {"a": "up"}


async def test_a_model_that_is_added_to_units_that_are_away_is_known_and_requests_find_it() -> None:
    async with managed(2, scale=Scale(least=0, most=2, idle=30)) as played:
        played.processes.starts.set()
        await played.orders.scale(Steps(stop=("a", "b")))
        await turns()
        assert played.states() == {"a": "away", "b": "away"}
        made = await played.orders.add_model(AddModel(model=OTHER))
        assert made.units == {"a": "up", "b": "away"}
        await ask_well(played.router, body(model="other"))


async def test_a_removal_ends_if_the_unit_is_started_meanwhile() -> None:
    async with managed(1) as played:
        played.processes.starts.set()
        await played.orders.add(replace(spec("z"), models=(OTHER,)))
        played.fleets.engines[-1].gate.clear()
        running = await begin(ask_well(played.router, body(model="other")))
        removing = await begin(played.orders.remove_model("other"))
        await played.orders.start("z")
        with pytest.raises(Conflict, match="z was started again"):
            await removing
        played.fleets.engines[-1].gate.set()
        await running


async def test_what_cannot_be_added_or_removed() -> None:
    async with managed(2) as played:
        orders = played.orders
        for asked in (
            AddModel(model=ModelSpec(name="m", path="/m")),
            AddModel(model=ModelSpec(name="m", path="/n")),
        ):
            with pytest.raises(Conflict, match="there is a model m already, /m on a; another name is right"):
                await orders.add_model(asked)
        with pytest.raises(BadRequest, match="there is no unit z; the units: a, b"):
            await orders.add_model(AddModel(model=OTHER, unit="z"))
        with pytest.raises(UnknownModel, match=r"The model `other` does not exist .*; served: m"):
            await orders.remove_model("other")
        assert played.done == []


def test_replicas_get_a_model_together_and_it_goes_where_there_is_most_room() -> None:
    def unit(name: str, kv_bytes: int, *models: str) -> UnitSpec:
        return UnitSpec(engine=replace(engine(name, *models), kv_bytes=kv_bytes))

    units = {"a": unit("a", 30, "m"), "b": unit("b", 50, "m", "n", "o"), "c": unit("c", 30, "m")}
    fleet = FleetSpec(units=units, groups={"g": GroupSpec(("a", "c"), Scale(1, 2))})
    assert units_to_serve(fleet, AddModel(model=OTHER)) == ("a", "c")
    assert units_to_serve(fleet, AddModel(model=OTHER, unit="b")) == ("b",)


async def test_a_config_is_told_first_and_then_applied() -> None:
    async with managed(2) as played:
        played.processes.starts.set()
        wanted = Wanted(
            engines=(replace(spec("a"), models=(*spec("a").models, OTHER)), spec("z")), first=("a", "z")
        )
        said = await played.orders.apply(Apply(wanted=wanted))
        assert said.changes == (
            "a starts anew: models m → m, other",
            "z is added, with m",
            "b is removed, with m",
        )
        assert played.done == []
        done = await played.orders.apply(Apply(wanted=wanted, really=True))
        assert (done.changes, done.problems, done.overrode) == (said.changes, (), ())
        assert played.done == ["start z", "stop a", "start a", "stop b", "forget b"]
        assert played.states() == {"a": "up", "z": "up"}
        await ask_well(played.router, body(model="other"))
        assert (await played.orders.apply(Apply(wanted=wanted, really=True))).changes == ()


async def test_a_unit_that_cannot_be_started_is_told_of_and_mended_by_the_next_config() -> None:
    async with managed(1) as played:
        played.processes.problems["z"] = "device cuda:9: there is no such device"
        played.processes.starts.set()
        wrong = Wanted(engines=(spec("a"), replace(spec("z"), device="cuda:9")), first=("a", "z"))
        done = await played.orders.apply(Apply(wanted=wrong, really=True))
        assert done.problems == ("z device cuda:9: there is no such device as it started",)
        assert (played.state("z").state, played.states()["a"]) == ("away", "up")
        assert "no such device" in played.state("z").problem
        await ask_well(played.router, body())
        del played.processes.problems["z"]
        right = Wanted(engines=(spec("a"), spec("z")), first=("a", "z"))
        mended = await played.orders.apply(Apply(wanted=right, really=True))
        assert mended.changes == ("z starts anew: device cuda:9 → cpu",)
        assert played.states() == {"a": "up", "z": "up"}


def test_nothing_is_different_where_units_have_merely_come_or_gone() -> None:
    fleet = FleetSpec(units={"a": UnitSpec(engine=engine("a"), wanted=False)})
    same = Wanted(engines=(engine("a"),), first=("a",))
    assert differences(fleet, same, 5.0).lines == ()
    other = differences(fleet, replace(same, program=ProgramSpec("balanced")), 5.0)
    assert other.lines == ("program: the config's → balanced",)


def test_a_difference_has_what_was_and_what_will_be_as_people_write_it() -> None:
    engines = [replace(engine(name), kv_bytes=64 << 20, max_running=4) for name in "ab"]
    fleet = FleetSpec(
        units={one.unit: UnitSpec(engine=one) for one in engines},
        program=ProgramSpec("disaggregate", {"prefill": 1}),
        groups={"units.0": GroupSpec(("a",), Scale(1, 2))},
    )
    wanted = Wanted(
        engines=(
            replace(engines[0], kv_bytes=4 << 20, max_running=8),
            replace(engines[1], kv_bytes=(64 << 20) + 1),
        ),
        first=("a", "b"),
        groups={"units.0": GroupSpec(("a", "b"), Scale(1, 2, low=80))},
        program=ProgramSpec("data_parallel"),
    )
    assert differences(fleet, wanted, 5.0).lines == (
        "a starts anew: kv_bytes 64 MiB → 4 MiB, max_running 4 → 8",
        "b starts anew: kv_bytes 67108864 → 67108865",
        "units that come and go: a (1 to 2) → a, b (1 to 2, low 80)",
        "program: disaggregate (prefill 1) → data_parallel",
    )
    gone = differences(fleet, Wanted(engines=tuple(engines), first=("a", "b")), 5.0)
    assert gone.lines == ("units that come and go: a (1 to 2) → none",)

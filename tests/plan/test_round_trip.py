"""A plan means the same to `kvloom serve` and to `kvloom simulate`, for cores and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.config.config import DEMO, Config
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.lab.sim.unit import SimulatedUnit, planned_units
from kvloom.plan.cluster import CPU, Demand, DeviceCosts, Nodes
from kvloom.plan.plan import PlacementPlan, read_plan, write_plan
from kvloom.plan.planner import make_plan
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec, Slo
from tests.plan.clusters import demand, nodes
from tests.plan.cost.profiles import make_profile

PROFILE = make_profile()
SERVER = Machine(cores=16, memory=64 << 30, gpus=8, name="big")


def checkpoint(wanted: Demand) -> Demand:
    """The demand for a model whose checkpoint is there, whatever its shape is planned to be; one of them has
    an objective."""
    asked, slo = (wanted.prompt, wanted.output), Slo(5.0, 0.08) if wanted.name == "a" else None
    return Demand(wanted.name, wanted.shape, wanted.rate, *asked, str(DEMO / "guide"), slo)


def on_gpus() -> PlacementPlan:
    """A unit of one GPU, and one of two, without which the largest model has no place."""
    cluster = [nodes("A100-80", 3)]
    wanted = [("a", "llama-7b", 6.0), ("b", "llama-13b", 1.0), ("c", "llama-65b", 0.1)]
    demands = [checkpoint(demand(*one)) for one in wanted]
    return make_plan(cluster, demands, DeviceCosts(cluster, demands, None))


def on_cores() -> PlacementPlan:
    cluster = [Nodes(CPU, 1 << 30, 4, 1)]
    demands = [
        Demand(name, PROFILE.shapes[name], rate, 50, 20, str(DEMO / "guide"))
        for name, rate in (("one", 40.0), ("two", 0.0))
    ]
    return make_plan(cluster, demands, DeviceCosts(cluster, demands, PROFILE))


def served(file: Path, machine: Machine = SERVER) -> Config:
    return load_config(file, {}, {}, machine)


def simulated_units(file: Path) -> list[SimulatedUnit]:
    return planned_units(read_plan(file), profile=PROFILE)


def told(spec: EngineSpec) -> tuple[object, ...]:
    """What a plan says of a unit."""
    models = [
        (one.name, one.path, one.rate, one.prefill_share, one.decode_share, one.quota, one.slo)
        for one in spec.models
    ]
    cores = (spec.threads, spec.chunk_tokens, spec.overload) if spec.device == CPU else ()
    return (spec.unit, models, spec.device, spec.tensor_parallel, spec.kv_bytes, spec.block_bytes, cores)


@pytest.mark.parametrize(("make", "ranks"), [(on_gpus, {1, 2}), (on_cores, {1})])
def test_it_is_the_same_fleet(tmp_path: Path, make: Callable[[], PlacementPlan], ranks: set[int]) -> None:
    file, plan = tmp_path / "plan.json", make()
    write_plan(file, plan)
    assert {unit.tensor_parallel for unit in plan.units} == ranks
    engines = served(file).engines
    units = [unit.spec for unit in simulated_units(file)]
    assert [told(spec) for spec in engines] == [told(spec) for spec in units]
    assert [spec.abilities for spec in engines] == [spec.abilities for spec in units]
    for planned, spec in zip(plan.units, engines, strict=True):
        assert planned.abilities == spec.abilities
        assert (planned.name, planned.tensor_parallel) == (spec.unit, spec.tensor_parallel)
        assert [one.quota for one in planned.models] == [one.quota for one in spec.models]
        assert [one.slo or Slo() for one in planned.models] == [one.slo for one in spec.models]


def on(plan: PlacementPlan, *nodes: str) -> PlacementPlan:
    """The plan with its units on these nodes in turn."""
    units = (replace(unit, node=nodes[n % len(nodes)]) for n, unit in enumerate(plan.units))
    return replace(plan, units=tuple(units))


def test_a_plan_for_this_machine_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, on(on_gpus(), "big"))
    assert {engine.device for engine in served(file).engines} == {unit.place for unit in on_gpus().units}


@pytest.mark.parametrize(
    ("plan", "machine", "said"),
    [
        (
            on(on_gpus(), "big", "other"),
            SERVER,
            "units.1.node: 'other', and this machine is 'big'; without --cluster units are served on this",
        ),
        (on(on_cores(), "other"), SERVER, "units.0.node: 'other', and this machine is 'big'"),
        (on_gpus(), Machine(cores=16, memory=64 << 30), "units.0.device: there is no cuda:"),
        (on_gpus(), Machine(cores=16, memory=64 << 30, gpus=1), "but 1 GPU; a machine that has it"),
        (on_cores(), Machine(cores=2, memory=64 << 30), "units.0.threads: 4 of 2 cores"),
    ],
)
def test_what_is_missing_here_is_told_in_one_line(
    tmp_path: Path, plan: PlacementPlan, machine: Machine, said: str
) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, plan)
    with pytest.raises(ConfigError) as error:
        served(file, machine)
    assert error.value.message.startswith(f"{file}: ")
    assert said in error.value.message
    assert "\n" not in error.value.message


def test_cores_of_several_nodes_are_simulated_by_one_profile(tmp_path: Path) -> None:
    file, plan = tmp_path / "plan.json", on_cores()
    both = (*plan.units, *(replace(unit, name=f"{unit.name}b", node="b") for unit in plan.units))
    write_plan(file, replace(plan, units=both))
    assert len(simulated_units(file)) == len(both)
    with pytest.raises(ConfigError, match="measured on 4 cores, and the plan has units of 8"):
        planned_units(replace(plan, units=plan.units * 2), profile=PROFILE)

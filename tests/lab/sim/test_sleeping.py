"""Fleets whose weights sleep, in virtual time: on measured cores, and on GPUs, in simulation only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.lab.sim.executor import ModelledWeights
from kvloom.lab.sim.unit import planned_units
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.results import Results, Slept, read_results
from kvloom.plan.cost.profile import write_profile
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import PlacementPlan, write_plan
from kvloom.types.errors import ConfigError
from tests.lab.sim.plans import make_plan
from tests.plan.cost.profiles import make_profile

BIG = find_shape("llama3-8b")  # 16.1 GB
WORKLOAD = """\
name: turns
seed: 3
requests: 12
rate: 0.5
models: [a, b]
lengths: {prompt: [4, 60], output: [2, 40]}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traffic.yaml").write_text(WORKLOAD)


def budgeted(memory: int, device: str = "H100") -> PlacementPlan:
    """Two models of 16.1 GB on one unit, in one budget with the pool."""
    plan = make_plan(1, device=device)
    models = tuple(replace(model, shape=BIG, path="/made/up") for model in plan.units[0].models)
    return replace(plan, units=(replace(plan.units[0], memory=memory, models=models),))


def run_fleet(plan: PlacementPlan) -> Results:
    write_plan(Path("plan.json"), plan)
    assert main(["simulate", "plan.json", "--workload", "traffic.yaml", "--json", "out.json"]) == 0
    return read_results(Path("out.json"))


def slept(results: Results) -> Slept:
    assert results.fleet_events is not None
    assert results.fleet_events.slept is not None
    return results.fleet_events.slept


def test_models_take_turns_in_a_budget_that_holds_one(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_fleet(budgeted(24 * 10**9))
    assert (results.total.requests, results.total.errors) == (12, 0)
    told = slept(results)
    assert told.wakes >= told.sleeps >= 2
    assert told.wait is not None
    # Weights come at 44 GB/s, and a model may run once a quarter of them is there.
    assert told.wait.mean >= BIG.weight_bytes / 44e9 / 4
    shown = " ".join(capsys.readouterr().out.split())
    assert "in simulation only: the weights of unit-0 sleep (memory)" in shown
    assert f"weights woke {told.wakes} times and fell asleep {told.sleeps} times; {told.waited} req" in shown


def test_models_that_fit_wake_once_and_stay() -> None:
    told = slept(run_fleet(budgeted(60 * 10**9)))
    assert (told.wakes, told.sleeps) == (2, 0)


def test_weights_that_stay_are_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_fleet(make_plan(1))
    assert results.fleet_events is not None
    assert results.fleet_events.slept is None
    assert "woke" not in capsys.readouterr().out


def test_a_budget_holds_the_largest_model_and_a_page() -> None:
    with pytest.raises(
        ConfigError, match=r"unit-0: memory 16,500,000,000 does not hold a and a page of its K"
    ):
        planned_units(budgeted(16_500_000_000))
    [unit] = planned_units(budgeted(20 * 10**9))
    assert unit.spec.kv_bytes == 19 * 10**9


def test_serving_refuses_gpus_whose_weights_sleep_and_takes_cores() -> None:
    machine = Machine(cores=16, memory=64 << 30, gpus=8, name="big")
    write_plan(Path("plan.json"), budgeted(24 * 10**9))
    with pytest.raises(
        ConfigError, match=r"unit-0: memory is set, and weights sleep on units of one rank on cpu"
    ):
        load_config(Path("plan.json"), {}, {}, machine)
    cores = budgeted(40 * 10**9, "cpu")
    at = tuple(
        replace(model, path=str(DEMO / "guide"), shape=replace(BIG, layers=1))
        for model in cores.units[0].models
    )
    write_plan(Path("plan.json"), replace(cores, units=(replace(cores.units[0], models=at, node=""),)))
    (spec,) = load_config(Path("plan.json"), {}, {}, machine).engines
    assert (spec.kv_bytes, spec.sleep_dir) == (40 * 10**9, "/var/tmp")


def test_a_config_with_a_budget_is_simulated_as_its_machine_was_measured() -> None:
    profile = make_profile()
    least = max(shape.weight_bytes for shape in profile.shapes.values())
    Path("config.yaml").write_text(
        f"threads: 1\nmemory: {least * 2}\nblock_bytes: 4KiB\nmodels: {{one: made/up, two: made/up}}\n"
    )
    write_profile(profile, Path("profile.json"))
    Path("traffic.yaml").write_text(WORKLOAD.replace("[a, b]", "[one, two]"))
    words = ["--workload", "traffic.yaml", "--profile", "profile.json", "--json", "out.json"]
    assert main(["simulate", "config.yaml", *words]) == 0
    told = slept(read_results(Path("out.json")))
    assert told.wakes > 2


def test_who_comes_while_a_model_sleeps_waits_for_its_first_part() -> None:
    """400 bytes at 100 a second come in four parts, each within a second."""
    weights = ModelledWeights({"a": 400}, 100, 100.0)

    async def main() -> None:
        weights.asked("a")
        await asyncio.sleep(2.0)
        weights.asked("a")
        await weights.wake("a")
        weights.asked("a")
        await weights.wake("a")
        weights.sleep("a")

    run_virtual(main())
    assert (weights.wakes, weights.sleeps) == (1, 1)
    assert (weights.waits.count, weights.waits.least, weights.waits.most) == (2, 1.0, 3.0)

"""docs/memory.md: what `kvloom plan --memory` expects of weights that sleep, beside the simulator."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.lab.sim.unit import CONTEXT, modelled_executor, planned_units
from kvloom.lab.workload.results import Slept, read_results
from kvloom.plan.cost.profile import Profile, write_profile
from kvloom.plan.cost.shapes import ModelShape, read_context
from kvloom.plan.plan import read_plan
from tests.commands import kvloom
from tests.lab.sim.plans import make_plan
from tests.plan.cost.profiles import make_profile

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "memory.md").read_text("utf-8")
FILES = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```sh\n(kvloom .*?)^```\n\n```\n(.*?)^```", PAGE, re.M | re.S)
SHAPE = ModelShape(layers=12, hidden=1024, heads=8, kv_heads=2, head_dim=64, ffn=2048, vocab=2000, itemsize=4)
MODELS = [f"m{n}" for n in range(8)]
REQUESTS = 1200
TOLERANCE = 0.03
"""Of all requests: two standard deviations of a share of one half."""


def profile_of(*names: str) -> Profile:
    """A machine that runs each of the models as it runs `one`."""
    made = make_profile()
    jobs = [one for one in made.jobs if one.job.model == "one"]
    return replace(
        made,
        shapes=dict.fromkeys(names, SHAPE),
        jobs=tuple(replace(one, job=replace(one.job, model=name)) for name in names for one in jobs),
        colocated=(),
        steps=tuple(replace(step, model=name) for name in names for step in made.steps),
    )


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(profile_of(*MODELS), Path("profile.json"))


def planned_and_simulated(rate: float) -> tuple[float, float, Slept]:
    """Returns the share of requests that are cold by the plan, and in the simulator, of eight models in
    memory for three, asked by a power law."""
    weights = [(n + 1) ** -0.9 for n in range(len(MODELS))]
    demands = "".join(
        f"  {name}: {{rate: {rate * weight / sum(weights)}, prompt: 40, output: 20}}\n"
        for name, weight in zip(MODELS, weights, strict=True)
    )
    Path("fleet.yaml").write_text(f"nodes: [{{device: cpu, gpus: 1, memory: 16GiB}}]\nmodels:\n{demands}")
    Path("traffic.yaml").write_text(
        f"seed: 3\nrequests: {REQUESTS}\nrate: {rate}\nalpha: 0.9\nmodels: [{', '.join(MODELS)}]\n"
        "lengths: {prompt: [20, 60], output: [10, 30]}\n"
    )
    memory = int(3.3 * SHAPE.weight_bytes / 0.95)
    measured = ["--profile", "profile.json"]
    assert main(["plan", "fleet.yaml", "--memory", str(memory), "-o", "plan.json", *measured]) == 0
    traffic = ["--workload", "traffic.yaml", "--json", "out.json"]
    assert main(["simulate", "plan.json", *traffic, *measured]) == 0
    models = [model for unit in read_plan(Path("plan.json")).units for model in unit.models]
    cold = sum(model.rate * (1.0 - model.awake) for model in models) / sum(model.rate for model in models)
    events = read_results(Path("out.json")).fleet_events
    assert events is not None
    assert events.slept is not None
    return cold, events.slept.waited / REQUESTS, events.slept


def test_models_that_are_seldom_asked_are_cold_as_often_as_planned() -> None:
    """Each is asked less than once in the minute that an engine remembers, so who was asked last stays."""
    planned, seen, slept = planned_and_simulated(0.02)
    assert planned == pytest.approx(0.498, abs=0.001)
    assert seen == pytest.approx(planned, abs=TOLERANCE)
    assert slept.wait is not None
    load = SHAPE.weight_bytes / 16e9
    assert slept.wait.mean == pytest.approx(load / 4, rel=0.01)  # a quarter of the weights lets requests run


def test_models_that_are_asked_often_are_cold_less_often_than_planned() -> None:
    """The engine knows then who is asked most, and lets others sleep first."""
    planned, seen, _ = planned_and_simulated(2.0)
    assert 0.8 * planned < seen < planned - TOLERANCE


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES:
        Path(name).write_text(text)
    write_profile(profile_of("chat", "code", "sql", "law"), Path("profile.json"))
    assert len(COMMANDS) == 2
    for command, shown in COMMANDS:
        capsys.readouterr()
        assert main(shlex.split(command)[1:]) == 0
        printed = capsys.readouterr().out
        assert re.search(".*".join(re.escape(part) for part in shown.strip().split("…")), printed, re.S), (
            printed
        )
    (unit,) = load_config(Path("plan.json"), {}, {}, Machine(cores=1, memory=2 << 30)).engines
    assert (unit.kv_bytes, unit.sleep_dir, len(unit.models)) == (1 << 30, "/var/tmp", 4)


CORES = "nodes: [{device: cpu, gpus: 1, memory: 4GiB}]\n"
DEMAND = "models: {m0: {rate: 1, prompt: 9, output: 9}}\n"


@pytest.mark.parametrize(
    ("nodes", "memory", "said"),
    [
        (
            "nodes: [{device: a10, gpus: 1}]\n",
            "8GiB",
            "--memory: weights sleep on units of one rank on cpu, not on A10",
        ),
        (CORES, "8GiB", "--memory: 8 GiB of a machine that has 4 GiB"),
        (CORES, "much", "--memory: 'much' is no size"),
        (CORES, "100MB", "model 'm0' needs 363.8 MiB for weights and one request"),
    ],
)
def test_what_is_refused(nodes: str, memory: str, said: str) -> None:
    Path("fleet.yaml").write_text(nodes + DEMAND)
    done = kvloom("plan", "fleet.yaml", "--profile", "profile.json", "--memory", memory, folder=Path.cwd())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_a_model_holds_as_many_tokens_as_its_checkpoint_says() -> None:
    (unit,) = make_plan(1).units
    paths = {"a": str(DEMO / "guide"), "b": "made/up"}
    models = tuple(replace(model, path=paths[model.name]) for model in unit.models)
    (made,) = planned_units(replace(make_plan(1), units=(replace(unit, models=models, kv_bytes=1 << 30),)))
    cards = modelled_executor(made).cards
    assert cards["a"].context_length == read_context(DEMO / "guide") == 1024
    assert cards["b"].context_length == CONTEXT

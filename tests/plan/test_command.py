"""`kvloom plan` as people type it: tables, files, and errors of one line."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from msgspec.structs import replace

from kvloom.cli.__main__ import main
from kvloom.cli.plan.app import EXAMPLE
from kvloom.cli.plan.cluster_file import read_cluster, read_demands
from kvloom.config.config import DEMO
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.traces import Header, write_workload
from kvloom.plan.cost.profile import write_profile
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import checkpoint_bytes, read_plan
from tests.commands import kvloom
from tests.plan.clusters import check_plan
from tests.plan.cost.profiles import make_profile

NODES = "nodes: [{device: a10, gpus: 4}]\n"
MODELS = "models: {a: {shape: llama-7b, rate: 1, prompt: 100, output: 50}}\n"
PAIR = """\
nodes: [{device: A100-80, gpus: 4}]
models:
  chat: {shape: llama-7b, rate: 8, prompt: 161, output: 338}
  code: {shape: llama-13b, rate: 0.5, prompt: 800, output: 250}
"""


def plan(folder: Path, text: str, *arguments: str) -> CompletedProcess[str]:
    (folder / "cluster.yaml").write_text(text)
    return kvloom("plan", "cluster.yaml", *arguments, folder=folder)


def run(folder: Path, text: str, workload: Path | None = None, profile: Path | None = None) -> int:
    file = folder / "cluster.yaml"
    file.write_text(text)
    given = {"--workload": workload, "--profile": profile, "--output": folder / "plan.json"}
    return main(["plan", str(file), *(str(word) for pair in given.items() if pair[1] for word in pair)])


def test_a_plan(tmp_path: Path) -> None:
    done = plan(tmp_path, PAIR, "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("unit-0", "any", "A100-80", "chat", "code", "8.5 of 8.5 requests/s are answered"):
        assert part in done.stdout
    found = read_plan(tmp_path / "plan.json")
    assert found.made_by == "kvloom plan"
    assert {unit.node for unit in found.units} == {""}


def test_a_drawing_of_a_plan(tmp_path: Path) -> None:
    """Each model has a bar on each unit that it is on, and its weights and its part of the pool are parts of
    the unit's."""
    cluster = PAIR.replace("chat:", "'<b>&chat':")
    done = plan(tmp_path, cluster, "-o", "plan.json", "--html", "plan.html")
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "plan.html").read_text()
    found = read_plan(tmp_path / "plan.json")
    placed = sum(len(unit.models) for unit in found.units)
    assert text.count(" of weights</title>") == text.count(" of K and V</title>") == placed
    assert text.count("<title>answered</title>") == placed
    assert text.count("<section") == len(found.units)
    assert "&lt;b&gt;&amp;chat" in text
    assert "<b>" not in text
    assert "8.5 of 8.5 requests/s are answered" in text
    refused = plan(tmp_path, cluster, "--html", "no/plan.html")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no/plan.html: no such folder" in refused.stderr


def test_several_nodes_by_name(tmp_path: Path) -> None:
    """Each unit is on one of them, on GPUs of its own, and has a rank for each."""
    named = PAIR.replace("gpus: 4}", "gpus: 2, names: [left, right]}").replace("rate: 8", "rate: 30")
    done = plan(tmp_path, named, "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    found = read_plan(tmp_path / "plan.json")
    check_plan(found)
    assert {unit.node for unit in found.units} == {"left", "right"}
    assert all(unit.tensor_parallel == unit.gpus for unit in found.units)
    assert all(unit.index + unit.gpus <= 2 for unit in found.units)


@pytest.mark.parametrize("baseline", ["spatial", "memory"])
def test_a_baseline(tmp_path: Path, baseline: str) -> None:
    done = plan(tmp_path, PAIR, "--baseline", baseline, "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    found = read_plan(tmp_path / "plan.json")
    check_plan(found)
    assert found.made_by == f"kvloom plan --baseline {baseline}"
    assert [len(unit.models) for unit in found.units] == [1, 1]


def test_a_demand_that_is_too_much_is_explained(tmp_path: Path) -> None:
    done = plan(tmp_path, NODES + MODELS.replace("rate: 1", "rate: 90"))
    assert done.returncode == 0
    assert re.search(r"a on unit-\d: [\d.]+ of [\d.]+ requests/s, [\d.]+ missing: ", done.stdout)
    assert re.search(r"about \d+ more A10 would answer all", done.stdout)


@pytest.mark.parametrize(
    ("text", "arguments", "part"),
    [
        (
            "nodes: [{device: B200, gpus: 8}]\n" + MODELS,
            (),
            "nodes.0.device: device 'B200' is not known; A100-40",
        ),
        ("nodes: [{device: a10, gpus: 0}]\n" + MODELS, (), "nodes.0.gpus: 0; 1 or more"),
        ("nodes: [{device: a10, gpus: 1.5}]\n" + MODELS, (), "nodes.0.gpus: 1.5; a whole number"),
        ("nodes: [{device: a10, gpus: 4, cout: 2}]\n" + MODELS, (), "did you mean `count`?"),
        ("nodes: [{device: a10, gpus: 4, count: 2000}]\n" + MODELS, (), "8000 devices; 4096 at most"),
        ("nodes: [{device: a10, gpus: 4, names: [a b]}]\n" + MODELS, (), "nodes.0.names.0: "),
        ("nodes: [{device: a10, gpus: 4, names: []}]\n" + MODELS, (), "nodes.0.names: []; at least one"),
        ("nodes: [{device: a10, gpus: 4, names: [a, a]}]\n" + MODELS, (), "nodes: 'a' names two machines"),
        (
            "nodes: [{device: a10, gpus: 4, count: 3, names: [a, b]}]\n" + MODELS,
            (),
            "count: 3 machines, but 2 names; a name for each, or no `count`, is right",
        ),
        ("nodes: []\n" + MODELS, (), "nodes: []; at least one"),
        ("nodes: [5]\n" + MODELS, (), "nodes.0: 5; a mapping with `device` and `gpus`"),
        (NODES, (), "models: is missing"),
        (NODES + "models: {}\n", (), "models: {}; at least one"),
        (NODES + "models: {a: 5}\n", (), "models.a: 5; a mapping with `shape` or `path`"),
        (NODES + MODELS.replace("rate: 1", "rate: -1"), (), "models.a.rate: -1; 0 or more"),
        (
            NODES + MODELS.replace("rate: 1", "rate: 1, slo: {ttft: 0}"),
            (),
            "models.a.slo.ttft: 0 s; 0.001 s to",
        ),
        (NODES + MODELS.replace("rate: 1", "rate: .inf"), (), "models.a.rate: inf"),
        (NODES + MODELS.replace("rate: 1,", ""), (), "models.a.rate: is missing; a number, or traffic"),
        (
            NODES + MODELS.replace("llama-7b", "llama-9b"),
            (),
            "'llama-9b'; did you mean `llama-7b`?",
        ),
        (NODES + MODELS.replace("shape: llama-7b", "path: x/y"), (), "models.a.shape: is missing"),
        (NODES + MODELS.replace("shape: llama-7b", "path: ./x"), (), "models.a.path: "),
        (NODES + MODELS.replace("llama-7b", "llama-65b"), (), "model 'a' needs 122.5 GiB"),
        ("nodes: [{device: a10\n", (), "line 2: "),
        (NODES + MODELS, ("-o", "nowhere/plan.json"), "--output: nowhere/plan.json"),
        (NODES + MODELS, ("--workload", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (NODES + MODELS, ("--profile", "cluster.yaml"), "cluster.yaml: no profile"),
        (NODES + MODELS, ("--baseline", "greedy"), '"spatial", "memory"'),
        ("nodes: [{device: cpu, gpus: 4}]\n" + MODELS, (), "nodes.0.memory: is missing"),
        ("nodes: [{device: cpu, gpus: 4, memory: 1GB}]\n" + MODELS, (), "--profile: is missing"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str, arguments: tuple[str, ...], part: str
) -> None:
    done = plan(tmp_path, text, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvloom: ")
    assert part in done.stderr


def test_rates_and_lengths_of_past_traffic(tmp_path: Path) -> None:
    asks = [WorkloadRequest(at=n / 4, model="chat", prompt=100 + n % 2, output=30) for n in range(401)]
    log = tmp_path / "log.jsonl"
    write_workload(log, Header(kvloom_workload=1, models=("chat",)), asks)
    assert run(tmp_path, PAIR.replace("rate: 8, ", ""), log) == 0
    models = {m.name: m for unit in read_plan(tmp_path / "plan.json").units for m in unit.models}
    assert models["chat"].rate == pytest.approx(4.01)
    assert models["chat"].prompt == pytest.approx(100.5, abs=0.01)
    assert models["chat"].output == 30
    assert (models["code"].rate, models["code"].prompt) == (0.0, 800)


def test_traffic_of_models_that_are_not_there(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    ask = WorkloadRequest(at=1.0, model="chta", prompt=1, output=1)
    write_workload(log, Header(kvloom_workload=1, models=("chta",)), [ask])
    done = plan(tmp_path, PAIR, "--workload", "log.jsonl")
    assert done.returncode == 2
    assert "models: the workload asks for 'chta'; did you mean `chat`?" in done.stderr
    write_workload(
        log,
        Header(kvloom_workload=1, models=("chat",)),
        [WorkloadRequest(at=0.0, model="chat", prompt=1, output=1)],
    )
    assert "all come at once" in plan(tmp_path, PAIR, "--workload", "log.jsonl").stderr


def test_a_trace_without_names_is_that_of_the_only_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.0000000,100,20", "2023-11-16 18:15:56.0000000,300,40"]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    assert run(tmp_path, NODES + "models: {a: {shape: llama-7b}}\n", trace) == 0
    (model,) = [m for unit in read_plan(tmp_path / "plan.json").units for m in unit.models]
    assert (model.name, model.prompt, model.output) == ("a", 200, 30)


def test_cores_that_were_measured_and_the_fleet_that_serves_the_plan(tmp_path: Path) -> None:
    profile = make_profile()
    write_profile(profile, tmp_path / "profile.json")
    models = "".join(
        f"  {name}: {{path: {DEMO / demo}, rate: 5, prompt: 50, output: 20}}\n"
        for name, demo in (("one", "guide"), ("two", "sums"))
    )
    text = "nodes: [{device: cpu, gpus: 4, memory: 2GiB}]\nmodels:\n" + models
    assert run(tmp_path, text, None, tmp_path / "profile.json") == 0
    found = read_plan(tmp_path / "plan.json")
    check_plan(found)
    assert found.units[0].models[0].shape == profile.shapes["one"]
    config = load_config(tmp_path / "plan.json", {}, {}, Machine(cores=4, memory=2 << 30))
    assert [engine.threads for engine in config.engines] == [unit.gpus for unit in found.units]
    done = plan(tmp_path, text.replace("gpus: 4", "gpus: 8"), "--profile", "profile.json")
    assert "was measured on 4 cores, nodes have 8" in done.stderr
    done = plan(tmp_path, text.replace("  two:", "  six:"), "--profile", "profile.json")
    assert "model 'six' was not measured; one, two were" in done.stderr


def test_k_and_v_may_have_a_format_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(NODES + MODELS.replace("rate: 1", "kv_dtype: int8, rate: 1"))
    (demand,) = read_demands(read_cluster(file), None, None)
    assert demand.shape == replace(find_shape("llama-7b"), kv_dtype="int8")


def test_a_checkpoints_own_shape(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        f"{NODES}models: {{a: {{path: {DEMO / 'guide'}, rate: 1, prompt: 9, output: 9}}}}\n"
    )
    (wanted,) = read_demands(read_cluster(tmp_path / "cluster.yaml"), None, None)
    assert wanted.path == str(DEMO / "guide")
    assert wanted.shape.layers > 0


def test_a_gguf_file_has_no_one_shape(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    text = f"{NODES}models: {{a: {{path: model.gguf, rate: 1, prompt: 9, output: 9}}}}\n"
    done = plan(tmp_path, text)
    assert "models.a.path: " in done.stderr
    assert "a GGUF file has several number formats, and a shape has one; the name of a shape" in done.stderr
    (tmp_path / "cluster.yaml").write_text(text.replace("model.gguf", "model.gguf, shape: llama-7b"))
    (wanted,) = read_demands(read_cluster(tmp_path / "cluster.yaml"), None, None)
    assert wanted.path == str(tmp_path / "model.gguf")
    assert checkpoint_bytes(str(tmp_path / "model.gguf")) == 1000


def test_the_helps_own_example_is_right(tmp_path: Path) -> None:
    text = EXAMPLE.split("CLUSTER.yaml:\n")[1].split("\n\n")[0]
    (tmp_path / "cluster.yaml").write_text(text)
    assert len(read_cluster(tmp_path / "cluster.yaml").nodes) == 2


def test_ctrl_c_ends_it_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a little of this process's own time, of which the plan takes much more."""
    models = "".join(
        f"  m{n}: {{shape: llama-7b, rate: {900 / (n + 1)}, prompt: {100 + n}, output: 300}}\n"
        for n in range(60)
    )
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        # again and again: one that falls into a callback of the garbage collector is swallowed
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.3, 0.3)
        assert run(tmp_path, "nodes: [{device: A100-80, gpus: 8, count: 64}]\nmodels:\n" + models) == 130
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "kvloom: interrupted; no plan is written\n")
    assert not (tmp_path / "plan.json").exists()

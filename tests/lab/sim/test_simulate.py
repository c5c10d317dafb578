"""`kvloom simulate` as people type it: on a plan, on a machine that was measured, and with what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.lab.workload.make import make_requests, read_spec
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.results import Results, read_results
from kvloom.lab.workload.traces import Header, write_workload
from tests.lab.sim.plans import write_files

BAD = [
    (("cut.json",), ["cut.json: no plan"]),
    (("later.json",), ["later.json: a plan of version 99"]),
    (
        ("nowhere.json",),
        ["nowhere.json: No such file", "the path of a plan or of a config is right"],
    ),
    (("abacus.json",), ["device 'abacus' is not known", "A10"]),
    (("plan.json", "--workload", "others.yaml"), ["asks for c, which no unit serves; a, b are served"]),
    (("plan.json", "--workload", "empty.yaml"), ["empty.yaml: asks for nothing"]),
    (("plan.json", "--workload", "bad.yaml"), ["bad.yaml: rate: -4; more than 0 is right"]),
    (
        ("plan.json", "--workload", "nowhere.jsonl"),
        ["nowhere.jsonl: No such file", "a workload or of a trace is right"],
    ),
    (
        ("plan.json", "--workload", "none.yaml"),
        ["none.yaml: No such file", "a workload or of a trace is right"],
    ),
    (("plan.json", "--workload", "several.yaml"), ["several.yaml: is a config; the path of a workload"]),
    (
        ("plan.json", "--workload", "plan.json"),
        ["plan.json: is a plan; the path of a workload"],
    ),
    (
        ("plan.json", "--workload", "cluster.yaml"),
        ["cluster.yaml: is a cluster's file; the path of"],
    ),
    (("small.yaml",), ["small.yaml: is a workload; the path of a plan or of a config is right"]),
    (("plan.json", "--rate-scale", "-1"), ["kvloom: --rate-scale -1: more than 0"]),
    (("plan.json", "--rate-scale", "nan"), ["--rate-scale", "nan"]),
    (("plan.json", "--slo-scale", "0"), ["kvloom: --slo-scale 0: more than 0"]),
    (("plan.json", "--program", "nobody"), ["'nobody' is not known; data_parallel"]),
    (("plan.json", "--policy", "nobody"), ["--policy", "adbs"]),
    (("plan.json", "--seed", "x"), ["--seed"]),
    (("plan.json", "--json", "no/x.json"), ["no/x.json: no such folder"]),
    (("plan.json", "--html", "no/x.html"), ["no/x.html: no such folder"]),
    (("plan.json", "--profile", "profile.json"), ["--profile: a plan's GPUs are known by their sheets"]),
    (("plan.json", "--client-here"), ["--client-here: the plan's machine was not measured"]),
    (("cores.json",), ["--profile: is missing; unit-0 is on device cpu"]),
    (("cores.json", "--profile", "plan.json"), ["plan.json: no profile"]),
    (("cores.json", "--profile", "profile.json", "--client-here"), ["--client-here: the plan's machine"]),
    (("many.json", "--profile", "profile.json"), ["measured on 4 cores, and node-0 has units of 6"]),
    (("unmeasured.json", "--profile", "profile.json"), ["unmeasured.json: the profile has no six"]),
    (("config.yaml",), ["config.yaml: --profile FILE is needed"]),
    (
        ("nowhere.yaml",),
        ["nowhere.yaml: No such file", "the path of a plan or of a config is right"],
    ),
    (("config.yaml", "--profile", "plan.json"), ["plan.json: no profile"]),
    (("config.yaml", "--profile", "nowhere"), ["nowhere: No such file"]),
    (
        ("config.yaml", "--profile", "profile.json"),
        ["asks for a, b, which no unit serves; one, two"],
    ),
    (("three.yaml", "--profile", "profile.json"), ["the profile has no three, but one, two"]),
    (("sharded.json", "--program", "disaggregate"), ["unit-0: 2 ranks on GPUs", "neither sent nor received"]),
    (
        ("several.yaml", "--profile", "with_overheads.json", "--client-here"),
        ["--client-here: the config has several nodes"],
    ),
    (("ranks.yaml", "--profile", "profile.json"), ["unit-0: tensor_parallel 2", "cannot be simulated; 1"]),
]
STOPS = """
import signal

async def stops(call, fleet):
    signal.raise_signal(signal.SIGINT)
    async for frame in call.start_generate(fleet.turn()):
        yield frame
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def simulated(*arguments: str, workload: str = "small.yaml") -> Results:
    assert main(["simulate", *arguments, "--workload", workload, "--json", "out.json"]) == 0
    return read_results(Path("out.json"))


def output_tokens(workload: str) -> int:
    return sum(ask.output for ask in make_requests(read_spec(Path(workload))))


def check_all(results: Results, workload: str = "small.yaml") -> None:
    assert (results.total.requests, results.total.errors, results.errors) == (40, 0, {})
    assert results.total.output_tokens == output_tokens(workload)


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    results = simulated("plan.json", "--html", "out.html", "--slo-scale", "1000", "--slo-scale", "0.5")
    check_all(results)
    assert (results.source, results.title) == ("simulation", "small on plan.json, simulated")
    assert sorted(results.models) == ["a", "b"]
    assert results.total.attained == {"≤ 1000×": 1.0, "≤ 0.5×": 0.0}
    shown = capsys.readouterr()
    assert shown.err == ""
    for words in (results.title, "≤ 1000×", "100.0%"):
        assert words in shown.out
    page = Path("out.html").read_text()
    assert "On the way: 0 preemptions; 0 requests moved, 0 could not." in page
    assert page.startswith("<!doctype html>")
    assert results.title in page


def test_units_of_a_plan_that_have_ranks_answer_and_move_nothing() -> None:
    check_all(simulated("sharded.json"))


def test_a_plan_for_cores_is_played_by_what_was_measured() -> None:
    bare = simulated("cores.json", "--profile", "profile.json", workload="measured.yaml")
    with_overheads = simulated("cores.json", "--profile", "with_overheads.json", workload="measured.yaml")
    beside = simulated(
        "cores.json", "--profile", "with_overheads.json", "--client-here", workload="measured.yaml"
    )
    means = []
    for results in (bare, with_overheads, beside):
        check_all(results, "measured.yaml")
        assert results.total.first is not None
        means.append(results.total.first.mean)
    assert means[0] + 0.002 < means[1]
    assert means[1] + 0.004 < means[2]


def test_what_a_config_says_of_moves_and_replicas_holds_here(capsys: pytest.CaptureFixture[str]) -> None:
    """A second unit comes as soon as the first is not idle, and gets some of what runs there."""
    config = ("elastic.yaml", "--profile", "profile.json")
    results = simulated(*config, workload="long.yaml")
    check_all(results, "long.yaml")
    told = results.fleet_events
    assert told is not None
    assert told.moved
    assert (told.least, told.most) == (1, 2)
    assert 1 < told.units < 2
    shown = f"{told.moved:,} requests moved, {told.stayed:,} could not; {told.units:.2f} units in the mean"
    assert shown in capsys.readouterr().out
    assert simulated(*config, workload="long.yaml") == results


def test_no_scheduler_runs_where_the_config_says_so_or_where_there_is_one_unit() -> None:
    for config, units in (("still.yaml", 2), ("config.yaml", 1)):
        results = simulated(config, "--profile", "profile.json", workload="long.yaml")
        check_all(results, "long.yaml")
        told = results.fleet_events
        assert told is not None
        assert (told.moved, told.stayed, told.units) == (None, None, units)


def test_a_machine_that_was_measured() -> None:
    """Each request costs 2 ms of a gateway, and 4 ms of a client where that is on the same machine."""
    ways = [("profile.json",), ("with_overheads.json",), ("with_overheads.json", "--client-here")]
    all_results = [simulated("config.yaml", "--profile", *way, workload="measured.yaml") for way in ways]
    means = []
    for results in all_results:
        check_all(results, "measured.yaml")
        assert results.total.first is not None
        means.append(results.total.first.mean)
    assert means[0] > 3e-3  # a prefill of the faster model on one core
    assert means[1] > means[0] + 0.002
    assert means[2] > means[1] + 0.004


def test_a_config_of_several_nodes_is_simulated_on_machines_like_the_one_that_was_measured() -> None:
    """What the one machine does besides jobs is in no node's way."""
    runs = [
        simulated("several.yaml", "--profile", profile, workload="measured.yaml")
        for profile in ("profile.json", "with_overheads.json")
    ]
    check_all(runs[0], "measured.yaml")
    assert runs[0].total == runs[1].total


def test_a_higher_rate_is_over_sooner_and_waits_longer() -> None:
    slow, fast = (simulated("plan.json", "--rate-scale", scale) for scale in ("1", "20"))
    check_all(fast)
    assert fast.seconds < slow.seconds
    assert fast.total.first is not None
    assert slow.total.first is not None
    assert fast.total.first.mean > slow.total.first.mean


@pytest.mark.parametrize(
    ("fleet", "workload"),
    [(["plan.json"], "small.yaml"), (["config.yaml", "--profile", "profile.json"], "measured.yaml")],
)
def test_each_policy_answers_all_and_is_another(fleet: list[str], workload: str) -> None:
    ends = set()
    for policy in ("adbs", "fcfs", "round-robin", "partitioned", "vllm-2023"):
        results = simulated(*fleet, "--policy", policy, "--rate-scale", "20", workload=workload)
        check_all(results, workload)
        assert results.total.end is not None
        ends.add(results.total.end.mean)
    assert len(ends) >= 3  # on few cores round-robin and partitioned are the same


def test_a_program_of_ones_own_lies_beside_the_fleet(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "own_program.py").write_text(STOPS.replace("signal.raise_signal(signal.SIGINT)", "pass"))
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    (Path("small.yaml")).write_bytes((folder / "small.yaml").read_bytes())
    check_all(simulated(str(folder / "plan.json"), "--program", "own_program:stops"))


def test_the_same_seed_gives_the_same_bytes(folder: Path) -> None:
    words = ["simulate", "plan.json", "--workload", "small.yaml", "--program", "cache_aware", "--seed", "5"]
    assert main([*words, "--json", "here.json"]) == 0
    assert main([*words, "--json", "again.json"]) == 0
    other = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "kvloom.cli", *words, "--json", "there.json"]
    subprocess.run(command, check=True, env=other, stdout=subprocess.DEVNULL, timeout=120)
    first = Path("here.json").read_bytes()
    assert first == Path("again.json").read_bytes() == Path("there.json").read_bytes()


def test_the_seed_draws_the_order_of_what_happens_at_one_moment() -> None:
    header = Header(kvloom_workload=1, models=("a", "b"))
    at_once = [
        WorkloadRequest(at=0.0, model="ab"[i % 2], prompt=10 + 150 * i, output=2 + i) for i in range(12)
    ]
    write_workload(Path("at_once.jsonl"), header, at_once)
    runs = [simulated("plan.json", "--seed", seed, workload="at_once.jsonl") for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].total.output_tokens == runs[2].total.output_tokens == sum(ask.output for ask in at_once)


@pytest.mark.parametrize(("arguments", "parts"), BAD)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    code = main(["simulate", "--workload", "small.yaml", *arguments])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.count("\n") == 1
    for part in ("kvloom: ", *parts):
        assert part in shown.err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_control_c(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "stopping.py").write_text(STOPS)
    words = ["simulate", "plan.json", "--workload", "small.yaml", "--program", "stopping:stops"]
    assert main([*words, "--json", "out.json"]) == 130
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "kvloom: interrupted; nothing was written\n")
    assert not Path("out.json").exists()

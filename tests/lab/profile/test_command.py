"""`kvloom profile` as people call it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import Profile, read_profile
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from tests.authorities import Authority
from tests.checkpoints import make_checkpoint

CONFIG = """\
kv_memory: 2MiB
block_bytes: 2KiB
chunk_tokens: 64
max_running: 32
threads: 2
models: {one: MODEL, two: MODEL}
units:
  - {models: [one], threads: 1}
  - {models: [two], threads: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    make_checkpoint(folder / "llama", "llama")
    (folder / "fleet.yaml").write_text(CONFIG.replace("MODEL", "./llama"))
    return folder / "fleet.yaml"


@pytest.fixture(scope="module")
def measured(config: Path) -> tuple[Profile, str]:
    """And what was told meanwhile."""
    file, told = config.parent / "profile.json", io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["profile", str(config), "--quick", "--temperature", "0.8", "-o", str(file)]) == 0
    return read_profile(file), told.getvalue()


@pytest.fixture(scope="module")
def profile(measured: tuple[Profile, str]) -> Profile:
    return measured[0]


def test_every_phase_is_measured_on_every_share(profile: Profile) -> None:
    assert profile.cores == 2  # of both units
    kinds = {(timed.job.model, timed.job.phase, timed.job.cores) for timed in profile.jobs}
    assert kinds == {
        (model, phase, cores) for model in ("one", "two") for phase in Phase.MIXED.parts for cores in (1, 2)
    }
    assert {(mixed.step.model, mixed.step.cores) for mixed in profile.mixed} == {
        (model, cores) for model in ("one", "two") for cores in (1, 2)
    }
    assert {(pair.job.model, pair.beside.model) for pair in profile.colocated} == {
        (one, other) for one in ("one", "two") for other in ("one", "two")
    }
    assert {(stepped.model, stepped.sequences) for stepped in profile.steps} == {
        (model, sequences) for model in ("one", "two") for sequences in (1, 8)
    }


def test_a_profile_knows_its_machine_and_models(profile: Profile) -> None:
    assert profile.computer.cpu
    assert profile.computer.cores == len(os.sched_getaffinity(0))
    assert {"torch", "kvloom"} <= set(profile.computer.versions)
    shape = profile.shapes["one"]
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.itemsize, shape.tied) == (3, 64, 2, 4, True)


def test_a_profile_says_how_long_jobs_take(profile: Profile) -> None:
    model = ProfiledCostModel(profile)
    beside = [Work.decode("two", 0.5, [20] * 4)]
    for work in (Work.decode("one", 0.5, [50] * 8), Work.prefill("two", 0.5, [30, 30])):
        assert 0.0 < model.seconds(work) <= model.seconds(work, beside) < 60.0


def test_what_else_the_machine_does_is_measured(profile: Profile) -> None:
    assert {overhead.role for overhead in profile.overheads} == {"client", "gateway", "engine"}
    for overhead in profile.overheads:
        costs = overhead.request, overhead.prompt, overhead.token, overhead.turn
        assert min(costs) >= 0.0
        assert 0.0 < sum(costs) < 60.0
    kinds = {(model, phase) for model in ("one", "two") for phase in Phase.MIXED.parts}
    assert {(row.job.model, row.job.phase) for row in profile.oversubscribed} == kinds
    assert {(row.job.model, row.job.phase) for row in profile.beside_loop} == kinds
    assert {row.excess for row in profile.oversubscribed} == {1, 2}
    assert {row.model for row in profile.prefill_gaps} == {"one", "two"}
    assert min(row.context for row in profile.steps) > 0


def test_the_error_is_told(measured: tuple[Profile, str]) -> None:
    profile, told = measured
    for part in (
        "jobs that a fit has not seen",
        "one, prefill",
        "two, decode",
        "median",
        "CPU besides jobs",
        "decode steps",
    ):
        assert part in told
    assert "profile.json" in told.replace("\n", "")
    assert profile.temperature == 0.8


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-o", "nowhere/p.json"], ["--output", "nowhere/p.json", "cannot be written", "is right"]),
        (["-o", "."], ["--output", "is a folder"]),
        (["-o", "p.json", "--temperature", "nan"], ["--temperature: nan", "0 to 100"]),
        (["-o", "p.json", "--model", "x"], ["--model x", "NAME=PATH_OR_HUB_ID"]),
        (["-o", "p.json", "--model", "a=./nowhere"], ["--model a", "does not exist"]),
        (["nowhere.yaml", "-o", "p.json"], ["nowhere.yaml", "No such file"]),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    for part in ("kvloom: ", *parts):
        assert part in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_config_with_tls_is_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Authority(tmp_path).sign("cert")
    secure = tmp_path / "fleet.yaml"
    secure.write_text(
        config.read_text().replace("./llama", str(config.parent / "llama"))
        + "tls: {certificate: cert.pem, key: cert.key}\n"
    )
    assert main(["profile", str(secure), "-o", str(tmp_path / "p.json")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "tls: " in told
    assert "without `tls` is right" in told
    assert not (tmp_path / "p.json").exists()


def test_a_file_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 2
    assert "--output" in capsys.readouterr().err


def test_an_interrupt_ends_it_without_a_file(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvloom.cli", "profile", str(config), "-o", str(tmp_path / "p.json")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert any("reserving the KV arena" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "kvloom: interrupted; no profile is written\n"
    assert list(tmp_path.iterdir()) == []

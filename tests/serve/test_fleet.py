"""`kvloom serve` as a whole: real processes, a real checkpoint, real signals."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import fleet, outlived


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for two tiny models."""
    folder = tmp_path_factory.mktemp("fleet")
    paths = [make_checkpoint(folder / name, name) for name in ("llama", "qwen3")]
    return ["--kv-memory", "8MiB", *(word for path in paths for word in ("--model", f"{path.name}={path}"))]


def ask(url: str, model: str) -> dict[str, object]:
    body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, object] = json.load(response)
    return answer


def test_serves_until_ctrl_c(models: list[str]) -> None:
    with fleet(*models) as running:
        url = running.wait_until_ready()
        assert "curl http" in running.wait_for("Try:")
        for model in ("llama", "qwen3"):
            usage = ask(url, model)["usage"]
            assert isinstance(usage, dict)
            assert usage["completion_tokens"] == 4
        children = running.children()
        assert set(children) == {"engine_process", "gateway_process"}
        with outlived(list(children.values())):
            assert running.end(signal.SIGINT) == 0
        assert running.errors() == ""


def test_nothing_outlives_a_killed_supervisor(models: list[str]) -> None:
    with fleet(*models) as running:
        running.wait_until_ready()
        with outlived(list(running.children().values())):
            assert running.end(signal.SIGKILL) == -signal.SIGKILL


def test_an_engine_that_dies_ends_the_fleet(models: list[str]) -> None:
    with fleet(*models) as running:
        running.wait_until_ready()
        children = running.children()
        with outlived(list(children.values())):
            os.kill(children["engine_process"], signal.SIGKILL)
            assert running.process.wait(60) == 1
        assert running.errors().startswith("kvloom: the engine was killed by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_while_it_starts(models: list[str], number: signal.Signals) -> None:
    with fleet(*models) as running:
        running.wait_for("starting the engine")
        with outlived(list(running.children().values())):
            assert running.end(number) == (0 if number == signal.SIGTERM else -number)


def test_a_hang_up_that_was_to_be_ignored_is(models: list[str]) -> None:
    """As nohup starts it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with fleet(*models) as running:
            running.wait_for("starting the engine")
            running.process.send_signal(signal.SIGHUP)
            assert running.end(signal.SIGTERM) == 0
            assert "(SIGTERM)" in running.wait_for("ending the fleet")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_refused_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with fleet("--model", f"bad={tmp_path}") as running:
        assert running.process.wait(60) == 2
        errors = running.errors()
        assert errors.startswith("kvloom: models.bad: ")
        assert errors.count("\n") == 1

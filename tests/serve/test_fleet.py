"""`kvloom serve` as a whole: real processes, a real checkpoint, real signals."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import fleet, outlived


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for two tiny models."""
    folder = tmp_path_factory.mktemp("fleet")
    paths = [make_checkpoint(folder / name, name) for name in ("llama", "qwen3")]
    return ["--kv-memory", "8MiB", *(word for path in paths for word in ("--model", f"{path.name}={path}"))]


def ask(url: str, model: str, **parameters: object) -> dict[str, Any]:
    given = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True} | parameters
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(given).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def tokens_made(url: str, model: str) -> int:
    made: int = ask(url, model)["usage"]["completion_tokens"]
    return made


@pytest.mark.parametrize("name", ["unit-0", "gateway"])
def test_one_that_dies_before_it_ever_answered_ends_the_fleet(models: list[str], name: str) -> None:
    with fleet(*models) as running:
        running.wait_for("starting the engine")
        children = running.children()
        with outlived(list(children.values())):
            os.kill(children[name], signal.SIGKILL)
            assert running.process.wait(60) == 1
        errors = running.errors()
        assert errors.startswith(f"kvloom: {name} was killed by SIGKILL")
        assert errors.count("\n") == 1


def test_two_fleets_at_once_until_ctrl_c(models: list[str]) -> None:
    """Neither knows of the other, and one goes on when the other has ended."""
    with fleet(*models) as one, fleet(*models) as other:
        first, second = one.wait_until_ready(), other.wait_until_ready()
        assert "curl http" in one.wait_for("Try:")
        assert first != second
        for model in ("llama", "qwen3"):
            assert tokens_made(first, model) == tokens_made(second, model) == 4
        alone = ask(first, "llama", prompt=[1], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        assert (alone["token_logprobs"], alone["top_logprobs"]) == ([None], [None])
        children = one.children()
        assert set(children) == {"unit-0", "gateway"}
        with outlived(list(children.values())):
            assert one.end(signal.SIGINT) == 0
        assert tokens_made(second, "qwen3") == 4
        assert other.end(signal.SIGTERM) == 0
        assert one.errors() + other.errors() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_while_it_starts(models: list[str], number: signal.Signals) -> None:
    """As nohup starts it: a hang-up before the end is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with fleet(*models) as running:
            running.wait_for("starting the engine")
            with outlived(list(running.children().values())):
                running.process.send_signal(signal.SIGHUP)
                assert running.end(number) == (0 if number == signal.SIGTERM else -number)
            assert ("(SIGTERM)" in running.rest()) == (number == signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_refused_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with fleet("--model", f"bad={tmp_path}") as running:
        assert running.process.wait(60) == 2
        errors = running.errors()
        assert errors.startswith("kvloom: models.bad: ")
        assert errors.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is asked once."""
    url = "http://no-such-host.invalid"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with fleet("--model", "far=some/model") as running:
        assert running.process.wait(60) == 2
        errors = running.errors()
        assert errors.startswith(
            f"kvloom: models.far: some/model: is no folder here, and the hub at {url} cannot be reached"
        )
        assert errors.count("\n") == 1
        assert running.process.stdout is not None
        assert "Retrying" not in running.process.stdout.read()

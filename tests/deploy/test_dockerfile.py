"""The image's recipe, by hadolint and by what it must say. It is not built here: that takes a registry."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "Dockerfile"


def stages() -> list[list[tuple[str, str]]]:
    """Returns the instructions of each stage, with what they say."""
    joined = RECIPE.read_text().replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest.strip()))
    return found


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([found, str(RECIPE)], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_runs_is_kvloom_and_not_as_root() -> None:
    assert len(stages()) == 2
    last = dict(stages()[-1])
    assert last["USER"] == "10001"
    assert json.loads(last["ENTRYPOINT"]) == ["kvloom"]
    assert json.loads(last["CMD"])[0] == "serve"
    assert "/health" in last["HEALTHCHECK"]
    command = last["HEALTHCHECK"].partition("CMD ")[2]
    compile(json.loads(command)[2], "the health check", "exec")


def test_torch_comes_first_and_for_cpus_alone() -> None:
    installs = [shlex.split(rest) for name, rest in stages()[0] if name == "RUN" and "pip install" in rest]
    torch, kvloom = installs
    assert "https://download.pytorch.org/whl/cpu" in torch
    assert any(word.startswith("torch==") for word in torch)
    assert ".[cluster]" in kvloom


def test_what_is_copied_is_there_and_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for name, rest in stages()[0] if name == "COPY" for word in rest.split()[:-1]]
    assert set(copied) == let_in
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] in copied
    assert project["license-files"][0] in copied

"""Where the version comes from, and the workflow that makes a release of a tag. No runner has run it yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.installed import ROOT, run

WORKFLOW: Final = ROOT / ".github" / "workflows" / "release.yml"
JOBS: Final[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]


def version(folder: Path) -> str:
    return run(sys.executable, "-m", "hatchling", "version", cwd=folder).strip()


def git(folder: Path, *arguments: str) -> None:
    run("git", "-c", "user.name=k", "-c", "user.email=k@example.org", *arguments, cwd=folder)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The project's own settings, without Git's history."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def test_the_version_is_the_last_tag_s_and_counts_commits_since(sources: Path) -> None:
    git(sources, "init", "--quiet")
    git(sources, "add", ".")
    git(sources, "commit", "--quiet", "--message=first")
    assert version(sources).startswith("0.0.1.dev1+g"), "a clone without tags"
    git(sources, "tag", "v0.1.0")
    assert version(sources) == "0.1.0"
    git(sources, "commit", "--quiet", "--allow-empty", "--message=second")
    assert version(sources).startswith("0.1.1.dev1+g")


def test_the_image_is_told_the_version(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert version(sources) == "0.0.0", "there is no history"
    recipe = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    assert "\nARG VERSION=0.0.0\nENV SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION\n" in recipe
    monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION", "0.1.0")
    assert version(sources) == "0.1.0"


def test_the_workflow_is_one_that_github_knows() -> None:
    schema = ("check_jsonschema", "--builtin-schema", "vendor.github-workflows")
    run(sys.executable, "-m", *schema, WORKFLOW)


def test_zizmor_finds_nothing_unsafe_in_the_workflow() -> None:
    run(Path(sys.executable).with_name("zizmor"), "--offline", "--no-progress", WORKFLOW)


def test_scripts_of_the_workflow_are_shell_s() -> None:
    scripts = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_wheel_is_tried_before_anything_is_published() -> None:
    [tried] = [step for step in JOBS["build"]["steps"] if "test_wheel.py" in step.get("run", "")]
    assert (ROOT / tried["run"].partition("ARGS=")[2]).exists()
    assert tried["env"] == {"KVLOOM_DIST": "dist"}
    assert [name for name, job in JOBS.items() if job.get("needs") != "build"] == ["build"]


def test_pypi_trusts_the_workflow_and_no_secret_is_needed() -> None:
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert JOBS["publish"]["environment"] == "pypi"
    assert "secrets." not in WORKFLOW.read_text("utf-8")

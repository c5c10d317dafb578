"""Real cuda-bindings, the oldest and the newest that pyproject.toml allows, each in a folder of its own."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Final, Literal

import pytest

ROOT = Path(__file__).parents[1]
DAY: Final = 86_400  # seconds for which the newest ones that were found are the newest

Age = Literal["oldest", "newest"]
AGES: tuple[Age, ...] = ("oldest", "newest")


def requirements() -> dict[Age, str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = next(one for one in extras["gpu"] if one.startswith("cuda-bindings")).partition(";")[0]
    least = re.search(r">=([\d.]+)", allowed)
    assert least
    return {"oldest": f"cuda-bindings=={least[1]}.0", "newest": allowed}


def bindings(age: Age) -> Path:
    """Returns their folder, which the virtual environment keeps. Skips the test if the registry cannot be
    had."""
    folder = Path(sys.prefix) / "cuda-bindings" / age
    stamp = folder / "installed"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists() or (age == "newest" and stamp.stat().st_mtime < time.time() - DAY):
                _install(age, folder, stamp)
    except OSError as error:
        pytest.skip(f"cuda-bindings cannot be kept in {folder}: {error.strerror}")
    return folder


def _install(age: Age, folder: Path, stamp: Path) -> None:
    quietly = ["--quiet", "--no-compile", "--disable-pip-version-check", "--retries", "0", "--upgrade"]
    install = [sys.executable, "-m", "pip", "install", *quietly, "--target", str(folder), requirements()[age]]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and not stamp.exists():
        pytest.skip(f"pip cannot install cuda-bindings here: {done.stderr.strip()[-200:]}")
    stamp.touch()

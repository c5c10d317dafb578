"""The command's first moment and its last: Ctrl-C before anything is there, and output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTER = "from kvloom.cli.__main__ import main; sys.exit(main())"
INTERRUPTS = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
BREAKS = """
import sys
import kvloom.cli.app

def broken(arguments):
    raise BrokenPipeError("of a socket")

kvloom.cli.app.run = broken
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code + ENTER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_console_script_begins_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"kvloom": "kvloom.cli.__main__:main"}


@pytest.mark.parametrize(
    "module", ["kvloom.cli.app", "cyclopts", "kvloom.types.errors", "kvloom.lab.faults.chaos"]
)
def test_control_c_while_the_command_is_read(module: str) -> None:
    done = run(INTERRUPTS.format(module=module), "chaos", "--seeds", "1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvloom: interrupted\n")


@pytest.mark.parametrize("words", [("chaos", "--replay", "36"), ("--help",), ("--version",)])
def test_nobody_reads(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvloom.cli", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipe_that_breaks_elsewhere_is_told() -> None:
    done = run(BREAKS)
    assert done.returncode == 1
    assert done.stderr.endswith("BrokenPipeError: of a socket\n")


def test_control_c_is_heard_where_nobody_listens() -> None:
    read, write = os.pipe()
    os.close(read)
    code = INTERRUPTS.format(module="kvloom.cli.app") + ENTER
    done = subprocess.run([sys.executable, "-c", code], stderr=write, timeout=60, check=False)
    os.close(write)
    assert done.returncode == 128 + signal.SIGINT

"""The examples and the README, run against one `kvloom serve`: what they print is what they promise.

UPDATE=1 writes the expected outputs of the examples anew.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import fleet

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
DEFAULT_URL = "http://127.0.0.1:8000"
COMMANDS = {"sh": ["sh", "-euc"], "python": [sys.executable, "-c"]}
# a block of code that calls the server, and the block after it, which is what it prints
SNIPPET = re.compile(r"^```(sh|python)\n((?:(?!```).)*?:8000/v1.*?)^```\n\n```\n(.*?)^```\n", re.S | re.M)
SNIPPETS = SNIPPET.findall((ROOT / "README.md").read_text("utf-8"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet(str(EXAMPLES / "config.yaml")) as running:
        yield running.wait_until_ready()
        assert running.end(signal.SIGTERM) == 0
        assert running.errors() == ""


def run(command: list[str], url: str) -> str:
    done = subprocess.run(
        command,
        env=os.environ | {"KVLOOM_URL": url, "KVLOOM": f"{sys.executable} -m kvloom.cli"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_prints_what_lies_beside_it(script: Path, url: str) -> None:
    command = [sys.executable, str(script)] if script.suffix == ".py" else ["sh", str(script)]
    printed = run(command, url)
    expected = script.with_suffix(".out")
    if os.environ.get("UPDATE"):
        expected.write_text(printed, "utf-8")
    assert printed == expected.read_text("utf-8")


def test_the_readme_has_snippets() -> None:
    assert [language for language, _, _ in SNIPPETS] == ["sh", "python"]


@pytest.mark.parametrize(("language", "code", "shown"), SNIPPETS, ids=[one[0] for one in SNIPPETS])
def test_the_readme_shows_what_happens(language: str, code: str, shown: str, url: str) -> None:
    printed = run([*COMMANDS[language], code.replace(DEFAULT_URL, url)], url)
    parts = [re.escape(part) for part in shown.strip().split("…")]
    assert re.search(".*".join(parts), printed, re.S), printed

"""Each client, unchanged, gets from a served fleet what the model says. They are slow to import, and so they
run in one process, in an environment of their own that `make clients` makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE
from tests.serve.streaming import serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
SPEAK = Path(__file__).with_name("speak.py")
CONFIG = "kv_memory: 64MiB\nthreads: 1\nmodels: {{sums: {demo}/sums}}\nunits: [{{models: [sums]}}]\n"
SAID = "17 + 25 = 42."
EXPECTED: dict[str, Any] = {
    "openai: chat": [SAID, SAID],
    "openai: completions": None,
    "openai: responses": [SAID, SAID, True],
    "anthropic": [SAID, SAID],
    "ollama": [SAID, SAID, True],
    "litellm": [SAID, SAID, True],
    "langchain-openai": [SAID, SAID],
    "instructor": {"TOOLS": True, "TOOLS_STRICT": True, "JSON_SCHEMA": True},
    "pydantic-ai": [SAID, SAID],
    "llm --schema": ["big", "small"],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What each client was told, by its name."""
    if not PYTHON.exists():
        pytest.skip("`make clients` has not installed the clients")
    with serving(tmp_path_factory.mktemp("clients"), CONFIG.format(demo=DEMO)) as (_, url):
        argv = [str(PYTHON), str(SPEAK), url]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=4 * DEADLINE, check=False)
        assert done.returncode == 0, done.stderr
        # clients may print lines of their own
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
        yield {line["client"]: line for line in lines}


@pytest.mark.parametrize("client", EXPECTED)
def test_a_client_gets_what_the_model_says(told: dict[str, Any], client: str) -> None:
    line = told[client]
    assert "error" not in line, line["error"]
    if EXPECTED[client] is not None:
        assert line["told"] == EXPECTED[client]
    else:
        whole, streamed = line["told"]
        assert whole == streamed != ""

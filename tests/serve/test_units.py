"""Two engines and a gateway under one supervisor, each killed in turn. Real processes and models."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE, Fleet, fleet, leaves_nothing

CONFIG = f"""
kv_memory: 16MiB
block_bytes: 4KiB
models: {{guide: {DEMO}/guide, stories: {DEMO}/stories, sums: {DEMO}/sums}}
units:
  - models: [guide, sums]
  - models: [stories, sums]
    policy: fcfs
"""

WITH_A_PROGRAM = f"""
kv_memory: 16MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums]}}]
program: {{name: 'my_router:last', say: here}}
"""
PROGRAM = """
async def last(call, fleet, *, say: str):
    replica = fleet.up[-1]
    print(f"{say}: {replica.name}")
    async for frame in call.start_generate(replica):
        yield frame
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    return str(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For the fleet's sockets."""
    made = tmp_path / "s"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, str]]:
    """A fleet and its URL, for tests that leave it as they found it; Ctrl-C ends it and leaves nothing."""
    made = tmp_path_factory.mktemp("units")
    (folder := made / "s").mkdir()
    (made / "fleet.yaml").write_text(CONFIG)
    with fleet(str(made / "fleet.yaml"), folder=folder) as running:
        url = running.wait_until_ready()
        running.wait_for("scheduler | answers")
        yield running, url
        with leaves_nothing(running, folder):
            assert running.end(signal.SIGINT) == 0
        assert running.errors() == ""


def ask(url: str, model: str) -> int:
    """The status of a short answer by `model`."""
    body = json.dumps({"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def until_served(url: str, model: str) -> None:
    """Its unit answers, which the gateway learns at once, but not before the supervisor says so."""
    while (status := ask(url, model)) != 200:
        assert status == 503


def kill(running: Fleet, name: str) -> int:
    """Kill a component, and wait until its successor answers, whose process id is returned."""
    os.kill(running.children()[name], signal.SIGKILL)
    assert "was killed by SIGKILL" in (line := running.wait_for(f"{name} | "))
    assert "starts again in 0.5 s" in line
    running.wait_for(f"{name} | answers again")
    return running.children()[name]


def test_what_dies_comes_back_and_the_others_serve_on(served: tuple[Fleet, str]) -> None:
    running, url = served
    assert "unit-1: starting the engine" in running.output
    assert [ask(url, model) for model in ("guide", "stories", "sums")] == [200] * 3
    before = running.children()
    assert before.keys() == {"unit-0", "unit-1", "gateway", "scheduler"}
    os.kill(before["unit-0"], signal.SIGKILL)
    running.wait_for("unit-0 | was killed by SIGKILL")
    assert ask(url, "stories") == ask(url, "sums") == 200
    running.wait_for("unit-0 | answers again")
    until_served(url, "guide")
    kill(running, "unit-1")
    until_served(url, "stories")
    after = running.children()
    assert after["gateway"] == before["gateway"]
    assert after["scheduler"] == before["scheduler"]
    assert len({*before.values(), *after.values()}) == 6


def test_an_engine_that_is_told_to_end_tells_its_streams(served: tuple[Fleet, str]) -> None:
    """So that the request is not taken for one of which engines die."""
    running, url = served
    body = {"model": "stories", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE) as stream:
        stream.readline()
        os.kill(running.children()["unit-1"], signal.SIGTERM)
        assert "unit-1: the engine is stopping; it waits" in running.wait_for("gateway | WARNING ")
        assert stream.read().endswith(b"data: [DONE]\n\n")
    running.wait_for("unit-1 | answers again")


def test_clients_wait_for_a_new_gateway_at_the_same_port(served: tuple[Fleet, str]) -> None:
    running, url = served
    os.kill(running.children()["gateway"], signal.SIGKILL)
    running.wait_for("gateway | was killed by SIGKILL")
    assert ask(url, "sums") == 200
    running.wait_for("gateway | answers again")


def test_engines_outlive_their_fork_server(served: tuple[Fleet, str]) -> None:
    """And start without it meanwhile."""
    running, url = served
    before = running.children()
    os.kill(running.fork_server(), signal.SIGKILL)
    running.wait_for("forkserver | was killed by SIGKILL")
    assert [ask(url, model) for model in ("guide", "stories", "sums")] == [200] * 3
    for name, model in (("unit-0", "guide"), ("unit-1", "stories")):
        os.kill(before[name], signal.SIGKILL)
        running.wait_for(f"{name} | has ended; it starts again")
        running.wait_for(f"{name} | answers again")
        until_served(url, model)
    after = running.children()
    assert after["gateway"] == before["gateway"]
    assert len({before[name] for name in ("unit-0", "unit-1")} | {*after.values()}) == len(after) + 2


def test_nothing_outlives_a_killed_supervisor(config: str, folder: Path) -> None:
    with fleet(config, folder=folder) as running:
        running.wait_until_ready()
        with leaves_nothing(running, folder):
            assert running.end(signal.SIGKILL) == -signal.SIGKILL


def test_nothing_is_left_where_an_engine_does_not_listen(config: str, folder: Path) -> None:
    with fleet(config, folder=folder) as running:
        running.wait_until_ready()
        os.kill(running.children()["unit-1"], signal.SIGSTOP)
        with leaves_nothing(running, folder):
            assert running.end(signal.SIGINT) == 0


def test_a_program_that_is_none_is_one_line(config: str, folder: Path) -> None:
    with open(config, "a") as file:
        file.write("program: {name: balanced, ratoi: 1}\n")
    with fleet(config, folder=folder) as running:
        assert running.process.wait(DEADLINE) == 2
        errors = running.errors()
        assert errors.startswith("kvloom: program: balanced has no option ratoi")
        assert errors.count("\n") == 1
        assert not list(folder.glob("kvloom-*"))


def test_a_program_of_ones_own_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "my_router.py").write_text(PROGRAM)
    (tmp_path / "fleet.yaml").write_text(WITH_A_PROGRAM)
    with fleet(str(tmp_path / "fleet.yaml")) as running:
        url = running.wait_until_ready()
        assert ask(url, "sums") == 200
        running.wait_for("gateway | here: unit-0")
        assert running.end(signal.SIGTERM) == 0

"""The commands by which docs/cluster.md takes its reader from two machines to a fleet."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from kvloom.config.config import DEMO
from tests.hosts.fleets import CHAT, DEADLINE, of_kvloom, units_of
from tests.hosts.hosts import Host, eventually

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
CONFIG = """\
host: 0.0.0.0
kv_memory: 32MiB
models: {{sums: {demo}/sums}}
units: [{{models: [sums], replicas: 2, threads: 1}}]
"""
BIN = Path(sys.executable).parent


def commands() -> list[str]:
    """Returns the commands of the page's first section, in their order."""
    [section] = re.findall(r"^## From two machines to a fleet$(.*?)^## ", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^    (.+)$", section, re.M)


def at(host: Host, folder: Path, command: str) -> tuple[str, ...]:
    """Returns what runs a command of the page at a host. The page's first host has the address 10.0.0.1."""
    return (
        "sh",
        "-c",
        f"cd {shlex.quote(str(folder))}; PATH={shlex.quote(str(BIN))}:$PATH; exec env {command}",
    )


def test_five_commands_make_a_fleet_of_two_machines(two: list[Host], tmp_path: Path) -> None:
    """What `pip install` would bring is installed already, so that command alone is not run."""
    head, other = two
    install, start, join, serve, stop = commands()
    assert install == "pip install '.[cluster]'"
    assert "cluster" in importlib.metadata.metadata("kvloom").get_all("Provides-Extra", [])
    (tmp_path / "fleet.yaml").write_text(CONFIG.format(demo=DEMO))

    told = head.run(*at(head, tmp_path, start.replace("10.0.0.1", head.address)), seconds=DEADLINE)
    printed = join.replace("10.0.0.1", head.address).replace("...", r"\w+")
    [typed] = re.findall(rf"^ *({printed})$", told, re.M)
    other.run(*at(other, tmp_path, typed), seconds=DEADLINE)
    process = head.start(*at(head, tmp_path, serve))
    for line in process.stdout:
        if b"Ready in" in line:
            break
    assert [len(units_of(host)) for host in two] == [1, 1]
    answer = httpx.post(f"http://{head.address}:8000/v1/chat/completions", json=CHAT, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    assert "42" in answer.json()["choices"][0]["message"]["content"]

    process.signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 0
    for host in reversed(two):
        host.run(*at(host, tmp_path, stop), seconds=DEADLINE)
    eventually(lambda: not any(map(of_kvloom, two)), seconds=DEADLINE)
    eventually(lambda: not any(host.processes() for host in two), seconds=DEADLINE)

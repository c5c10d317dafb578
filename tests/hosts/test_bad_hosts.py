"""Hosts that are set up badly: what is told of them, in one line and soon, and what works all the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from kvloom.config.config import DEMO
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.fleets import CHAT, DEADLINE, kvloom, of_kvloom, refused, served, units_of
from tests.hosts.hosts import Host, eventually

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
CONFIG = f"""\
host: 0.0.0.0
kv_memory: 48MiB
node_lease: 30s
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], replicas: 3, threads: 1}}]
"""
CLOCK = "-20h"
UPTIME = 700_000  # seconds for which a host has been up for longer than this machine
OTHER_VERSION = """\
import importlib.util
import sys


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "ray._version":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def patched(module):
            run(module)
            module.version = "2.59.0"

        spec.loader.exec_module = patched
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    """Two hosts. The first one is a cluster's head, and has a small disk of its own; the second is in no
    cluster, and has a way out by a network that nobody else is in."""
    with hosts_or_skip(2) as made:
        head, other = made
        head.run("sh", "-c", 'mount -t tmpfs -o size=300m none "$HOME"')
        link = ("ip", "link", "add", "lonely", "type", "veth", "peer", "name", "end")
        other.run(*link)
        other.run("ip", "addr", "add", "10.77.0.1/24", "dev", "lonely")
        other.run("ip", "link", "set", "lonely", "up")
        other.run("ip", "link", "set", "end", "up")
        other.run("ip", "route", "add", "default", "via", "10.77.0.254", "dev", "lonely")
        yield made


@pytest.fixture(scope="module")
def token(two: list[Host]) -> str:
    told = kvloom(two[0], "cluster", "start", "--head", "--address", two[0].address)
    [found] = re.findall(r"RAY_AUTH_TOKEN=(\w+)", told)
    assert isinstance(found, str)
    return found


def fill(host: Host) -> None:
    """Fills a host's disk up."""
    host.run("sh", "-c", 'cat /dev/zero > "$HOME/filling" 2>/dev/null || true')


def test_a_cluster_does_not_start_on_a_full_disk(two: list[Host]) -> None:
    fill(two[0])
    try:
        said = refused(two[0], "cluster", "start", "--head", "--address", two[0].address)
    finally:
        two[0].run("sh", "-c", 'rm "$HOME/filling"')
    assert "0 MB are free, and Ray keeps its logs there; at least 100 MB are right" in said


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("nonsense", "nonsense: no address; HOST:PORT of a cluster's head, as 10.0.0.1:6379, is right"),
        ("{0}:6399", "{0}:6399: cannot be reached (Connection refused); HOST:PORT of a cluster's head is"),
        ("10.78.0.1:6379", "10.78.0.1:6379: cannot be reached ("),
    ],
)
def test_a_head_that_is_not_there(two: list[Host], head: str, problem: str) -> None:
    here = two[0].address
    assert problem.format(here) in refused(two[1], "cluster", "join", head.format(here), token="0" * 64)


def test_addresses_at_which_a_host_is_not_reached(two: list[Host], token: str) -> None:
    head = f"{two[0].address}:6379"
    lonely = refused(two[1], "cluster", "join", head, "--address", "10.77.0.1", token=token)
    assert f"--address 10.77.0.1: {head} does not reach this host there (no answer in 5 s)" in lonely
    foreign = refused(two[1], "cluster", "join", head, "--address", two[0].address, token=token)
    assert f"--address {two[0].address}: no address of this host" in foreign


def test_a_host_with_another_ray(two: list[Host], token: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "kvloom.cli", "cluster", "join", f"{two[0].address}:6379"]
    with pytest.raises(subprocess.CalledProcessError) as ended:
        two[1].run("env", f"RAY_AUTH_TOKEN={token}", f"PYTHONPATH={path}", *command)
    [line] = str(ended.value.stderr).splitlines()
    assert re.fullmatch(
        r"kvloom: Ray cannot start here: the cluster has Ray (\S+) on Python (\S+), and this host "
        r"Ray 2\.59\.0 on Python \2; the same ones on all hosts are right",
        line,
    )


def preloaded() -> list[str]:
    """Returns the settings with which what runs at a host has another time of day."""
    library = pytest.importorskip("libfaketime", reason="libfaketime is not installed")
    file = Path(library.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return [f"LD_PRELOAD={file}", f"FAKETIME={CLOCK}", "FAKETIME_DONT_FAKE_MONOTONIC=1"]


def hours(host: Host, *settings: str) -> float:
    return int(host.run("env", *settings, "date", "+%s")) / 3600


def test_clocks_that_differ_two_networks_and_a_disk_that_fills_up(
    two: list[Host], token: str, tmp_path: Path
) -> None:
    """One fleet shows it all, because each takes a start. Its second host has the time of day of another
    place, has been up for a week longer, and its way out is not its way to the head; then the head's disk is
    full."""
    head, other = two
    settings = preloaded()
    assert hours(other, *settings) - hours(head) == pytest.approx(-20, abs=0.1)
    other.run("mount", "-t", "tmpfs", "none", "/dev/shm")  # that the library leaves nothing in this machine's
    aged = ("unshare", "--time", f"--boottime={UPTIME}", f"--monotonic={UPTIME}", "--fork")
    join = (sys.executable, "-m", "kvloom.cli", "cluster", "join", f"{head.address}:6379")
    told = other.run("env", f"RAY_AUTH_TOKEN={token}", *settings, *aged, *join)
    assert told == f"This host, {other.address}, has joined the cluster of {head.address}:6379.\n"
    config = tmp_path / "fleet.yaml"
    config.write_text(CONFIG)
    with served(head, str(config), "--cluster", "auto") as fleet:
        eventually(lambda: bool(units_of(head) and units_of(other)), seconds=DEADLINE)
        right = "".join(pieces(fleet.url))
        assert ["".join(pieces(fleet.url)) for _ in range(2)] == [right] * 2  # of all replicas
        assert "10.77.0.1" not in other.run("ss", "-tnH")
        stream = pieces(fleet.url)
        begun = next(stream)
        fill(head)
        assert begun + "".join(stream) == right
        said = refused(head, "unit", "drain", units_of(head)[0])
        assert "the fleet's file cannot be written: No space left on device" in said
        assert "".join(pieces(fleet.url)) == right
    assert fleet.process.wait() == 0, "".join(fleet.printed)
    eventually(lambda: not any(map(of_kvloom, two)), seconds=DEADLINE)


def pieces(url: str) -> Iterator[str]:
    """Yields the pieces of a short streamed chat. The library of clocks makes that host's engines slow."""
    asked = CHAT | {"stream": True, "max_tokens": 30}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=DEADLINE) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (choice["delta"].get("content", "") for choice in event["choices"])

"""A cluster's head that keeps its state in a folder, and goes on with it when it is started again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hosts.fleets import DEADLINE, kvloom
from tests.hosts.hosts import Host, HostProcess, eventually

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
RAY = 'import os, ray; ray.init("auto", namespace="test", log_to_driver=False, configure_logging=False); '
ACTOR = """
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
class Actor:
    def pid(self):
        return os.getpid()
[node] = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == "{address}"]
there = NodeAffinitySchedulingStrategy(node, soft=False)
actor = ray.remote(Actor).options(name="it", lifetime="detached", scheduling_strategy=there).remote()
print(ray.get(actor.pid.remote(), timeout=60))
"""
ASKED = 'print(ray.get(ray.get_actor("it").pid.remote(), timeout=60))'


def begun(host: Host, folder: Path) -> tuple[HostProcess, str]:
    """Returns a head that has started as systemd starts it, and the cluster's token."""
    notify = folder / "notify"
    notify.unlink(missing_ok=True)
    command = (
        "cluster",
        "start",
        "--head",
        f"--address={host.address}",
        f"--storage={folder}/state",
        "--block",
    )
    called = ("sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-m", "kvloom.cli", *command)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.settimeout(DEADLINE)
        process = host.start("env", f"NOTIFY_SOCKET={notify}", *called)
        said = [process.stdout.readline().decode() for _ in range(4)]
        assert "RAY_AUTH_TOKEN=<as in ~/.ray/auth_token> kvloom cluster join" in "".join(said)
        token = (host.folder / ".ray" / "auth_token").read_text().strip()
        assert manager.recv(100) == b"READY=1"
    return process, token


def python(host: Host, code: str) -> str:
    return host.run("env", "RAY_AUTH_MODE=token", sys.executable, "-c", RAY + code, seconds=DEADLINE)


def named(host: Host, name: bytes) -> list[int]:
    """Returns the ids of the processes at a host whose program has a name."""
    found = []
    for pid in host.processes():
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        if program.endswith(b"/" + name):
            found.append(pid)
    return found


def test_a_head_that_is_started_again_knows_its_cluster(two: list[Host], tmp_path: Path) -> None:
    """What runs at other hosts has gone on meanwhile, as the same processes. That the head stays at its
    terminal tells when Ray has ended there."""
    head, other = two
    process, token = begun(head, tmp_path)
    kvloom(other, "cluster", "join", f"{head.address}:6379", token=token)
    before = python(head, ACTOR.format(address=other.address))
    [store] = named(head, b"gcs_server")
    os.kill(store, signal.SIGKILL)
    assert process.wait(DEADLINE) == 1
    said = process.stdout.read().decode()
    assert said == "kvloom: Ray has ended here: its gcs_server has ended with exit code -9\n"
    for left in head.processes():  # as systemd ends what is left of a unit; Ray's own wait for a minute first
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    eventually(lambda: not head.processes(), seconds=DEADLINE)
    process, again = begun(head, tmp_path)
    assert again == token
    assert python(head, ASKED) == before
    process.signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 0
    eventually(lambda: not head.processes(), seconds=DEADLINE)
    kvloom(other, "cluster", "stop")

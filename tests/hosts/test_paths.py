"""The ways that K and V take between units of one host and of two."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kvloom.types.load import LinkLoad
from tests.hosts.hosts import Host, HostProcess
from tests.processes import DEADLINE

ROOT = Path(__file__).resolve().parents[2]


def _start(host: Host, name: str) -> tuple[HostProcess, bytes]:
    """Starts a unit, and returns it with what it offers."""
    path = f"PYTHONPATH={ROOT}:{ROOT / 'src'}"
    process = host.start("env", path, sys.executable, "-m", "tests.hosts.paths_peer", name, host.address)
    return process, process.stdout.readline()


def test_units_of_one_host_share_memory_and_others_take_the_network(two: list[Host]) -> None:
    here, there = two
    sender, _ = _start(here, "sender")
    beside, room_beside = _start(here, "beside")
    far, room_far = _start(there, "far")
    found = {}
    for name, room in (("beside", room_beside), ("far", room_far)):
        sender.stdin.write(room)
        sender.stdin.flush()
        found[name] = msgspec.json.decode(sender.stdout.readline(), type=LinkLoad)
    assert found["beside"].path == "shm"
    assert found["far"].path in ("tcp", "nixl")
    assert min(link.rate for link in found.values()) > 1e6
    for one in (sender, beside, far):
        one.stdin.close()
        assert one.wait(DEADLINE) == 0

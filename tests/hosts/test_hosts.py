"""Hosts of tests are as slow and as lossy as they are to be, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.hosts import Host, NoHosts, hosts

ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("0.0.0.0", 9)); print("up", flush=True)
    while True: s.sendto(*s.recvfrom(99))
"""
CALL = """
import socket, sys, time
began, answered = time.monotonic(), 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 9)); s.settimeout(float(sys.argv[3]))
    for _ in range(int(sys.argv[2])):
        s.send(b"?")
        try: answered += bool(s.recv(9))
        except TimeoutError: pass
print(answered, time.monotonic() - began)
"""


def called(host: Host, other: Host, times: int, patience: float = 30.0) -> tuple[int, float]:
    """Returns how many of so many packets were answered, and the seconds that it took. patience: seconds for
    which each answer is waited for."""
    words = (sys.executable, "-c", CALL, other.address, str(times), str(patience))
    answered, seconds = host.run(*words).split()
    return int(answered), float(seconds)


def test_a_link_is_slow_and_loses_what_it_is_to_lose(two: list[Host]) -> None:
    one, other = two
    other.start(sys.executable, "-c", ECHO).stdout.readline()
    assert called(one, other, 9)[0] == 9
    with other.slow(delay=0.02, loss=0.0):
        answered, seconds = called(one, other, 5)
        assert answered == 5
        assert seconds >= 5 * 2 * 0.02
    with other.slow(delay=0.0, loss=0.5):
        assert 0 < called(one, other, 12, patience=0.5)[0] < 12
    assert called(one, other, 9)[0] == 9


def test_nothing_is_left_of_hosts() -> None:
    def left() -> list[str]:
        names = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
        spaces = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
        return [
            *(line.split(": ")[1] for line in names.splitlines()),
            *(line.split()[0] for line in spaces.splitlines()),
        ]

    before = left()
    try:
        with hosts(2) as made:
            made[0].start("sh", "-c", "echo begun; exec sleep 1000").stdout.readline()
            folder = made[0].folder.parent
            [pid] = made[0].processes()[:1]
            assert set(left()) > set(before)
    except NoHosts as why:
        pytest.skip(str(why))
    mine = [name for name in left() if name.startswith(made[0].name[:-2])]
    assert (mine, folder.exists(), Path(f"/proc/{pid}").exists()) == ([], False, False)

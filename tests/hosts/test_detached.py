"""A process that outlives who has started it is found by the file that it has locked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom.serve.nodes.detached import address_at, claim, end, find_or_start
from kvloom.types.errors import ConfigError, Unavailable
from tests.processes import DEADLINE

MODULE = "tests.hosts.test_detached"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "lock"
    assert end(tmp_path / "lock", DEADLINE)


def started(lock: Path, order: bytes = b"serve") -> str:
    order = f"{lock} {order.decode()}".encode()
    return find_or_start(lock, MODULE, order, lock.with_suffix(".log"), ENVIRONMENT)


def test_it_is_found_by_who_comes_later(lock: Path) -> None:
    assert address_at(lock) == ""
    address = started(lock)
    assert address_at(lock) == address
    assert started(lock) == address
    assert str(os.getpid()) not in address, "another process than this one"


def test_those_who_start_it_at_the_same_time_find_one(lock: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(started, lock) for _ in range(4)]
    assert {one.result() for one in asked} == {address_at(lock)}


def test_another_takes_the_place_of_one_that_was_killed(lock: Path) -> None:
    first = started(lock)
    os.kill(int(first), signal.SIGKILL)
    assert end(lock, DEADLINE)
    second = started(lock)
    assert first != second == address_at(lock)


def test_one_that_cannot_start_says_why(lock: Path) -> None:
    with pytest.raises(Unavailable, match=r"^this is wrong, and that is right$"):
        started(lock, b"fail")
    assert address_at(lock) == ""


def test_a_file_that_nobody_has_locked_counts_for_nothing(lock: Path) -> None:
    lock.write_text("left over 1")
    assert address_at(lock) == ""
    assert end(lock, 0.0)


def main() -> None:
    """Is the process: its address is its id."""
    lock, _, order = sys.stdin.readline().strip().partition(" ")
    if order == "fail":
        sys.exit("this is wrong, and that is right")
    try:
        claim(Path(lock), str(os.getpid()), "a process of this test")
    except ConfigError as error:
        sys.exit(error.message)
    signal.pause()


if __name__ == "__main__":
    main()

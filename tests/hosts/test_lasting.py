"""A process that outlives who has started it is found by the file that it has locked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom.serve.nodes.lasting import end, found, found_or_started, last
from kvloom.types.errors import ConfigError, Unavailable

MODULE = "tests.hosts.test_lasting"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "place"
    assert end(tmp_path / "place", 10.0)


def started(place: Path, order: bytes = b"serve") -> str:
    order = f"{place} {order.decode()}".encode()
    return found_or_started(place, MODULE, order, place.with_suffix(".log"), ENVIRONMENT)


def test_it_is_found_by_who_comes_later(place: Path) -> None:
    assert found(place) == ""
    address = started(place)
    assert found(place) == address
    assert started(place) == address
    assert str(os.getpid()) not in address, "another process than this one"


def test_those_who_start_it_at_the_same_time_find_one(place: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(started, place) for _ in range(4)]
    assert {one.result() for one in asked} == {found(place)}


def test_another_takes_the_place_of_one_that_was_killed(place: Path) -> None:
    first = started(place)
    os.kill(int(first), signal.SIGKILL)
    assert end(place, 10.0)
    second = started(place)
    assert first != second == found(place)


def test_one_that_cannot_start_says_why(place: Path) -> None:
    with pytest.raises(Unavailable, match=r"^this is wrong, and that is right$"):
        started(place, b"fail")
    assert found(place) == ""


def test_a_file_that_nobody_has_locked_counts_for_nothing(place: Path) -> None:
    place.write_text("left over 1")
    assert found(place) == ""
    assert end(place, 0.0)


def main() -> None:
    """Is the process: its address is its id."""
    place, _, order = sys.stdin.readline().strip().partition(" ")
    if order == "fail":
        sys.exit("this is wrong, and that is right")
    try:
        last(Path(place), str(os.getpid()), "a process of this test")
    except ConfigError as error:
        sys.exit(error.message)
    signal.pause()


if __name__ == "__main__":
    main()

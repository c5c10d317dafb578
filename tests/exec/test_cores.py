"""Each thread of a job has a core of its own, if the unit has all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom.exec.cpu.cores import Cores, Team
from kvloom.kernels.cpu.parallel import on_each_thread

ALL = frozenset(os.sched_getaffinity(0))
COUNT = len(ALL)

pytestmark = pytest.mark.skipif(COUNT == 1, reason="a single core leaves nothing to bind")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that runs jobs, with a team of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def affinities(threads: int) -> list[frozenset[int]]:
    """The cores of each thread of the calling one's team."""
    found: list[frozenset[int]] = []
    on_each_thread(lambda: found.append(frozenset(os.sched_getaffinity(0))), threads)
    return found


def test_threads_of_a_team_are_on_cores_of_their_own(thread: ThreadPoolExecutor) -> None:
    cores = Cores(COUNT)
    team = Team(cores)

    def run() -> None:
        taken = cores.take(COUNT)
        for _ in range(2):
            team.begin(COUNT, taken)
            assert sorted(map(sorted, affinities(COUNT))) == [[core] for core in sorted(ALL)]
            team.begin(1, ())
            assert os.sched_getaffinity(0) == ALL
            team.begin(1, ())

    thread.submit(run).result()


def test_a_team_moves_to_the_cores_that_its_job_is_given(thread: ThreadPoolExecutor) -> None:
    team, (first, second, *_) = Team(Cores(COUNT)), sorted(ALL)

    def run() -> None:
        for pair in ((first, second), (second, first), (), (first, second)):
            team.begin(2, pair)
            bound = [frozenset({core}) for core in pair] or [ALL, ALL]
            assert sorted(map(sorted, affinities(2))) == sorted(map(sorted, bound))

    thread.submit(run).result()


def test_a_core_is_given_to_one_job_at_a_time() -> None:
    cores = Cores(COUNT)
    taken = cores.take(COUNT)
    assert set(taken) == ALL
    assert cores.take(2) == ()
    cores.give_back(taken)
    assert set(cores.take(COUNT)) == ALL


def test_a_job_of_one_thread_and_a_unit_with_some_cores_are_not_bound() -> None:
    assert Cores(COUNT).take(1) == ()
    assert Cores(COUNT - 1).take(COUNT - 1) == Cores(COUNT + 1).take(2) == ()

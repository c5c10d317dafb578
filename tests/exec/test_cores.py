"""Each thread of a job has a core of its own, if the unit has all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom.exec.cpu.cores import PAUSE, Cores, Team
from kvloom.kernels.cpu.affinity import bind_team

ALL = frozenset(os.sched_getaffinity(0))
COUNT = len(ALL)
TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(COUNT == 1, reason="a single core leaves nothing to bind")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Loads the kernel, which begins a thread of its own."""
    bind_team([ALL])


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that runs jobs, with a team of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def affinities(before: set[int]) -> list[list[int]]:
    """The cores of each thread that was not there before, and of the calling one."""
    threads = {int(task.name) for task in TASKS.iterdir()} - before | {threading.get_native_id()}
    return sorted(sorted(os.sched_getaffinity(one)) for one in threads)


def threads_now() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir()}


def test_the_threads_of_a_team_are_bound(thread: ThreadPoolExecutor) -> None:
    def run() -> None:
        before = threads_now()
        bind_team([[core] for core in sorted(ALL)])
        assert affinities(before) == [[core] for core in sorted(ALL)]
        bind_team([ALL] * COUNT)
        assert affinities(before) == [sorted(ALL)] * COUNT

    thread.submit(run).result()


def test_a_team_is_bound_for_a_job_after_a_pause_alone(thread: ThreadPoolExecutor) -> None:
    cores, now = Cores(COUNT), 1000.0

    def run() -> None:
        nonlocal now
        team, taken = Team(cores, lambda: now), cores.take(COUNT)
        team.begin(1, ())  # torch begins a thread of its own
        team.end()
        before = threads_now()
        own = [[core] for core in sorted(ALL)]
        for pause, threads, bound in (
            (10 * PAUSE, COUNT, own),
            (PAUSE / 2, COUNT, [sorted(ALL)] * COUNT),
            (10 * PAUSE, COUNT, own),
            (PAUSE / 2, 1, [sorted(ALL)] * COUNT),
            (10 * PAUSE, 1, [sorted(ALL)] * COUNT),
        ):
            now += pause
            team.begin(threads, taken if threads > 1 else ())
            assert affinities(before) == bound
            team.end()

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

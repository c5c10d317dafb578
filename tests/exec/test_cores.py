"""Each thread of a job has a core of its own, if the unit has all of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.exec.cpu.cores import PAUSE, ThreadTeam
from kvloom.kernels.cpu.affinity import bind_team
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, running, spec_of

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


def test_a_team_is_bound_for_a_job_on_all_cores_after_a_pause_alone(thread: ThreadPoolExecutor) -> None:
    now = 1000.0

    def run() -> None:
        nonlocal now
        team = ThreadTeam(lambda: now)
        team.begin(1)  # torch begins a thread of its own
        team.end()
        before, free = threads_now(), [sorted(ALL)]
        own = [[core] for core in sorted(ALL)]
        for pause, threads, bound in (
            (10 * PAUSE, COUNT, own),
            (PAUSE / 2, COUNT, free * COUNT),
            (10 * PAUSE, COUNT, own),
            (PAUSE / 2, 1, free * COUNT),
            (10 * PAUSE, 1, free * COUNT),
        ):
            now += pause
            team.begin(threads)
            assert affinities(before) == bound
            team.end()

    thread.submit(run).result()


def test_a_unit_binds_its_first_job(tmp_path: Path) -> None:
    """The threads stay bound until the next job begins."""
    before = threads_now()

    async def ask_once() -> list[list[int]]:
        async with running(
            replace(spec_of({"m": make_checkpoint(tmp_path / "m", "llama")}), threads=COUNT)
        ) as engine:
            await ask(engine, body("m", [1, 2, 3], max_tokens=1))
            return affinities(before)

    found = asyncio.run(ask_once())
    assert all([core] in found for core in sorted(ALL))

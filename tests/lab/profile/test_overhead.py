"""Costs out of what loads took, and what the kernel says of processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from kvloom.lab.profile.beside import BUSY_PART, mean_excess, processes_for
from kvloom.lab.profile.processes import (
    all_threads_seconds,
    busy_processes,
    descendants,
    main_thread_seconds,
)
from kvloom.lab.profile.serving import (
    FEWEST_REQUESTS,
    LOADS,
    MOST_REQUESTS,
    Bounds,
    Jobs,
    Load,
    Loaded,
    count_jobs,
    split_cpu_time,
)
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import Role
from kvloom.plan.cost.work import Work
from tests.plan.cost.profiles import make_profile

AMPLE = Bounds(context=4096, waiting=1024)
COSTS: dict[Role, tuple[float, float, float, float]] = {
    "client": (4e-4, 1e-6, 3e-5, 1e-5),
    "gateway": (7e-4, 4e-6, 7e-5, 5e-5),
    "engine": (3e-4, 0.0, 2e-5, 0.0),
}
COUNTS = [
    (3, 192, 288, 288),
    (12, 768, 1152, 288),
    (48, 12288, 4608, 288),
    (192, 12288, 18432, 288),
    (192, 12288, 384, 6),
]


def loaded(requests: int, prompts: int, tokens: int, turns: int) -> Loaded:
    counts = requests, prompts, tokens, turns
    cpu = {
        role: sum(count * cost for count, cost in zip(counts, costs, strict=True))
        for role, costs in COSTS.items()
    }
    return Loaded(*counts, cpu)


def test_costs_are_found() -> None:
    found = split_cpu_time([loaded(*load) for load in COUNTS])
    assert [overhead.role for overhead in found] == ["client", "gateway", "engine"]
    for overhead in found:
        costs = [overhead.request, overhead.prompt, overhead.token, overhead.turn]
        assert costs == pytest.approx(COSTS[overhead.role], rel=0.01, abs=1e-7)


def test_a_mixed_job_is_one_job() -> None:
    text = "".join(
        f'# TYPE kvloom_{kind}_jobs_total counter\nkvloom_{kind}_jobs_total{{model="{model}"}} {count}.0\n'
        for kind, counts in (("prefill", (5, 1)), ("decode", (9, 0)), ("mixed", (2, 0)), ("other", (7, 7)))
        for model, count in zip("ab", counts, strict=True)
    )
    assert count_jobs(text) == Jobs((5 - 2) + (9 - 2) + 2 + 1, 5 + 1)


def test_nothing_is_found_where_nothing_was_used() -> None:
    nothing = [Loaded(4, 400, 100, 30, {"client": 0.0, "gateway": 0.0, "engine": -0.1})] * 3
    for overhead in split_cpu_time(nothing):
        assert overhead.request + overhead.prompt + overhead.token + overhead.turn < 1e-8


@pytest.mark.parametrize("load", [Load(0.25, 24), Load(2.0, 8)])
def test_loads_keep_jobs_as_busy_as_they_shall(load: Load) -> None:
    cost, models = ProfiledCostModel(make_profile()), ["one", "two"]
    requests = load.requests(cost, dict.fromkeys(models, AMPLE), seconds=20.0)
    assert [request.model for request in requests] == models * (len(requests) // 2)
    assert {request.output for request in requests} == {load.output}
    jobs = [Work.decode(model, 1.0, [load.prompt]) for model in models] * (load.output - 1)
    jobs += [Work.prefill(model, 1.0, [load.prompt]) for model in models]
    alone = sum(cost.seconds(job) + cost.engine_gap(job) for job in jobs) * len(requests) / 2
    assert alone / requests[-1].at == pytest.approx(load.busy, rel=0.2)


def test_a_load_has_enough_requests_and_not_too_many() -> None:
    cost, bounds = ProfiledCostModel(make_profile()), {"one": AMPLE, "two": AMPLE}
    for seconds, each in ((1e-3, FEWEST_REQUESTS), (1e6, MOST_REQUESTS)):
        assert len(Load(0.5, 24).requests(cost, bounds, seconds)) == 2 * each


def test_a_load_asks_no_more_than_every_model_can_take() -> None:
    """No request is longer than a context, and all of one model may wait at the same time."""
    cost = ProfiledCostModel(make_profile())
    for bounds in (Bounds(context=32, waiting=3), Bounds(context=200, waiting=1), Bounds(2, 8)):
        for load in LOADS:
            requests = load.requests(cost, {"one": AMPLE, "two": bounds}, seconds=1e6)
            assert max(request.prompt + request.output for request in requests) <= bounds.context
            assert len(requests) == 2 * min(bounds.waiting, MOST_REQUESTS)


def test_threads_and_children_are_known_by_their_pids() -> None:
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert code in descendants(os.getpid())[child.pid]
        assert 0.0 < all_threads_seconds(child.pid) < 60.0
        child.communicate(b"\n")


def test_a_main_threads_time_is_its_own() -> None:
    worked, over = threading.Event(), threading.Event()

    def work() -> None:
        while time.thread_time() < 0.05:
            pass
        worked.set()
        over.wait()

    pid = os.getpid()
    before = all_threads_seconds(pid), main_thread_seconds(pid)
    thread = threading.Thread(target=work)
    thread.start()
    worked.wait()
    all_spent, main_spent = all_threads_seconds(pid) - before[0], main_thread_seconds(pid) - before[1]
    over.set()
    thread.join()
    assert all_spent - main_spent > 0.04  # of the thread, which has lived 0.05 s


def test_busy_processes_rest_and_end_with_their_block() -> None:
    before = set(descendants(os.getpid()))
    with busy_processes(2) as crowd:
        busy = set(descendants(os.getpid())) - before
        assert busy == {process.pid for process in crowd.processes}
        crowd.rest()
        for process in crowd.processes:
            assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
        spent = crowd.wanted_seconds
        crowd.work()
        for process in crowd.processes:
            assert os.waitid(os.P_PID, process.pid, os.WCONTINUED) is not None
        while crowd.wanted_seconds < spent + 0.01:
            assert all(process.poll() is None for process in crowd.processes)
    assert not busy & set(descendants(os.getpid()))


def test_processes_that_work_for_a_part_of_the_time_want_cores_for_a_part_of_it() -> None:
    assert mean_excess(1, 1.0, 0) == mean_excess(2, 1.0, 1) == 1.0
    assert mean_excess(1, 0.5, 0) == 0.5
    assert mean_excess(2, 0.5, 0) == 1.0
    assert mean_excess(2, 0.5, 1) == 0.25  # while both work
    rng = random.Random(0)
    drawn = [max(0, sum(rng.random() < 0.3 for _ in range(5)) - 2) for _ in range(20_000)]
    assert mean_excess(5, 0.3, 2) == pytest.approx(sum(drawn) / len(drawn), rel=0.05)


@pytest.mark.parametrize("free", [0, 1, 7, 15])
def test_so_many_processes_want_what_is_to_be_measured(free: int) -> None:
    """What a job loses beside them is then hardly scaled, on machines of any size."""
    for over in (1, 2):
        count = processes_for(over, free)
        assert over <= mean_excess(count, BUSY_PART, free) < over + 1
        assert mean_excess(count - 1, BUSY_PART, free) < over

"""The CPU time that a machine spends besides jobs, and how it slows jobs, out of a profile's rows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvloom.plan.cost.cpu import SLOWEST, CpuCosts
from kvloom.plan.cost.profile import BesideLoop, CpuOverhead, MeasuredJob, Oversubscribed
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from tests.plan.cost.profiles import make_profile

PROFILE = make_profile()


def measured_job(model: str, phase: Phase, cores: int) -> MeasuredJob:
    return MeasuredJob(
        model=model, phase=phase, cores=cores, batch=4, tokens=4, drawn=4, pairs=400, context=396
    )


def oversubscribed(excess: int, times: float, model: str = "one") -> Oversubscribed:
    what = measured_job(model, Phase.DECODE, 2)
    return Oversubscribed(job=what, excess=excess, alone=0.01, seconds=0.01 * times)


def cpu_costs(*rows: Oversubscribed | BesideLoop | CpuOverhead, cores: int = 4) -> CpuCosts:
    return CpuCosts(
        replace(
            PROFILE,
            oversubscribed=tuple(row for row in rows if isinstance(row, Oversubscribed)),
            beside_loop=tuple(row for row in rows if isinstance(row, BesideLoop)),
            overheads=tuple(row for row in rows if isinstance(row, CpuOverhead)),
            computer=replace(PROFILE.computer, cores=cores),
        )
    )


def test_what_was_not_measured_costs_nothing() -> None:
    nothing, work = cpu_costs(), Work.decode("one", 0.5, [10])
    idle = CpuOverhead(role="gateway", request=0.0, prompt=0.0, token=0.0, turn=0.0)
    assert nothing.overhead("gateway") == idle
    assert nothing.slowdown(3.0) == 1.0
    assert nothing.speed_beside_loop(work, 2) == 1.0
    client = CpuOverhead(role="client", request=1.0, prompt=4.0, token=2.0, turn=3.0)
    rows = cpu_costs(client)
    assert (rows.overhead("client"), rows.overhead("gateway")) == (client, idle)


def test_slower_between_what_was_measured_and_beyond() -> None:
    found = cpu_costs(*(oversubscribed(excess, times) for excess, times in ((1, 2.0), (1, 3.0), (2, 4.0))))
    for excess, times in ((-1, 1.0), (0, 1.0), (0.5, 1.75), (1, 2.5), (1.5, 3.25), (2, 4.0), (4, 7.0)):
        assert found.slowdown(excess) == pytest.approx(times)


def test_jobs_are_slowed_as_most_jobs_are() -> None:
    found = cpu_costs(
        oversubscribed(1, 2.0), oversubscribed(1, 8.0, "two"), oversubscribed(1, 3.0), oversubscribed(2, 0.9)
    )
    assert found.slowdown(1) == 3.0
    assert found.slowdown(2) == 1.0  # faster than alone is noise


def test_a_job_loses_what_it_lost_of_the_loops_time() -> None:
    def beside_loop(seconds: float) -> BesideLoop:
        return BesideLoop(job=measured_job("one", Phase.PREFILL, 2), busy=0.01, alone=0.04, seconds=seconds)

    work = Work.prefill("one", 0.5, [10])
    for seconds, speed in ((0.04, 1.0), (0.03, 1.0), (0.0475, 0.25), (0.05, SLOWEST), (0.09, SLOWEST)):
        assert cpu_costs(beside_loop(seconds)).speed_beside_loop(work, 2) == pytest.approx(speed)


def test_a_job_keeps_the_speed_of_the_most_similar_job() -> None:
    def lost(model: str, phase: Phase, cores: int, part: float) -> BesideLoop:
        return BesideLoop(
            job=measured_job(model, phase, cores), busy=0.01, alone=0.04, seconds=0.04 + 0.01 * part
        )

    found = cpu_costs(
        lost("one", Phase.DECODE, 1, 0.2),
        lost("one", Phase.DECODE, 4, 0.8),
        lost("two", Phase.DECODE, 4, 0.5),
        lost("one", Phase.PREFILL, 4, 0.1),
    )
    for model, cores, part in (("one", 4, 0.8), ("one", 2, 0.2), ("two", 1, 0.5), ("three", 4, 0.65)):
        assert found.speed_beside_loop(Work.decode(model, 1.0, [10]), cores) == pytest.approx(1.0 - part)
    assert found.speed_beside_loop(Work.prefill("two", 1.0, [10]), 4) == pytest.approx(0.9)

"""What a machine does besides jobs, out of a profile's rows."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvloom.plan.cost.hosting import SLOWEST, Hosting
from kvloom.plan.cost.profile import HostedSeconds, JobMeasured, Pressed, ServedSeconds, StalledJob
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from tests.plan.cost.profiles import make_profile

PROFILE = make_profile()


def doing(model: str, phase: Phase, cores: int) -> JobMeasured:
    return JobMeasured(
        model=model, phase=phase, cores=cores, batch=4, tokens=4, drawn=4, pairs=400, context=396
    )


def pressed(model: str, phase: Phase, cores: int, over: int, times: float) -> Pressed:
    return Pressed(doing=doing(model, phase, cores), over=over, alone=0.01, seconds=0.01 * times)


def hosting(
    *rows: Pressed | StalledJob | HostedSeconds | ServedSeconds,
    cores: int = 4,
    closing: float = 0.0,
    pressing: float = 1.0,
) -> Hosting:
    return Hosting(
        replace(
            PROFILE,
            pressed=tuple(row for row in rows if isinstance(row, Pressed)),
            stalled=tuple(row for row in rows if isinstance(row, StalledJob)),
            hosted=tuple(row for row in rows if isinstance(row, HostedSeconds)),
            served=tuple(row for row in rows if isinstance(row, ServedSeconds)),
            computer=replace(PROFILE.computer, cores=cores),
            closing=closing,
            pressing=pressing,
        )
    )


def test_what_was_not_measured_costs_nothing() -> None:
    nothing, work = hosting(), Work.decode("one", 0.5, [10])
    idle = HostedSeconds(role="gateway", request=0.0, prompt=0.0, token=0.0, turn=0.0)
    assert nothing.upkeep("gateway") == idle
    assert nothing.slower(work, 2, 3.0) == 1.0
    assert nothing.pace(work, 2) == 1.0
    client = HostedSeconds(role="client", request=1.0, prompt=4.0, token=2.0, turn=3.0)
    rows = hosting(client)
    assert (rows.upkeep("client"), rows.upkeep("gateway")) == (client, idle)


def test_slower_between_what_was_measured_and_beyond() -> None:
    rows = [pressed("one", Phase.DECODE, 2, over, times) for over, times in ((1, 2.0), (1, 3.0), (2, 4.0))]
    found, work = hosting(*rows), Work.decode("one", 0.5, [10])
    for over, times in ((-1, 1.0), (0, 1.0), (0.5, 1.75), (1, 2.5), (1.5, 3.25), (2, 4.0), (4, 7.0)):
        assert found.slower(work, 2, over) == pytest.approx(times)
    assert found.slower(Work.prefill("one", 0.5, [10]), 2, 1) == 1.0  # no prefill was measured


def test_a_job_fares_as_its_likest() -> None:
    found = hosting(
        pressed("one", Phase.DECODE, 1, 1, 2.0),
        pressed("one", Phase.DECODE, 4, 1, 8.0),
        pressed("two", Phase.DECODE, 4, 1, 5.0),
    )
    assert found.slower(Work.decode("one", 1.0, [10]), 4, 1) == 8.0
    assert found.slower(Work.decode("one", 0.5, [10]), 2, 1) == 2.0
    assert found.slower(Work.decode("two", 0.25, [10]), 1, 1) == 5.0
    assert found.slower(Work.decode("three", 1.0, [10]), 4, 1) == 6.5


def test_jobs_lose_a_part_of_what_busy_processes_cost_them() -> None:
    rows = [pressed("one", Phase.DECODE, 2, over, times) for over, times in ((1, 2.0), (2, 5.0))]
    work = Work.decode("one", 0.5, [10])
    for pressing in (0.0, 0.25, 1.0):
        found = hosting(*rows, pressing=pressing)
        for over, lost in ((0.5, 0.5), (1.0, 1.0), (2.0, 4.0), (4.0, 8.0)):
            assert found.slower(work, 2, over) == pytest.approx(1.0 + pressing * lost)


def test_a_job_loses_what_it_lost_of_the_loops_time() -> None:
    def stalled(seconds: float) -> StalledJob:
        return StalledJob(doing=doing("one", Phase.PREFILL, 2), busy=0.01, alone=0.04, seconds=seconds)

    work = Work.prefill("one", 0.5, [10])
    for seconds, pace in ((0.04, 1.0), (0.03, 1.0), (0.0475, 0.25), (0.05, SLOWEST), (0.09, SLOWEST)):
        assert hosting(stalled(seconds)).pace(work, 2) == pytest.approx(pace)


def test_served_answers_take_longer() -> None:
    found = hosting(ServedSeconds(model="one", first=0.002, row=0.001, prompt=0.0001))
    assert (found.admission_delay("one"), found.admission_delay("two")) == (0.002, 0.0)
    assert found.served(Work.prefill("one", 0.5, [10, 20])) == pytest.approx(0.003)
    assert found.served(Work.decode("one", 0.5, [10] * 3)) == 0.003
    assert found.served(Work.decode("two", 0.5, [10])) == 0.0
    mixed = Work.of("one", Phase.MIXED, 0.5, np.array([1, 1, 20]), np.array([5, 5, 0]), 3, 2)
    assert found.served(mixed) == pytest.approx(2 * 0.001 + 20 * 0.0001)

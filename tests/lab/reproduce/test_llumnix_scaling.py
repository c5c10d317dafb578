"""Llumnix's scaling and its stress at small scale: who starts with what, and what is made of the runs."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.lab.reproduce.llumnix.point import Point, Times
from kvloom.lab.reproduce.llumnix.scaling import (
    LOADS,
    LOW,
    SWEPT,
    SYSTEMS,
    Load,
    Run,
    elastic,
    report_65,
    section_65,
)
from kvloom.lab.reproduce.llumnix.setup import MODEL, make_units
from kvloom.lab.reproduce.llumnix.stress import STRESSED, Central, section_66
from kvloom.lab.reproduce.llumnix.systems import OWN
from kvloom.lab.reproduce.report import Options
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.plan.cost.loading import LOADING, STARTING
from kvloom.plan.cost.shapes import find_shape
from tests.lab.reproduce.played import played, quiet


def test_a_system_begins_with_eight_instances_and_scales_by_its_own_load() -> None:
    for system in SYSTEMS:
        given = elastic(system, LOW, 16).rescheduling
        assert given is not None
        assert len(given.away) == 8
        [group] = given.groups.values()
        assert (len(group.units), group.scale.least, group.scale.most) == (16, 1, 16)
        assert (group.scale.low, group.scale.high, group.scale.seconds) == (160.0, 960.0, 10.0)
        assert (given.usage is None) == (system is OWN)


def test_an_instance_starts_when_its_weights_are_loaded() -> None:
    [unit] = make_units(1)
    assert unit.start == STARTING + find_shape(MODEL).weight_bytes / LOADING
    assert 15 < unit.start < 18


def test_all_systems_in_small() -> None:
    report = played(section_65)
    assert [cell.paper for cell in report.cells] == [9.1, 11.6, 4.1, 10.5]
    assert all(0 < cell.ours < 100 for cell in report.cells)
    assert [row[2] for row in report.grids[0].rows] == ["INFaaS++", "Llumnix", "kvloom"]
    swept = section_65("small", quiet, Options(thresholds=(5.0, 20.0), rates=(3.0,), requests=20))
    assert [row[:3:2] for row in swept.grids[0].rows][3:] == [("3 req/s", name) for name in NAMES]
    assert {row[1] for row in swept.grids[0].rows} == {"5", "20"}


NAMES = ("INFaaS++", "Llumnix", "kvloom")


def runs(load: Load, low: float, *found: tuple[float, float]) -> list[Run]:
    """Those of all systems, each with its P99 prefill and its instances."""
    some = Times(1.0, 2.0)
    points = [Point(Times(0.1, p99), some, some, 0.1, 5, 3, units) for p99, units in found]
    return [Run(load, system, point, low) for system, point in zip(SYSTEMS, points, strict=True)]


def test_what_is_saved_is_saved_at_the_same_p99() -> None:
    swept = [
        *runs(LOADS[0], LOW, (4.0, 10.0), (5.0, 9.0), (4.0, 9.0)),
        *runs(SWEPT, LOW, (40.0, 12.0), (20.0, 12.0), (90.0, 12.0)),
        *runs(SWEPT, 5, (900.0, 10.0), (80.0, 9.0), (95.0, 9.0)),
    ]
    report = report_65(swept)
    assert [claim.verdict for claim in report.claims] == ["fails", "holds", "fails", "holds"]
    assert report.claims[0].found == "INFaaS++'s over Llumnix's: 0.80 (2 req/s) to 2.00 (CV 4)"
    [saved] = [cell for cell in report.cells if cell.column == "% fewer instances"]
    assert (saved.row, saved.paper) == ("CV 4, Llumnix, at INFaaS++'s P99", 36.0)
    assert saved.ours == pytest.approx(100 * (1 - 10.5 / 12.0))  # half way between 20 and 80 s
    assert len(report.grids[0].rows) == len(swept)
    assert all(cell.column != "% fewer instances" for cell in report_65(swept[:6]).cells)


def test_steps_that_are_decided_in_one_place_wait_for_each_other() -> None:
    central = Central(lambda sequences: 0.001 * sequences)

    async def main() -> list[float]:
        stalls = [central.stall(2), central.stall(3)]
        await asyncio.sleep(0.004)
        return [*stalls, central.stall(1)]

    assert run_virtual(main()) == pytest.approx([0.002, 0.005, 0.002])
    assert central.stalls == pytest.approx([0.002, 0.005, 0.002])


def test_calls_are_metered_while_many_instances_are_asked() -> None:
    report = played(section_66)
    [row] = report.grids[0].rows
    assert len(row) == len(report.grids[0].heads)
    assert row[0] == "32"
    assert all(text.endswith("µs") and float(text[:-3]) > 0 for text in (row[1], row[2], row[7]))
    assert str(STRESSED) in report.title
    assert float(row[-3][:-3]) > 0
    assert float(row[-1][:-3]) > float(row[9][:-3])  # steps are longer where they are decided in one place

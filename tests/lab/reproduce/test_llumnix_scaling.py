"""Llumnix's scaling and its stress at small scale: who starts with what, and what is made of the runs."""

from __future__ import annotations

import pytest

from kvloom.lab.reproduce.llumnix.scaling import (
    LOADS,
    LOW,
    STRESSED,
    SWEPT,
    Load,
    Run,
    elastic,
    report_65,
    section_65,
    section_66,
)
from kvloom.lab.reproduce.llumnix.setup import INFAAS, LLUMNIX, MODEL, Point, Times, make_units
from kvloom.lab.sim.unit import LOADING, STARTING
from kvloom.plan.cost.shapes import find_shape
from tests.lab.reproduce.played import played


def test_a_system_begins_with_eight_instances_and_scales_by_its_own_load() -> None:
    for system in (INFAAS, LLUMNIX):
        given = elastic(system, LOW, 16).rescheduling
        assert given is not None
        assert len(given.away) == 8
        [group] = given.groups.values()
        assert (len(group.units), group.scale.least, group.scale.most) == (16, 1, 16)
        assert (group.scale.low, group.scale.high, group.scale.seconds) == (160.0, 960.0, 10.0)
        assert (given.usage is None) == (system is LLUMNIX)


def test_an_instance_starts_when_its_weights_are_loaded() -> None:
    [unit] = make_units(1)
    assert unit.start == STARTING + find_shape(MODEL).weight_bytes / LOADING
    assert 15 < unit.start < 18


def test_both_systems_in_small() -> None:
    report = played(section_65)
    assert [cell.paper for cell in report.cells] == [9.1, 11.6, 4.1, 10.5]
    assert all(0 < cell.ours < 100 for cell in report.cells)
    infaas, llumnix = report.grids[0].rows
    assert (infaas[2], infaas[-1]) == ("INFaaS++", "–")
    assert llumnix[2] == "Llumnix"


def run(load: Load, name: str, low: int, p99: float, units: float) -> Run:
    some = Times(1.0, 2.0)
    point = Point(Times(0.1, p99), some, some, 5, 3, units)
    return Run(load, {"i": INFAAS, "l": LLUMNIX}[name], point, low)


def test_what_is_saved_is_saved_where_p99_is_no_longer() -> None:
    runs = [
        run(LOADS[0], "i", LOW, 4.0, 10.0),
        run(LOADS[0], "l", LOW, 5.0, 9.0),
        run(SWEPT, "i", LOW, 60.0, 12.0),
        run(SWEPT, "l", LOW, 20.0, 12.5),
        run(SWEPT, "i", 40, 21.0, 16.0),
        run(SWEPT, "l", 40, 3.0, 15.0),
        run(SWEPT, "i", 5, 300.0, 10.0),
        run(SWEPT, "l", 5, 80.0, 9.5),
    ]
    report = report_65(runs)
    assert [claim.verdict for claim in report.claims] == ["fails", "fails"]
    assert "0.80 times as much at the least (2 req/s), 3.00 at the most (CV 4)" in report.claims[0].found
    saved = report.cells[-1]
    assert (saved.row, saved.paper) == ("CV 4, P99 no longer", 36.0)
    assert saved.ours == pytest.approx(100 * (1 - 12.5 / 16.0))
    assert len(report.grids[0].rows) == len(runs)
    assert "P99 no longer" not in report_65(runs[:4]).cells[-1].row


def test_calls_are_metered_while_many_instances_are_asked() -> None:
    report = played(section_66)
    [row] = report.grids[0].rows
    assert len(row) == len(report.grids[0].heads)
    assert row[0] == "32"
    assert all(text.endswith("µs") and float(text[:-3]) > 0 for text in (row[1], row[2], row[7]))
    assert str(STRESSED) in report.title

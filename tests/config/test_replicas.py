"""`replicas` of a unit: a number, or a range that the fleet scheduler keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.types.service import GroupSpec, Scale
from tests.config.configs import load, refused

M = "models: {a: model}\n"
RANGE = "{least: 0, most: 3, low: 10, high: 20.5, seconds: 5s, idle: 30s}"


def test_a_range(folder: Path) -> None:
    """Memory is there for all that there may be; one at least begins."""
    config = load(folder, f"{M}units: [{{models: [a], replicas: {RANGE}}}, {{models: [a], replicas: 2}}]")
    assert [engine.unit for engine in config.engines] == [f"unit-{number}" for number in range(5)]
    assert {engine.kv_bytes for engine in config.engines} == {(1 << 30) // 5}
    scale = Scale(0, 3, 10, 20.5, 5, 30)
    assert config.groups == {"units.0": GroupSpec(("unit-0", "unit-1", "unit-2"), scale)}
    assert config.first == ("unit-0", "unit-3", "unit-4")


def test_defaults(folder: Path) -> None:
    config = load(folder, M + "units: [{models: [a], replicas: {most: 2}}]")
    assert config.groups["units.0"].scale == Scale(1, 2)
    config = load(folder, M + "units: [{models: [a], replicas: {least: 2, most: 4}}]")
    assert config.first == ("unit-0", "unit-1")
    config = load(folder, M + "units: [{models: [a], replicas: {least: 2, most: 2}}]")
    assert not config.groups


def test_a_single_unit_that_comes_and_goes_needs_a_scheduler(folder: Path) -> None:
    units = "units: [{models: [a], replicas: {least: 0, most: 1}}]"
    assert load(folder, M + units).scheduler
    assert load(folder, M + "units: [{models: [a]}]").scheduler is None


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("{least: 2, most: 1}", "2 to 1 replicas; 0 ≤ least ≤ most and 1 ≤ most are right"),
        ("{most: 0}", "units.0.replicas.most: 0; 1 or more is right"),
        ("{most: 65}", "units.0.replicas.most: 65; 64 or less is right"),
        ("{least: -1, most: 1}", "units.0.replicas.least: -1; 0 or more is right"),
        ("{least: yes, most: 1}", "units.0.replicas.least: 'true'; a number is right"),
        ("{least: 1}", "units.0.replicas.most: is missing"),
        ("{most: 2, idel: 3}", "units.0.replicas.idel: unknown key; did you mean `idle`?"),
        ("{most: 2, low: 900, high: 100}", "units.0.replicas: low 900 and high 100; low < high is right"),
        ("{most: 2, idle: 0s}", "units.0.replicas.idle: 0 s; 1 s to 3600 s is right"),
        ("many", "units.0.replicas: 'many'; a number, or a mapping with `least` and `most`, is right"),
        ("", "units.0.replicas: nothing; a number, or a mapping"),
        ("{most: 65, least: 65}", "units.0.replicas.least: 65; 64 or less is right (and 1 more error)"),
    ],
)
def test_what_cannot_be(folder: Path, replicas: str, message: str) -> None:
    assert message in refused(folder, f"{M}units: [{{models: [a], replicas: {replicas}}}]")


def test_a_range_that_nobody_keeps(folder: Path) -> None:
    message = refused(folder, M + "rescheduling: none\nunits: [{models: [a], replicas: {most: 2}}]")
    assert "units.0.replicas: a range, which needs rescheduling" in message

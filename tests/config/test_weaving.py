"""The key `weave`: who may lend to whom."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvloom.types.spec import WeaveSpec
from tests.config.configs import AB, MACHINE, load, refused

UNITS = AB + "units: [{models: [a]}, {models: [b]}, {models: [a, b]}]\n"
RANKS = UNITS.replace("{models: [b]}", "{models: [b], tensor_parallel: 2}")
ON_GPUS = "kv_memory: 3GiB\n" + UNITS.replace("{models: [a]}", "{models: [a], device: cuda}").replace(
    "[a, b]}", "[a, b], device: cuda}"
)
SIX_CORES = dataclasses.replace(MACHINE, cores=6)


def woven(folder: Path, text: str, gpus: int = 0) -> list[WeaveSpec | None]:
    config = load(folder, text, machine=dataclasses.replace(SIX_CORES, gpus=gpus))
    return [engine.weave for engine in config.engines]


def test_the_hot_unit_is_told_of_whom_to_borrow(folder: Path) -> None:
    assert woven(folder, UNITS) == [None] * 3
    assert woven(folder, UNITS + "weave: [{hot: unit-0, cold: unit-2}]") == [
        WeaveSpec("unit-2", 0.45, 0.3),
        None,
        None,
    ]
    adapts = "weave: [{hot: unit-0, cold: unit-1, share: auto, bound: 0.1}]"
    assert woven(folder, UNITS + adapts)[0] == WeaveSpec("unit-1", "auto", 0.3, 0.1)
    baseline = "weave: [{hot: unit-0, cold: unit-1, control: iterations, split: none, waits: 0.02}]"
    assert woven(folder, UNITS + baseline)[0] == WeaveSpec(
        "unit-1", 0.45, 0.3, control="iterations", split="none", waits=0.02
    )
    several = "weave: [{hot: unit-0, cold: [unit-2, unit-1]}]"
    assert woven(folder, UNITS + several)[0] == WeaveSpec("unit-2", 0.45, 0.3, others=("unit-1",))
    both = "weave: [{hot: unit-0, cold: unit-1, share: 0}, {hot: unit-1, cold: unit-0, part: 1}]"
    assert woven(folder, UNITS + both)[:2] == [WeaveSpec("unit-1", 0.0, 0.3), WeaveSpec("unit-0", 0.45, 1.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weave: [{hot: unit-0}]", ["weave.0.cold"]),
        ("weave: []", ["weave"]),
        ("weave: [{hot: unit-0, cold: unit-1, shares: 1}]", ["weave.0.shares", "`share`"]),
        ("weave: [{hot: unit-0, cold: unit-1, share: 2}]", ["weave.0.share: 2", "0 to 1, or `auto`"]),
        ("weave: [{hot: unit-0, cold: unit-1, share: yes}]", ["weave.0.share: True", "0 to 1, or `auto`"]),
        ("weave: [{hot: unit-0, cold: unit-1, bound: 0}]", ["weave.0.bound"]),
        ("weave: [{hot: unit-0, cold: unit-1, waits: 2}]", ["weave.0.waits"]),
        ("weave: [{hot: unit-0, cold: unit-1, control: host}]", ["weave.0.control", "iterations"]),
        ("weave: [{hot: unit-0, cold: unit-1, split: 5}]", ["weave.0.split", "none"]),
        ("weave: [{hot: unit-0, cold: unit-1, part: 0}]", ["weave.0.part"]),
        ("weave: [{hot: unit-0, cold: unit-7}]", ["weave.0.cold", "no unit 'unit-7'"]),
        ("weave: [{hot: a, cold: unit-1}]", ["weave.0.hot", "no unit 'a'"]),
        ("weave: [{hot: unit-0, cold: unit-0}]", ["weave.0.cold", "lend to itself"]),
        ("weave: [{hot: unit-0, cold: []}]", ["weave.0.cold"]),
        ("weave: [{hot: unit-0, cold: [unit-1, unit-0]}]", ["weave.0.cold", "lend to itself"]),
        ("weave: [{hot: unit-0, cold: [unit-1, unit-1]}]", ["unit-1 is cold twice"]),
        ("weave: [{hot: unit-2, cold: unit-0}]", ["weave.0.hot", "has 2 models"]),
        ("weave: [{hot: unit-0, cold: unit-2}, {hot: unit-1, cold: unit-2}]", ["unit-2 is cold twice"]),
        ("transport: nixl\nweave: [{hot: unit-0, cold: unit-1}]", ["weave.0.hot", "transport shm"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(folder: Path, text: str, words: list[str]) -> None:
    message = refused(folder, UNITS + text, machine=SIX_CORES)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("units", "cold", "gpus", "said"),
    [
        (RANKS, "unit-1", 0, "unit-1; a unit of one rank, with the transport shm, is right"),
        (ON_GPUS, "unit-1", 1, "unit-1 is on cpu, unit-0 on cuda:0; two CPU units, or two GPU units"),
    ],
)
def test_units_that_are_too_unlike_cannot_weave(
    folder: Path, units: str, cold: str, gpus: int, said: str
) -> None:
    machine = dataclasses.replace(SIX_CORES, gpus=gpus)
    message = refused(folder, units + f"weave: [{{hot: unit-0, cold: {cold}}}]", machine=machine)
    assert f"weave.0.cold: {said}" in message


@pytest.mark.parametrize(("gpus", "lender"), [(1, "cuda:0"), (2, "cuda:1")])
def test_two_gpu_units_can_weave(folder: Path, gpus: int, lender: str) -> None:
    """Whether two GPUs reach each other's memory is asked on the machine, when the hot unit starts."""
    found = woven(folder, ON_GPUS + "weave: [{hot: unit-0, cold: unit-2}]", gpus=gpus)
    assert found[0] == WeaveSpec("unit-2", 0.45, 0.3, gpus=(lender,))

"""The key `weave`: who may lend to whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.types.errors import ConfigError
from kvloom.types.spec import WeaveSpec

UNITS = "models: {a: ./model, b: ./model}\nunits: [{models: [a]}, {models: [b]}, {models: [a, b]}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "fleet.yaml"


def woven(file: Path, text: str, machine: Machine | None = None) -> list[WeaveSpec | None]:
    file.write_text(text)
    config = load_config(file, {}, {}, machine or Machine(cores=6, memory=3 << 30))
    return [engine.weave for engine in config.engines]


def test_the_hot_unit_is_told_of_whom_to_borrow(file: Path) -> None:
    assert woven(file, UNITS) == [None] * 3
    assert woven(file, UNITS + "weave: [{hot: unit-0, cold: unit-2}]") == [
        WeaveSpec("unit-2", 0.45, 0.3),
        None,
        None,
    ]
    adapts = "weave: [{hot: unit-0, cold: unit-1, share: auto, bound: 0.1}]"
    assert woven(file, UNITS + adapts)[0] == WeaveSpec("unit-1", "auto", 0.3, 0.1)
    baseline = "weave: [{hot: unit-0, cold: unit-1, control: iterations, split: none, waits: 0.02}]"
    assert woven(file, UNITS + baseline)[0] == WeaveSpec(
        "unit-1", 0.45, 0.3, control="iterations", split="none", waits=0.02
    )
    both = "weave: [{hot: unit-0, cold: unit-1, share: 0}, {hot: unit-1, cold: unit-0, part: 1}]"
    assert woven(file, UNITS + both)[:2] == [WeaveSpec("unit-1", 0.0, 0.3), WeaveSpec("unit-0", 0.45, 1.0)]


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
        ("weave: [{hot: unit-2, cold: unit-0}]", ["weave.0.hot", "has 2 models"]),
        ("weave: [{hot: unit-0, cold: unit-2}, {hot: unit-1, cold: unit-2}]", ["unit-2 is cold twice"]),
        ("transport: nixl\nweave: [{hot: unit-0, cold: unit-1}]", ["weave.0.hot", "transport shm"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(file: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        woven(file, UNITS + text)
    assert "\n" not in error.value.message
    for word in words:
        assert word in error.value.message


def test_a_unit_of_ranks_cannot_weave(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"weave\.0\.cold: unit-1; a unit of one rank"):
        woven(
            file,
            UNITS.replace("{models: [b]}", "{models: [b], tensor_parallel: 2}")
            + "weave: [{hot: unit-0, cold: unit-1}]",
        )


GPUS = "kv_memory: 3GiB\n" + UNITS.replace("{models: [a]}", "{models: [a], device: cuda}").replace(
    "[a, b]}", "[a, b], device: cuda}"
)


def test_two_gpu_units_can_weave_and_a_gpu_with_a_cpu_cannot(file: Path) -> None:
    machine = Machine(cores=6, memory=3 << 30, gpus=1)
    assert woven(file, GPUS + "weave: [{hot: unit-0, cold: unit-2}]", machine)[0] == WeaveSpec(
        "unit-2", 0.45, 0.3
    )
    with pytest.raises(
        ConfigError, match=r"weave\.0\.cold: unit-1 is on cpu, unit-0 on cuda:0; two CPU units"
    ):
        woven(file, GPUS + "weave: [{hot: unit-0, cold: unit-1}]", machine)
    two = Machine(cores=6, memory=3 << 30, gpus=2)
    with pytest.raises(ConfigError, match=r"unit-2 is on cuda:1, unit-0 on cuda:0; two units of one GPU"):
        woven(file, GPUS + "weave: [{hot: unit-0, cold: unit-2}]", two)

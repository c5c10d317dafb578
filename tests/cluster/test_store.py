"""A controller that starts anew goes on with what was kept, or says why it cannot and touches nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import Answered
from kvloom.cluster.state import FleetSpec, UnitSpec
from kvloom.cluster.store import SpecFile
from kvloom.types.errors import ConfigError
from tests.cluster.histories import ModelledHost, StillClock, engine

SPEC = FleetSpec(units={"a": UnitSpec(engine=engine("a"))})


def test_the_next_controller_goes_on(tmp_path: Path) -> None:
    host, file = ModelledHost(random.Random(0)), SpecFile(tmp_path / "fleet.json")
    first = Controller(SPEC, host, StillClock(), store=file)
    first.step()
    host.there["a"].phase = "ready"
    first.hear(Answered("a"))
    first.edit(Edit(units={"a": UnitEdit(drained=True), "b": UnitEdit(engine=engine("b"))}))
    second = Controller(SPEC, host, StillClock(), store=file)
    assert second.spec == first.spec
    assert second.snapshot.seq > first.snapshot.seq
    assert second.status.processes["a"].phase == "ready"
    second.step()
    assert [*host.there] == ["a", "gateway/1", "b"]
    assert [file.name for file in tmp_path.iterdir()] == ["fleet.json"]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b'{"version":1,"life":1,"spec":{"un', "cut short, or no fleet's file"),
        (b'{"version":1,"life":1}', "cut short, or no fleet's file"),
        (b"", "cut short, or no fleet's file"),
        (b'{"version":2,"fleets":[]}', "a fleet of version 2; version 1 is right"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_touched(
    tmp_path: Path, said: bytes, problem: str
) -> None:
    (tmp_path / "fleet.json").write_bytes(said)
    host = ModelledHost(random.Random(0))
    host.start("a", 1, None)
    with pytest.raises(ConfigError, match=problem) as refused:
        Controller(SPEC, host, StillClock(), store=SpecFile(tmp_path / "fleet.json"))
    assert "\n" not in refused.value.message
    assert {name: one.phase for name, one in host.there.items()} == {"a": "starting"}
    assert (tmp_path / "fleet.json").read_bytes() == said

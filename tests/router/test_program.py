"""How programs are named, brought along and given options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvloom.router.program import load_program
from kvloom.router.programs import PROGRAMS
from kvloom.types.errors import ConfigError
from tests.router.fleets import ask_well, body, routed

OWN = """
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.router import Call, Fleet, Frames


async def mine(call: Call, fleet: Fleet, *, first: str, often: int = {often}) -> Frames:
    [replica] = [one for one in fleet.up if one.name == first]
    for _ in range(often - 1):
        await call.prep_recv(fleet.turn(), end=-1)
    async for frame in call.start_generate(replica):
        yield frame


async def late(call, fleet, *, strange: Unheard):
    yield []


async def narrow(call):
    yield []


async def keywords(*, call, fleet):
    yield []


async def returns(call, fleet):
    return []


def plain(call, fleet):
    return call.start_generate(fleet.turn())
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    file = tmp_path / "own_programs.py"
    file.write_text(OWN.format(often=1), "utf-8")
    (tmp_path / "broken_programs.py").write_text("async def mine(call, fleet):\n  yield\n 1 +", "utf-8")
    (tmp_path / "ending_programs.py").write_text("raise SystemExit(3)", "utf-8")
    return file


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_shipped_needs_no_option(name: str) -> None:
    program = load_program(name)
    assert (program.name, program.options) == (name, {})


@pytest.mark.parametrize(
    ("name", "options", "made"),
    [
        ("disaggregate", {"prefill": 2}, {"prefill": 2}),
        ("disaggregate", {"prefill": "2"}, {"prefill": 2}),
        ("balanced", {"ratio": "0.2", "prefill": 1}, {"ratio": 0.2, "prefill": 1}),
        ("balanced", {"ratio": None}, {"ratio": None}),
        ("cache_aware", {"slack": 0}, {"slack": 0}),
    ],
)
def test_options(name: str, options: dict[str, Any], made: dict[str, Any]) -> None:
    assert load_program(name, options).options == made


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("disagregate", {}, "program: 'disagregate' is not known; data_parallel, least_loaded"),
        ("", {}, "'' is not known"),
        (":mine", {}, "':mine' is not known"),
        ("own_programs:", {}, "'own_programs:' is not known"),
        ("data_parallel", {"prefill": 1}, "data_parallel has no option prefill; it has none"),
        ("disaggregate", {"decode": 1}, "disaggregate has no option decode; it has prefill"),
        (
            "disaggregate",
            {"prefill": 0},
            "disaggregate: option prefill: 0; a whole number of 1 or more is right",
        ),
        ("disaggregate", {"prefill": "many"}, "option prefill: 'many'; a whole number of 1 or more is right"),
        ("balanced", {"ratio": 1.5}, "balanced: option ratio: 1.5; a number from 0 to 1 is right"),
        ("balanced", {"ratio": "abc"}, "balanced: option ratio: 'abc'; a number from 0 to 1 is right"),
        ("disaggregate", {"call": 1}, "disaggregate has no option call"),
        ("nowhere_at_all:mine", {}, "nowhere_at_all cannot be imported: ModuleNotFoundError"),
        ("own_programs:yours", {}, "own_programs has no yours"),
        ("own_programs:returns", {}, "own_programs:returns is no async generator function"),
        ("own_programs:plain", {}, "own_programs:plain is no async generator function"),
        ("own_programs:narrow", {}, "own_programs:narrow takes other arguments"),
        ("own_programs:keywords", {}, "own_programs:keywords takes other arguments"),
        ("own_programs:late", {"strange": 1}, "the type of an option is unknown: name 'Unheard'"),
        ("own_programs:mine", {}, "own_programs:mine needs the option first"),
        ("own_programs:mine", {"first": "a", "often": "x"}, "option often: 'x'; a whole number is right"),
        ("broken_programs:mine", {}, "broken_programs cannot be imported: IndentationError"),
        ("ending_programs:mine", {}, "ending_programs cannot be imported: SystemExit: 3"),
    ],
)
def test_what_cannot_be_a_program(own: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_program(name, options)
    assert message in error.value.message
    assert "\n" not in error.value.message


async def test_a_program_of_ones_own(own: Path) -> None:
    async with routed(2, "own_programs:mine", first="b") as fleets:
        for _ in range(3):
            await ask_well(fleets.router, body())
        assert {call.unit for call in fleets.journal} == {"b"}


async def test_an_edited_program_counts(own: Path) -> None:
    async with routed(2, "own_programs:mine", first="b") as fleets:
        old = fleets.router.program
        own.write_text(OWN.format(often=3), "utf-8")  # noqa: ASYNC240
        fleets.router.set_program(load_program("own_programs:mine", {"first": "b"}))
        await ask_well(fleets.router, body())
        assert [call.verb for call in fleets.journal] == ["prep_recv", "prep_recv", "start_generate"]
        fleets.journal.clear()
        fleets.router.set_program(old)
        await ask_well(fleets.router, body())
        assert [call.verb for call in fleets.journal] == ["start_generate"]


def test_what_is_installed_is_not_read_anew() -> None:
    before = sys.modules["msgspec"]
    with pytest.raises(ConfigError, match="msgspec:Meta is no async generator function"):
        load_program("msgspec:Meta")
    assert sys.modules["msgspec"] is before


def test_what_runs_here_is_not_read_anew() -> None:
    before = sys.modules["kvloom.types.errors"]
    with pytest.raises(ConfigError, match="no async generator function"):
        load_program("kvloom.types.errors:BadRequest")
    assert sys.modules["kvloom.types.errors"] is before

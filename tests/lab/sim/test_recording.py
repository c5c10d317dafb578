"""Runs that a page plays: bounded, the same as without it, and with each fault in them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvloom.cli.__main__ import main
from kvloom.journal.records import Fault, Lost, Record
from kvloom.journal.samples import ModelTotals, Sample
from kvloom.lab.faults.chaos import run_seed
from kvloom.lab.faults.faults import Fault as FaultDrawn
from kvloom.lab.faults.recorded import told_as
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.sim.recording import MOST_RECORDS, STEP, Recording
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.lab.workload.results import read_results
from kvloom.plan.plan import write_plan
from tests.lab.sim.test_sleeping import WORKLOAD, budgeted

FAULTY = (6, 7, 8, 11, 17)
"""Seeds whose faults are of all kinds."""


class Run(msgspec.Struct):
    """What a page has of a run."""

    title: str
    samples: list[Sample]
    records: list[Record]


def played(page: Path) -> Run:
    _, _, rest = page.read_text().partition('<script type="application/json" id="recording">')
    return msgspec.json.decode(rest.partition("</script>")[0], type=Run)


def test_a_page_has_the_run_that_the_results_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traffic.yaml").write_text(WORKLOAD)
    write_plan(Path("plan.json"), budgeted(24 * 10**9))
    given = ["simulate", "plan.json", "--workload", "traffic.yaml"]
    assert main([*given, "--json", "out.json", "--journal", "a.jsonl", "--page", "out.html"]) == 0
    assert main([*given, "--json", "without.json", "--journal", "b.jsonl"]) == 0
    assert Path("out.json").read_bytes() == Path("without.json").read_bytes()
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    run, results = played(Path("out.html")), read_results(Path("out.json"))
    assert run.title == "turns on plan.json, simulated"
    kept = [record for record in run.records if record.component != "recording"]
    assert kept == [
        msgspec.json.decode(line, type=Record) for line in Path("a.jsonl").read_bytes().splitlines()
    ]
    last = run.samples[-1]
    assert {unit.unit for unit in last.units} == {unit.unit for unit in run.samples[0].units}
    assert all(unit.blocks > 0 and unit.models for unit in last.units)
    assert sum(model.requests for model in last.models) == results.total.requests
    ats = [sample.at for sample in run.samples]
    assert ats == sorted(set(ats))


@pytest.mark.parametrize("seed", FAULTY)
def test_a_replayed_run_is_the_same_with_a_page_and_has_its_faults(seed: int) -> None:
    plain, recorded = run_seed(seed), run_seed(seed, journal=True)
    assert plain.counts == recorded.counts
    assert not recorded.broken
    faults = [record for record in recorded.records if isinstance(record.event, Fault)]
    drawn = draw_scenario(seed).faults
    assert drawn
    due = sorted(fault.at for fault in drawn for _ in told_as(fault))
    late = {round(record.at - at, 5) for record, at in zip(faults, due, strict=True)}
    assert len(late) == 1  # all times count from when the fleet was there
    assert all(record.component and record.event.reason for record in faults)  # type: ignore[union-attr]
    assert recorded.recording.samples


def test_the_faults_of_those_seeds_are_of_all_kinds() -> None:
    drawn = {type(fault) for seed in FAULTY for fault in draw_scenario(seed).faults}
    assert drawn == set(get_args(FaultDrawn))


def test_chaos_writes_a_page_with_the_fault_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", "--replay", "8", "--page", "out.html", "--journal", "j.jsonl"]) == 0
    run = played(Path("out.html"))
    lines = [msgspec.json.decode(line, type=Record) for line in Path("j.jsonl").read_bytes().splitlines()]
    for records in (run.records, lines):
        assert any(isinstance(record.event, Fault) for record in records)
    assert main(["chaos", "--replay", "3", "--page", "nowhere/out.html"]) != 0
    assert "no such folder" in capsys.readouterr().err


def test_a_long_run_is_thinned_evenly_and_says_so() -> None:
    recording = Recording(most=100)
    record = Record(
        journal=0, number=1, at=1.0, component="unit-0", event=Lost(count=1, reason="for the test")
    )
    recording.keep([record] * (MOST_RECORDS + 5))

    async def busy() -> None:
        recording.begin(lambda at, totals: Sample(at=at, units=(), models=totals))
        clock = LoopClock(asyncio.get_running_loop())
        for _ in range(4000):
            await clock.sleep(STEP / 2)

    run_virtual(busy())
    ats = [sample.at for sample in recording.samples]
    assert 50 <= len(ats) <= 100
    assert recording.apart > STEP
    assert {round(later - sooner, 6) for sooner, later in pairwise(ats)} == {recording.apart}
    assert (ats[0], len(recording.records)) == (0.0, MOST_RECORDS + 2)
    told = [one.event for one in recording.records[-2:]]
    assert all(isinstance(event, Lost) for event in told)
    assert [event.count for event in told] == [5, recording.taken - len(ats)]  # type: ignore[union-attr]


def test_while_nothing_happens_there_is_no_sample_but_the_first_and_the_last() -> None:
    recording = Recording()

    async def idle() -> None:
        recording.begin(lambda at, totals: Sample(at=at, units=(), models=totals))
        await asyncio.sleep(STEP * 10.5)
        await asyncio.sleep(STEP * 100)

    run_virtual(idle())
    assert [round(sample.at / STEP) for sample in recording.samples] == [0, 10, 11, 110]


def test_totals_are_those_of_what_was_answered() -> None:
    recording = Recording()
    ask = WorkloadRequest(at=0.0, model="m", prompt=4, output=3)
    recording.answered(RequestResult(request=ask, first=0.5, end=1.5, tokens=3))
    recording.answered(RequestResult(request=ask, first=None, end=None, tokens=0, error="refused"))
    seen: list[tuple[ModelTotals, ...]] = []

    def take(at: float, totals: tuple[ModelTotals, ...]) -> Sample:
        seen.append(totals)
        return Sample(at=at, units=(), models=totals)

    async def once() -> None:
        recording.begin(take)
        await asyncio.sleep(1)

    run_virtual(once())
    assert seen[0] == (
        ModelTotals(model="m", requests=2, ttft_sum=0.5, ttft_count=1, tpot_sum=0.5, tpot_count=1),
    )

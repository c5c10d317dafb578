"""The journal of fleets in virtual time: it tells what the counters count."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvloom.cli.__main__ import main
from kvloom.engine.engine import Engine
from kvloom.journal.records import Moved, Preempted, Record, Slept, Stayed, Woken
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.journal import Journal
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import FaultSimulation, Parts
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.results import read_results
from kvloom.plan.plan import write_plan
from tests.lab.sim.test_sleeping import WORKLOAD, budgeted

SEEDS = (3, 5, 21, 33, 48, 60)


def test_the_journal_of_a_run_with_faults_tells_what_the_counters_count() -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        counted, records = run_virtual(played(seed), seed=seed)
        told = Counter[str]()
        for record in records:
            if isinstance(record.event, Moved | Stayed | Preempted):
                told[str(record.event.__struct_config__.tag)] += 1
                assert record.event.reason
        assert told == +counted, seed
        total += told
    assert min(total["moved"], total["preempted"]) > 0, total


async def played(seed: int) -> tuple[Counter[str], list[Record]]:
    engines: list[Engine] = []

    class Host(FaultyHost):
        """It remembers all engines that it ever had."""

        def start(self) -> None:
            super().start()
            assert self.process is not None
            engines.append(self.process.engine)

    clock = LoopClock(asyncio.get_running_loop())
    lines = Journal(clock, kept=False)
    simulation = FaultSimulation(draw_scenario(seed), clock, lines, Parts(host=Host))
    await simulation.start()
    await simulation.play(600.0)
    simulation.calm()
    await simulation.close()
    counted = Counter(moved=lines.counts["moved by pairs"])
    for engine in engines:
        load = await engine.load()
        counted["preempted"] += sum(model.preemptions_total for model in load.models.values())
    records = simulation.records.since(0)
    refused = sum(isinstance(record.event, Stayed) for record in records)
    assert refused <= lines.counts["moves refused"]  # those that an order has refused are not the fleet's
    counted["stayed"] = refused
    assert simulation.records.first == 0
    return counted, records


def test_the_journal_of_a_simulation_tells_each_wake_and_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traffic.yaml").write_text(WORKLOAD)
    write_plan(Path("plan.json"), budgeted(24 * 10**9))
    given = ["--workload", "traffic.yaml", "--json", "out.json", "--journal", "journal.jsonl"]
    assert main(["simulate", "plan.json", *given]) == 0
    results = read_results(Path("out.json"))
    assert results.fleet_events is not None
    assert results.fleet_events.slept is not None
    records = [
        msgspec.json.decode(line, type=Record) for line in Path("journal.jsonl").read_bytes().splitlines()
    ]
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    woken = [record for record in records if isinstance(record.event, Woken)]
    slept = [record.event for record in records if isinstance(record.event, Slept)]
    assert len(woken) == results.fleet_events.slept.wakes
    assert sum(event.reason != "the unit stops" for event in slept) == results.fleet_events.slept.sleeps
    assert all("blocks" in record.event.reason for record in woken if isinstance(record.event, Woken))


def test_a_journal_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", "--replay", "1", "--journal", "nowhere/journal.jsonl"]) == 2
    assert "nowhere/journal.jsonl: no such folder;" in capsys.readouterr().err
    assert main(["chaos", "--replay", "1", "--journal", "journal.jsonl"]) == 0
    assert Path("journal.jsonl").read_bytes().startswith(b'{"journal":0,"number":1,')


def test_a_journal_that_cannot_be_written_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traffic.yaml").write_text(WORKLOAD)
    write_plan(Path("plan.json"), budgeted(24 * 10**9))
    given = ["simulate", "plan.json", "--workload", "traffic.yaml"]
    with at_most(1000):
        assert main([*given, "--journal", "journal.jsonl"]) == 2
    told = capsys.readouterr()
    assert "--journal: journal.jsonl: File too large;" in told.err
    assert "turns on plan.json, simulated" in told.out
    with at_most(200):
        assert main(["chaos", "--replay", "3", "--journal", "journal.jsonl"]) == 2
    assert "--journal: journal.jsonl: File too large;" in capsys.readouterr().err


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process may be larger meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("taken", ["traffic.yaml", "plan.json", "out.json"])
def test_a_journal_is_no_other_file_of_the_run(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traffic.yaml").write_text(WORKLOAD)
    write_plan(Path("plan.json"), budgeted(24 * 10**9))
    before = [Path(name).read_bytes() for name in ("traffic.yaml", "plan.json")]
    given = ["simulate", "plan.json", "--workload", "traffic.yaml", "--json", "out.json"]
    assert main([*given, "--journal", f"./{taken}"]) == 2
    assert f"{taken}: this file is named twice" in capsys.readouterr().err
    assert [Path(name).read_bytes() for name in ("traffic.yaml", "plan.json")] == before

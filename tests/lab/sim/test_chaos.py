"""Runs with faults: those that CI plays, and that each can be played again."""

from __future__ import annotations

import multiprocessing
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from kvloom.lab.faults import chaos as chaos_runs
from kvloom.lab.faults.chaos import Verdict, chaos, run_quietly, run_scenario, verdicts
from kvloom.lab.faults.faults import (
    ControllerLoss,
    Death,
    GatewayLoss,
    NodeOutage,
    Order,
    Relocation,
    Replan,
    RollingRestart,
    SchedulerLoss,
    Switch,
    UnitAdded,
    UnitRemoved,
)
from kvloom.lab.faults.scenario import PROGRAMS as DRAWN
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import Parts
from kvloom.router.programs import PROGRAMS
from kvloom.types.spec import Policy
from tests.lab.sim.breakers import ShortWire


def test_300_seeds_keep_the_laws() -> None:
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()  # by pairs, in runs with each of these
    for verdict in verdicts(range(300), jobs=2):
        assert not verdict.broken, (verdict.seed, *map(str, verdict.broken))
        counts.update(verdict.counts)
        moved.update(dict.fromkeys(verdict.counts, verdict.counts["moved by pairs"]))
    for what in (
        "requests ended", "requests failed", "requests left", "requests lost", "jobs failed", "calls harmed",
        "engines killed", "engines stopped", "gateways lost", "programs switched", "orders",
        "schedulers lost", "moved by order", "moves refused", "choices stopped", "rolling restarts",
        "controllers lost", "nodes cut off", "nodes lost",
        "units replanned", "units added", "units removed", "requests guided", "steps offloaded",
    ):  # fmt: skip
        assert counts[what] > 20, what
    assert min(counts["units started"], counts["units ended"]) > 10
    assert counts["moved by pairs"] > 200
    for beside in ("calls harmed", "engines killed", "gateways lost", "units started"):
        assert moved[beside] > 15, beside
    assert counts["requests ended"] > counts["requests failed"]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(3969, id="a send whose caller was gone gave its pages back while a job still fed it"),
        pytest.param(9780, id="a request was sent on to a unit that no longer serves its model"),
    ],
)
def test_seeds_that_once_broke_a_law_keep_it(seed: int) -> None:
    assert not run_quietly(seed).broken


def test_control_c_never_reaches_the_processes_that_play() -> None:
    """It is blocked from before they are anything, and heard here again once they are started."""
    found = verdicts(range(4), jobs=2)
    next(found)
    masks = [
        int(line.split()[1], 16)
        for child in multiprocessing.active_children()
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        if line.startswith("SigBlk:")
    ]
    for _ in found:
        pass
    assert masks
    assert all(mask >> (signal.SIGINT - 1) & 1 for mask in masks)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_seed_is_the_same_run_wherever_it_is_played() -> None:
    """In this process again, and in another, whose strings have other hashes."""
    here = {seed: run_quietly(seed, journal=True) for seed in (7, 21)}
    for seed, verdict in here.items():
        assert run_quietly(seed, journal=True) == verdict
        assert len(verdict.lines) > 50
        done = subprocess.run(
            [sys.executable, "-m", "kvloom.cli", "chaos", "--replay", str(seed)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.splitlines() == [*verdict.lines, f"seed {seed} keeps the laws"]


def test_a_run_is_the_same_whether_its_journal_is_kept_or_not() -> None:
    for seed in range(5):
        kept, plain = run_quietly(seed, journal=True), run_quietly(seed)
        assert plain.counts == kept.counts
        assert not plain.lines


def test_all_kinds_of_faults_are_drawn() -> None:
    scenarios = [draw_scenario(seed) for seed in range(300)]
    assert {scenario.program.program for scenario in scenarios} == DRAWN.keys() == PROGRAMS.keys()
    kinds = Counter(type(fault) for scenario in scenarios for fault in scenario.faults)
    assert kinds.keys() == {
        Death, GatewayLoss, SchedulerLoss, ControllerLoss, NodeOutage, Relocation, Switch, Order,
        RollingRestart, Replan, UnitAdded, UnitRemoved,
    }  # fmt: skip
    outages = [one for scenario in scenarios for one in scenario.faults if isinstance(one, NodeOutage)]
    assert {one.off for one in outages} == {False, True}
    assert {len(one.nodes) for one in outages} == {1, 2}
    assert sum(any(unit.spec.weave for unit in scenario.units) for scenario in scenarios) > 30
    assert sum(bool(client.stop) for scenario in scenarios for client in scenario.clients) > 100
    for kind in ("late", "slow", "lost", "unanswered", "again", "cut", "jobs"):
        assert sum(getattr(scenario.rates, kind) > 0 for scenario in scenarios) > 30, kind
    assert sum(scenario.harmless for scenario in scenarios) > 20
    assert sum(scenario.tidy for scenario in scenarios) > 20
    assert sum(scenario.rescheduling is not None for scenario in scenarios) > 100
    assert sum(bool(scenario.rescheduling and scenario.rescheduling.groups) for scenario in scenarios) > 10
    assert {len(scenario.units) for scenario in scenarios} == {1, 2, 3, 4}
    policies = Counter(unit.spec.policy for scenario in scenarios for unit in scenario.units)
    assert policies.keys() == set(get_args(Policy))
    assert min(policies["vllm-2023"], policies["adbs-2024"]) > 30
    assert {client.body.n for scenario in scenarios for client in scenario.clients} == {1, 2, 3}


def test_the_first_seed_that_breaks_a_law_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_seed(seed: int, *, journal: bool = False) -> Verdict:
        parts = Parts(wire=ShortWire) if seed > 4 else Parts()
        return run_scenario(draw_scenario(seed), journal=journal, parts=parts)

    monkeypatch.setattr(chaos_runs, "run_seed", run_seed)
    assert chaos(seeds=20, first=3, jobs=1, replay=None) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("seed 5 breaks ")
    assert all(float(line.split()[0]) >= 0 for line in lines if not line.startswith("seed 5 "))
    assert chaos(seeds=2, first=3, jobs=1, replay=None) == 0
    assert "2 runs keep the laws" in capsys.readouterr().out


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "chaos.md").read_text("utf-8")
    [example] = re.findall(r"^```sh\n(.*?)\n```$", page, re.M | re.S)
    command = [sys.executable, "-m", "kvloom.cli", *example.split()[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("20 runs keep the laws")

"""Weaver's experiments at small scale: its set-up, its systems, and what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.lab.reproduce.weaver.ablation import figure_7
from kvloom.lab.reproduce.weaver.ranks import HOP, MODEL, MOST_LOST, fitted_hop, most_lost, with_hop
from kvloom.lab.reproduce.weaver.sensitivity import figure_5
from kvloom.lab.reproduce.weaver.serving import DEDICATED_BATCH, FILLED, figure_4
from kvloom.lab.reproduce.weaver.setup import (
    AZURE,
    BARE_TEMPORAL,
    BURSTGPT,
    COLD,
    DEDICATED,
    HOT,
    LONGEST,
    MUXSERVE,
    SHARES,
    TEMPORAL,
    WEAVER,
    Load,
    Point,
    System,
    Trace,
    play_point,
    pool_bytes,
    requests,
)
from kvloom.plan.cost.devices import FITTED, find_device
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from tests.lab.reproduce.played import played, quiet

A100 = "A100-40"


@pytest.mark.parametrize("trace", [AZURE, BURSTGPT])
def test_traces_have_the_papers_means_and_no_sequence_is_too_long(trace: Trace) -> None:
    found = list(requests(trace, 40.0, 0.0, 100.0))
    assert np.mean([one.prompt for one in found]) == pytest.approx(trace.prompt, rel=0.05)
    assert np.mean([one.output for one in found]) == pytest.approx(trace.output, rel=0.05)
    assert max(one.prompt + one.output for one in found) <= LONGEST


def test_the_pool_is_as_full_as_the_papers_with_as_many_sequences() -> None:
    found = list(requests(AZURE, 40.0, 0.0, 100.0))
    held = sum(one.output * (one.prompt + one.output / 2) for one in found)
    tokens = DEDICATED_BATCH * held / sum(one.output for one in found)
    room = pool_bytes(find_device(A100), 1, 1) / find_shape(MODEL).kv_bytes
    assert 100 * tokens / room == pytest.approx(FILLED["dedicated"], rel=0.03)


def test_systems_have_the_same_memory_and_muxserve_its_runtime() -> None:
    alone, both = DEDICATED.units(A100, 10.0, 1.0), MUXSERVE.units(A100, 10.0, 1.0)[0]
    assert sum(one.spec.kv_bytes for one in alone) == pytest.approx(both.spec.kv_bytes, rel=0.01)
    assert tuple(model.decode_share for model in both.spec.models) == SHARES
    step = Work.decode(HOT, 1.0, [500] * 64)
    assert step.phase is Phase.DECODE
    shared, bare = (system.units(A100, 10.0, 1.0)[0].cost for system in (TEMPORAL, BARE_TEMPORAL))
    assert shared.seconds(step) == pytest.approx(bare.seconds(step) + 64 * 0.1e-3)
    assert both.cost.seconds(step) > shared.seconds(step)
    assert WEAVER.units(A100, 10.0, 1.0)[0].spec.weave is not None


def test_prompts_come_computed() -> None:
    for system in (DEDICATED, MUXSERVE, TEMPORAL, WEAVER):
        for unit in system.units(A100, 10.0, 1.0):
            assert unit.cost.seconds(Work.prefill(next(iter(unit.shapes)), 1.0, [500])) == 0.0


def test_what_ranks_lose_is_fitted_to_table_1_alone() -> None:
    """At any number of sequences one instance over both GPUs loses, and 26 % at the most."""
    assert fitted_hop() == HOP
    assert most_lost(with_hop(HOP)) == pytest.approx(MOST_LOST, abs=2e-3)
    assert most_lost(FITTED) < MOST_LOST / 2


@pytest.fixture(scope="module")
def points() -> dict[str, Point]:
    load = Load(A100, Trace("short", None, 300, 40), 30.0, 3.0, cold=4.0)
    return {system.name: play_point(system, load, quiet) for system in (DEDICATED, WEAVER)}


def test_a_light_load_is_answered_whole_and_is_partly_away(points: dict[str, Point]) -> None:
    for point in points.values():
        assert point.hot.rate == pytest.approx(30.0, rel=0.3)
        assert 0.01 < point.hot.tpot < 0.03
    assert points[WEAVER.name].filled["lent"] > 0.0 == points[DEDICATED.name].filled.get("lent", 0.0)
    assert points[WEAVER.name].filled["hot"] < points[DEDICATED.name].filled["hot"]
    assert points[WEAVER.name].cold.tpot > points[DEDICATED.name].cold.tpot


def test_a_point_is_the_same_every_time(points: dict[str, Point]) -> None:
    load = Load(A100, Trace("short", None, 300, 40), 30.0, 3.0, cold=4.0)
    assert play_point(WEAVER, load, quiet) == points[WEAVER.name]


def test_figures_in_small_have_their_cells_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.lab.reproduce.weaver.serving.SECONDS", {"small": 1.6})
    monkeypatch.setattr("kvloom.lab.reproduce.weaver.ablation.BATCH", 24)
    for figure in (figure_4, figure_5, figure_7):
        report = played(figure, least=0.6)
        assert all(cell.ours == cell.ours and cell.paper is not None for cell in report.cells)
        assert report.claims


def test_nobody_waits_for_a_system_that_is_not_asked() -> None:
    found = play_point(System("none", DEDICATED.units), Load(A100, AZURE, 0.0, 1.0, cold=0.0), quiet)
    assert (found.hot.rate, found.cold.batch) == (0.0, 0.0)
    assert set(found.filled) == {HOT, COLD}

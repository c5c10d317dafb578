"""Llumnix's experiments at small scale: its set-up, what is published, and what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.lab.reproduce.llumnix.curves import Curves, read_curves
from kvloom.lab.reproduce.llumnix.downtime import RECOMPUTED, beside, downtime, figure_10
from kvloom.lab.reproduce.llumnix.engine_alone import Alone, Unused, alone, report_3, report_5, unused
from kvloom.lab.reproduce.llumnix.fragmentation import figure_12, fragmented
from kvloom.lab.reproduce.llumnix.priorities import (
    Found,
    PriorityRun,
    Seconds,
    report_64,
    section_64,
    told_apart,
)
from kvloom.lab.reproduce.llumnix.setup import HOST, MODEL, POOL, PUBLISHED, make_units
from kvloom.lab.reproduce.llumnix.traffic import LONG, SHAREGPT, SHORT, TRAFFICS, read_traffic, synthetic
from kvloom.lab.workload.arrivals import gamma
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.errors import ConfigError
from tests.cluster.loads import model, unit
from tests.lab.reproduce.played import played, quiet

CURVES = """{"source": "a test", "figures": {"ShareGPT": {"prefill_p99_s": {"Llumnix": [[7.0, 1.5]]}}}}"""


def test_an_instance_has_the_papers_room_in_pages_of_one_block() -> None:
    [unit] = make_units(1)
    shape = find_shape(MODEL)
    assert unit.shapes[MODEL].kv_bytes == shape.kv_bytes == 524_288
    geometry = unit.shapes[MODEL].geometry(unit.spec.block_bytes)
    assert (geometry.blocks_per_page, geometry.tokens_per_block) == (1, 16)
    assert unit.spec.kv_bytes == POOL * shape.kv_bytes


def test_a_prefill_takes_what_the_paper_has_and_a_step_waits_for_the_host() -> None:
    cost = make_units(1)[0].cost
    for length, paper in zip((256, 512, 1024, 2048, 4096, 8192), RECOMPUTED, strict=True):
        seconds = cost.seconds(Work.prefill(MODEL, 1.0, [length]))
        assert seconds == pytest.approx(paper / 1e3, rel=0.1)
    assert cost.seconds(Work.decode(MODEL, 1.0, [256])) > HOST + 13.5e9 / 0.6e12


def test_the_same_requests_come_at_every_rate_only_faster() -> None:
    slow, fast = (list(SHAREGPT.requests(rate, 50)) for rate in (7.0, 14.0))
    assert [(one.prompt, one.output) for one in slow] == [(one.prompt, one.output) for one in fast]
    assert slow[-1].at == pytest.approx(2 * fast[-1].at)
    bursts = list(replace(SHORT, gaps=gamma(8), urgent=0.1).requests(26.0, 500))
    assert 20 < sum(ask.priority == -1 for ask in bursts) < 90
    assert max(ask.prompt + ask.output for traffic in TRAFFICS for ask in traffic.requests(7.0, 500)) < POOL


def test_lengths_of_any_kind_by_any_other() -> None:
    mixed = read_traffic("prompt=S,output=L")
    assert mixed == synthetic("S", "L")
    assert (mixed.name, mixed.rates[0], mixed.threshold) == ("S-L", 4.1, 10)
    assert (synthetic("L", "M").rates, LONG.threshold) == ((), 3)
    asked = list(mixed.requests(4.0, 4000))
    for side, other in ((lambda ask: ask.prompt, SHORT), (lambda ask: ask.output, LONG)):
        own = list(other.requests(4.0, 4000))
        assert sum(map(side, asked)) == pytest.approx(sum(map(side, own)), rel=0.01)
    assert read_traffic("sharegpt") is SHAREGPT
    for wrong in ("prompt=S", "prompt=S,output=X", "S-L", ""):
        with pytest.raises(ConfigError, match="prompt=X,output=Y are right"):
            read_traffic(wrong)


def test_curves_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_DATA", raising=False)
    assert read_curves() == Curves()
    monkeypatch.setenv("KVLOOM_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        read_curves()
    (tmp_path / "llumnix_fig11.json").write_text(CURVES[:40])
    with pytest.raises(ConfigError, match="not the curves"):
        read_curves()
    (tmp_path / "llumnix_fig11.json").write_text(CURVES)
    assert read_curves().at("ShareGPT", "prefill_p99_s", "Llumnix", 7.0) == 1.5
    assert read_curves().at("ShareGPT", "prefill_p99_s", "Llumnix", 7.5) is None


def test_urgent_requests_are_told_apart_from_others_that_come_with_them() -> None:
    asks = [WorkloadRequest(at=1.0, model=MODEL, prompt=8, output=9, priority=0) for _ in range(3)]
    ends = zip(asks, (2.0, 4.0, 6.0), strict=True)
    outcomes = [RequestResult(request=ask, first=1.0, end=end, tokens=9) for ask, end in ends]
    found = told_apart(outcomes, asks[1:2])
    assert (found.urgent.request, found.others.request) == (4.0, 4.0)
    assert told_apart(outcomes, asks[2:]).urgent.request == 6.0


def test_priorities_are_worth_it_only_where_the_others_hardly_lose() -> None:
    slow, fast, slower = (Seconds(mean, 0.1, 0.6, 0.05) for mean in (7.8, 6.0, 8.3))
    report = report_64([PriorityRun(8, Found(slow, slow), Found(fast, slower))])
    assert [claim.verdict for claim in report.claims] == ["holds", "fails"]
    assert report.cells[0].paper == pytest.approx(8.54 / 5.68)
    assert report.cells[0].ours == pytest.approx(1.3)
    assert [row[:3] for row in report.grids[0].rows][1] == ("8", "urgent", "no")
    runs = [PriorityRun(2, Found(slow, slow), Found(fast, slow)), PriorityRun(8, *[Found(slow, slow)] * 2)]
    claim = report_64(runs).claims[0]
    assert (claim.verdict, claim.found) == ("fails", "1.00× at CV 8; 1.00× at the least, 1.30× at the most")


def test_priorities_and_fragments_in_small() -> None:
    assert len(played(section_64).cells) == 4
    assert [row[2] for row in played(figure_12).grids[0].rows] == ["INFaaS++", "Llumnix", "kvloom"]


def test_fragmented_is_what_first_requests_would_take_of_what_all_leave() -> None:
    """Of four heads with 40, 50, 60 and 70 blocks the first two find room in the 100 that are left."""
    heads = (40, 50, 60, 70)
    loads = [
        unit(model(waiting=2, head_blocks=blocks, waiting_blocks=2 * blocks, used_blocks=175), blocks=200)
        for blocks in heads
    ]
    assert fragmented(loads) == pytest.approx(90 / 800)
    assert fragmented([unit(model(used_blocks=200), blocks=200)]) == 0.0


def test_a_move_is_shorter_than_a_step_whatever_the_length() -> None:
    for length in (256, 4096):
        wait, step = downtime(length)
        assert 0 < wait < step / 2
    assert [claim.verdict for claim in played(figure_10, least=0.6).claims][1] == "holds"
    step, moving = beside(1024)
    assert moving == pytest.approx(step, rel=0.02)
    assert step > downtime(1024)[1]  # eight requests have more K and V than one


ALONE = (36.1257, 1.0, 1.3103, 20.6816, 13.8822)


def test_the_published_engine_preempts_as_it_did() -> None:
    """A small cell of figure 3, which is the same wherever it is played."""
    assert alone(PUBLISHED, 300, 1, quiet).numbers == pytest.approx(ALONE, rel=1e-3)


def test_prompts_that_wait_are_set_against_what_all_instances_leave() -> None:
    assert unused(PUBLISHED, 150, 0, quiet) == Unused(4, 1.0, 1.0)


def test_figure_3_is_the_mean_of_its_draws() -> None:
    draws = [Alone(60.0, 6.0, (0.05, 0.2), 70.0, 40.0, (0.1, 9.0)) for _ in range(2)]
    other = Alone(64.0, 10.0, (0.05, 0.18), 70.0, 60.0, (0.1, 9.0))
    name = "vLLM of 2023"
    report = report_3([*((name, one) for one in draws), (name, other), ("kvloom, fcfs", other)])
    ours = {cell.column: cell.ours for cell in report.cells if cell.row == name}
    assert ours["requests preempted, %"] == pytest.approx(22 / 3)
    assert ours["a token, P99 over P50"] == pytest.approx((4 + 4 + 3.6) / 3)
    waits = [
        (name, Unused(10, 0.6, 0.4)),
        (name, Unused(10, 0.4, 0.4)),
        ("kvloom, fcfs", Unused(10, 1.0, 1.0)),
    ]
    assert [claim.verdict for claim in report_5(waits).claims] == ["fails", "holds"]

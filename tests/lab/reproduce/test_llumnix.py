"""Llumnix's experiments at small scale: its set-up, what is published, and what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.lab.reproduce.llumnix.downtime import RECOMPUTED, downtime, figure_10
from kvloom.lab.reproduce.llumnix.engine_alone import Alone, Unused, alone, report_3, report_5, unused
from kvloom.lab.reproduce.llumnix.serving import (
    TRAFFICS,
    Found,
    PriorityRun,
    Run,
    Seconds,
    figure_11,
    report_11,
    report_64,
    section_64,
    told_apart,
)
from kvloom.lab.reproduce.llumnix.setup import (
    BY_REPORTS,
    HOST,
    INFAAS,
    LLUMNIX,
    LONG,
    MODEL,
    POOL,
    PUBLISHED,
    ROUND_ROBIN,
    SHAREGPT,
    SHORT,
    Curves,
    Point,
    Times,
    make_units,
    read_curves,
)
from kvloom.lab.workload.arrivals import gamma
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.errors import ConfigError
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


def run(system: str, rate: float, prefill: float, decode: float) -> Run:
    known = {one.name: one for one in (ROUND_ROBIN, BY_REPORTS, INFAAS, LLUMNIX)}
    point = Point(Times(0.1, prefill), Times(0.04, decode), Times(9.0, 50.0), 5, 3, 16.0)
    return Run(LONG, rate, known[system], point)


def test_claims_say_at_which_rate_they_hold() -> None:
    runs = [
        run("INFaaS++ by reports", 2.6, 3.0, 0.12),
        run("INFaaS++", 2.6, 2.0, 0.10),
        run("Llumnix", 2.6, 2.1, 0.05),
        run("INFaaS++ by reports", 3.0, 5.0, 0.12),
        run("INFaaS++", 3.0, 8.0, 0.10),
        run("Llumnix", 3.0, 2.0, 0.10),
    ]
    curves = Curves({"L-L": {"decode_p99_s": {"Llumnix": [(3.0, 0.1209)]}}})
    report = report_11(runs, curves)
    assert [claim.verdict for claim in report.claims] == [
        "fails",
        "holds",
        "holds",
        "holds",
        "holds",
        "fails",
    ]
    assert "2.50× at 3 req/s" in report.claims[5].found
    assert "0.95× as short at the least (2.6 req/s), 4.00× at the most (3)" in report.claims[0].found
    [told] = [cell for cell in report.cells if cell.paper is not None]
    assert (told.column, told.ours) == ("P99 decode, ms", 100.0)
    assert told.paper == pytest.approx(120.9)
    assert len(report.grids[0].rows) == 6
    drawn = report_11(runs, Curves({"L-L": {"prefill_p99_s": {"INFaaS++": [(3.0, 41.0)]}}})).cells
    assert [cell.row for cell in drawn if cell.paper == 41.0] == [
        "L-L, 3 req/s, INFaaS++ by reports",
        "L-L, 3 req/s, INFaaS++",
    ]


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


def test_figure_11_and_priorities_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_DATA", raising=False)
    report = played(figure_11)
    assert {row[2] for row in report.grids[0].rows} == {
        "round-robin",
        "INFaaS++ by reports",
        "INFaaS++",
        "Llumnix",
    }
    assert all(cell.paper is None and cell.ours > 0 for cell in report.cells)
    assert len(played(section_64).cells) == 4


def test_a_move_is_shorter_than_a_step_whatever_the_length() -> None:
    for length in (256, 4096):
        wait, step = downtime(length)
        assert 0 < wait < step / 2
    assert [claim.verdict for claim in played(figure_10, least=0.6).claims][1] == "holds"


ALONE = (36.1257, 1.0, 1.3103, 20.6816, 13.8822)


def test_the_published_engine_preempts_as_it_did() -> None:
    """A small cell of figure 3, which is the same wherever it is played."""
    assert alone(PUBLISHED, 300, 1, quiet).numbers == pytest.approx(ALONE, rel=1e-3)


def test_prompts_that_wait_are_set_against_what_all_instances_leave() -> None:
    assert unused(PUBLISHED, 150, 0, quiet) == Unused(6, 1.0, 1.0)


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

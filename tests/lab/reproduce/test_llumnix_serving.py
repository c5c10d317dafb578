"""Figure 11 of Llumnix: what its systems know and move, and what is made of the runs."""

from __future__ import annotations

import pytest

from kvloom.engine.freeness import Arrival
from kvloom.lab.reproduce.llumnix.curves import Curves
from kvloom.lab.reproduce.llumnix.point import Point, Times, play_point, units_of
from kvloom.lab.reproduce.llumnix.serving import Run, figure_11, report_11
from kvloom.lab.reproduce.llumnix.setup import KVLOOM, MODEL, PUBLISHED
from kvloom.lab.reproduce.llumnix.systems import (
    INFAAS,
    INFAAS_BY_COUNT,
    LLUMNIX,
    LLUMNIX_BY_COUNT,
    OWN,
    OWN_INFAAS,
    ROUND_ROBIN,
    dispatch_freeness,
    published_dispatch,
    published_freeness,
)
from kvloom.lab.reproduce.llumnix.traffic import LONG, MEDIUM, SHAREGPT
from kvloom.lab.reproduce.report import Options
from kvloom.lab.workload.request import WorkloadRequest
from tests.cluster.loads import model, unit
from tests.lab.reproduce.played import played, quiet

SYSTEMS = (ROUND_ROBIN, INFAAS, LLUMNIX, INFAAS_BY_COUNT, LLUMNIX_BY_COUNT, OWN_INFAAS, OWN)


def test_published_freeness_counts_all_that_waits_above_the_watermark() -> None:
    """Of 200 blocks 2 are the watermark, 100 are used, and the four that wait want 60 together."""
    some = unit(model(running=4, used_blocks=100, waiting=4, head_blocks=10, waiting_blocks=60), blocks=200)
    tokens = some.models["m"].token_blocks
    assert published_freeness(some) == pytest.approx(38 / (5 * tokens))
    assert dispatch_freeness(some) == pytest.approx(38 / (8 * tokens))
    full = unit(model(running=4, used_blocks=100, waiting=1, head_blocks=9, waiting_blocks=9), blocks=100)
    assert published_freeness(full) == pytest.approx(-10 / (5 * tokens))  # what is missing is divided too
    idle = unit(model(), blocks=100)
    loads = {"some": some, "full": full, "idle": idle, "alike": idle}
    assert published_dispatch(loads, {"some": 0, "full": 0, "idle": 2, "alike": 1}, ARRIVAL) == "alike"


ARRIVAL = Arrival("m", 1000)


def test_published_thresholds_are_the_workloads() -> None:
    for traffic, steps in ((MEDIUM, 160.0), (LONG, 48.0), (SHAREGPT, 48.0)):
        given = LLUMNIX.of(traffic).rescheduling
        assert given is not None
        assert (given.thresholds.out, given.thresholds.into, given.thresholds.kept) == (steps, steps, 0.0)
    assert (OWN.of(MEDIUM), INFAAS.of(MEDIUM)) == (OWN, INFAAS)
    assert {one.engine for one in SYSTEMS[:5]} == {PUBLISHED}
    assert OWN.engine == OWN_INFAAS.engine == KVLOOM


def burst(count: int) -> list[WorkloadRequest]:
    """Requests that come within a report of each other, after some that every instance has told of."""
    first = [WorkloadRequest(at=0.1 * at, model=MODEL, prompt=64 << at, output=200) for at in range(4)]
    return first + [
        WorkloadRequest(at=1.0 + 1e-4 * at, model=MODEL, prompt=2000, output=2) for at in range(count)
    ]


def test_by_reports_a_burst_goes_to_one_instance_and_by_count_it_spreads() -> None:
    slowest = {
        system.name: play_point(system, units_of(system, 4), burst(4), quiet).prefill.p99
        for system in (INFAAS, INFAAS_BY_COUNT, LLUMNIX, LLUMNIX_BY_COUNT)
    }
    for name in ("INFaaS++", "Llumnix"):
        assert slowest[name] > 2 * slowest[f"{name} by count"]


def run(system: str, rate: float, prefill: float, decode: float) -> Run:
    known = {one.name: one for one in SYSTEMS}
    points = [
        Point(Times(0.1, prefill * part), Times(0.04, decode), Times(9.0, 50.0), 0.2, 5, 3, 16.0)
        for part in (0.5, 1.5)
    ]
    return Run(LONG, rate, known[system], tuple(points))


def test_claims_say_at_which_rate_they_hold() -> None:
    prefills = {2.6: (3.0, 2.0, 3.0, 2.0, 4.0, 1.0), 3.0: (8.0, 2.0, 4.0, 4.0, 4.0, 5.0)}
    runs = [
        run(system.name, rate, prefill, 0.12 if system is INFAAS else 0.10)
        for rate, column in prefills.items()
        for system, prefill in zip(SYSTEMS[1:], (*column[:1], *column[1:]), strict=True)
    ]
    curves = Curves(
        {
            "L-L": {
                "prefill_p99_s": {"INFaaS++": [(2.6, 2.8), (3.0, 41.0)], "Llumnix": [(2.6, 2.5), (3.0, 2.8)]},
                "decode_p99_s": {"Llumnix": [(3.0, 0.1209)], "INFaaS++": [(3.0, 0.05)]},
            }
        }
    )
    report = report_11(runs, curves, 10_000)
    wanted, prefill, decode, longer, tokens, *best, own = report.claims
    assert (wanted.verdict, "at 1 of 2: 0.20× at the least (L-L, 3 req/s)" in wanted.found) == ("fails", True)
    assert (prefill.verdict, prefill.found) == ("holds", "1 of 1")
    assert decode.verdict == "fails"
    assert "0 of 1; not L-L, 3 req/s: INFaaS++, Llumnix" in decode.found
    assert (longer.verdict, tokens.verdict) == ("holds", "holds")
    assert longer.found == "INFaaS++'s over Llumnix's: 1.50 (2.6 req/s) to 4.00 (3)"
    assert [claim.verdict for claim in best] == ["holds", "fails", "holds"]
    assert own.verdict == "fails"  # at 3 req/s
    told = {(cell.row, cell.column): cell for cell in report.cells}
    assert len(told) == 2 * 2 * 7
    assert told["L-L, 3 req/s, Llumnix", "P99 decode, ms"].paper == pytest.approx(120.9)
    assert told["L-L, 3 req/s, INFaaS++", "P99 prefill, s"].ours == pytest.approx(8.0)
    assert "8.00 s (4.00 s – 12.00 s)" in report.grids[0].rows[6]


def test_figure_11_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_DATA", raising=False)
    report = played(figure_11)
    assert [row[2] for row in report.grids[0].rows] == [system.name for system in SYSTEMS]
    assert all(cell.paper is None and cell.ours >= 0 for cell in report.cells)
    asked = Options(traffic="prompt=S,output=L", rates=(12.0,), draws=2, requests=20)
    mixed = figure_11("small", quiet, asked)
    assert {row[:2] for row in mixed.grids[0].rows} == {("S-L", "12")}
    assert mixed.grids[0].title.startswith("ours, 20 requests, means of 2 draws")

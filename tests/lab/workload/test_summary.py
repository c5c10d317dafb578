"""Outcomes added up, and the page that shows them."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.lab.workload.page import page
from kvloom.lab.workload.request import Alone, RequestResult, Scaled, Within, WorkloadRequest
from kvloom.lab.workload.results import Results, read_results
from kvloom.lab.workload.summary import MOST_ERRORS, NO_TOKEN, OTHER_ERRORS, Histogram, Summary
from kvloom.types.errors import ConfigError


def outcome(
    at: float = 0.0, model: str = "a", first: float | None = 0.1, end: float | None = 1.1, **more: object
) -> RequestResult:
    ask = WorkloadRequest(at=at, model=model, prompt=100, output=11)
    given: dict[str, object] = {"request": ask, "first": first, "end": end, "tokens": 11} | more
    return RequestResult(**given)  # type: ignore[arg-type]


def many(models: int = 3, seed: int = 0) -> list[RequestResult]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(3000):
        first, rest = rng.lognormal(-3, 1), rng.lognormal(-1, 0.5)
        found.append(outcome(i / 50, f"m{i % models}", first, first + rest, cached=i % 5))
    return found


def summed(outcomes: list[RequestResult], **objectives: object) -> Results:
    summary = Summary(objectives)  # type: ignore[arg-type]
    for one in outcomes:
        summary.add(one)
    return summary.results("simulation", "a <test> & more")


def test_latencies_and_rates() -> None:
    outcomes = many()
    results = summed(outcomes)
    ends = np.array([one.end for one in outcomes])
    assert results.seconds == pytest.approx(max(one.request.at + (one.end or 0) for one in outcomes))
    assert results.total.end is not None
    assert results.total.end.mean == pytest.approx(ends.mean())
    for name, percentile in (("p50", 50), ("p80", 80), ("p95", 95), ("p99", 99)):
        found = getattr(results.total.end, name)
        assert found == pytest.approx(np.percentile(ends, percentile, method="lower"), rel=0.005)
    assert results.total.end.curve[-1] == results.total.end.most == ends.max()
    firsts = [one.first for one in outcomes if one.request.model == "m1"]
    per_token = [one.per_token for one in outcomes if one.request.model == "m1"]
    tally = results.models["m1"]
    assert tally.first is not None
    assert tally.per_token is not None
    assert tally.first.p95 == pytest.approx(np.percentile(np.array(firsts), 95), rel=0.01)
    assert tally.per_token.p50 == pytest.approx(np.percentile(np.array(per_token), 50), rel=0.01)
    assert (tally.requests, tally.prompt_tokens, tally.output_tokens) == (1000, 100_000, 11_000)
    assert results.total.cached_tokens == 6000
    assert results.total.requests_per_second == pytest.approx(3000 / results.seconds)
    assert results.total.tokens_per_second == pytest.approx(33_000 / results.seconds)
    tokens = sum(sum(course.tokens) for course in results.courses.values())
    assert tokens == pytest.approx(33_000)
    assert sum(results.courses["m0"].asked) == sum(results.courses["m0"].answered) == 1000


def test_errors_are_counted_and_nothing_else_of_them() -> None:
    cut = outcome(model="b", tokens=3, error="the stream ended")
    results = summed([outcome(), cut, cut, outcome(first=None, end=None, tokens=0)])
    assert results.errors == {"the stream ended": 2, NO_TOKEN: 1}
    assert (results.total.requests, results.total.errors, results.total.output_tokens) == (4, 3, 11)
    assert results.models["b"].first is None
    assert results.models["b"].tokens_per_second == 0


def test_errors_that_differ_in_counts_are_one_kind() -> None:
    first, *others = "7 requests wait for a already", "12 requests wait for a already", "1,024 requests wait"
    apart = [
        *("7 requests wait for m2", "7 requests wait for m3", "7 requests wait for llama-2 already"),
        *("7 requests wait for llama-3 already", "status 429", "status 503", "unit-0: gone", "unit-1: gone"),
        *("[Errno 104] reset", "[Errno 111] refused", others[1]),
    ]
    results = summed([outcome(error=error) for error in (first, others[0], *apart)])
    assert results.errors == {first: 2, **dict.fromkeys(apart, 1)}


def test_kinds_of_errors_are_bounded() -> None:
    results = summed([outcome(error="no " + "x" * i) for i in range(MOST_ERRORS + 5)])
    assert len(results.errors) == MOST_ERRORS + 1
    assert results.errors[OTHER_ERRORS] == 5


def test_attainment() -> None:
    """One is in time by every measure, one late at its first token, one between tokens, one fails."""
    outcomes = [outcome(), outcome(first=0.5), outcome(end=3.1), outcome(error="no")]
    results = summed(
        outcomes,
        first=Within(first=0.2),
        pace=Within(per_token=0.11),
        both=Within(first=0.2, per_token=0.11),
        end=Within(end=1.2),
        twice=Scaled(2.0, Alone(0.05, 0.0005, 0.09).seconds),  # alone: 1 s
        thrice=Scaled(3.2, Alone(0.05, 0.0005, 0.09).seconds),
    )
    assert results.total.attained == {
        "first": 0.5,
        "pace": 0.5,
        "both": 0.25,
        "end": 0.5,
        "twice": 0.5,
        "thrice": 0.75,
    }


def test_results_are_read_as_written(tmp_path: Path) -> None:
    results = summed(many())
    results.save(tmp_path / "r.json")
    assert read_results(tmp_path / "r.json") == results
    text = (tmp_path / "r.json").read_text()
    for content, said in (
        (text[:400], "no results file"),
        ("[]", "no results file"),
        (text.replace('"kvloom_results":2', '"kvloom_results":1'), "version 1; this kvloom reads version 2"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_results(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="the path of a results file"):
        read_results(tmp_path / "nowhere.json")


class Reader(HTMLParser):
    """Reads a page whose tags are closed as they were opened, and which loads nothing from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.policy = ""
        self.figures = 0
        self._in: str | None = None
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "img", "iframe", "a")
        given = dict(attrs)
        assert not {"src", "href", "onload", "onclick"} & given.keys()
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self.figures += tag == "figure"
        if tag != "meta":
            self.open.append(tag)
        self._in = given.get("type") or "script" if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)
        elif self._in == "application/json":
            self.charts = json.loads(data)
        else:
            self.text += data


@pytest.mark.parametrize("models", [1, 3, 8, 19])
def test_the_page_is_whole_and_its_curves_lie_within_their_charts(models: int) -> None:
    late = Histogram()
    late.add(0.004)
    summary = Summary({"≤ 5×": Within(end=1.0)})
    for one in [*many(models), outcome(model="m0", error="<b>no</b>")]:
        summary.add(one)
    reader = Reader(page(summary.results("benchmark", "a <test> & more", lateness=late)))
    for words in (
        "a <test> & more",
        "≤ 5×",
        "<b>no</b>",
        "4 ms late",
        "3,001 requests",
        "prefers-color-scheme",
    ):
        assert words in reader.text
    assert len(reader.charts) == reader.figures == 5
    for chart in reader.charts:
        (left, right), (low, high) = chart["x"]["range"], chart["y"]["range"]
        assert chart["series"]
        assert chart["places"] == sorted(set(chart["places"]))
        assert left <= chart["places"][0] < chart["places"][-1] <= right
        for series in chart["series"]:
            assert len(series["values"]) == len(chart["places"]) > 2
            assert all(low <= value <= high for value in series["values"] if value is not None)
    names = {series["name"] for chart in reader.charts for series in chart["series"]}
    assert len(reader.charts[0]["series"]) == (models if models <= 8 else 7)
    assert ("others" in names) == (models > 8)


def test_only_the_pages_own_scripts_may_run() -> None:
    hostile = summed([outcome(model="</script><script>alert(1)</script>", error="<script>alert(2)</script>")])
    reader = Reader(page(hostile))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in reader.scripts]
    assert len(hashes) == 2
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert reader.policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    assert "uPlot" in reader.scripts[0]


def test_a_distributions_curve_rises() -> None:
    chart = Reader(page(summed(many(1)))).charts[0]
    [curve] = chart["series"]
    assert curve["values"] == sorted(curve["values"])
    assert (curve["values"][-1], chart["x"]["log"]) == (1.0, True)


def test_models_are_stacked_and_keep_their_own_tokens() -> None:
    chart = Reader(page(summed(many(3)))).charts[3]
    top, _, bottom = chart["series"]
    assert chart["filled"]
    assert bottom["values"] == bottom["own"]
    assert top["values"] == pytest.approx(
        [sum(own) for own in zip(*(series["own"] for series in chart["series"]), strict=True)]
    )
    width = 2 * chart["places"][0]
    assert sum(sum(series["own"]) for series in chart["series"]) * width == pytest.approx(33_000)


@pytest.mark.parametrize("outcomes", [[], [outcome(error="no")], [outcome()]])
def test_a_page_of_next_to_nothing(outcomes: list[RequestResult]) -> None:
    assert len(Reader(page(summed(outcomes))).charts) == 5

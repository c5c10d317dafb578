"""The demand that a traffic log tells, and plans that are made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.cli.plan.traffic import traffic_table
from kvloom.journal.traffic import HOUR, TrafficHour, encode_hours
from kvloom.plan.plan import read_plan
from kvloom.plan.traffic import covered_seconds, seen_traffic
from kvloom.types.errors import ConfigError

BEGIN = 490_000 * HOUR
LATER = float(BEGIN + 100 * HOUR)


def hour(
    n: int,
    model: str,
    requests: int,
    prompt: int = 100,
    output: int = 50,
    base: str = "",
    unanswered: int = 0,
) -> TrafficHour:
    """An hour with requests in its first and its last minute."""
    return TrafficHour(
        hour=BEGIN + n * HOUR,
        model=model,
        base=base,
        requests=requests,
        unanswered=unanswered,
        prompt_tokens=prompt * requests,
        output_tokens=output * requests,
        minutes={0: requests + unanswered - 1, 59: 1},
    )


LOG = [
    hour(0, "a", 360),
    hour(1, "a", 720, prompt=200),
    hour(1, "b", 36),
    hour(2, "a", 360),
    hour(2, "b", 360, output=60),
    hour(2, "gone", 99999),
]


def test_the_busiest_hour_is_that_of_all_models_together() -> None:
    seen = seen_traffic(LOG, ["a", "b", "c"], "peak", LATER)
    assert (seen.hour, seen.seconds, seen.others) == (BEGIN + HOUR, HOUR, ("gone",))
    assert (seen.models["a"].rate, seen.models["a"].prompt) == (0.2, 200)
    mean = (36 + 360) / (3 * HOUR)  # which is more than b was asked in that hour
    assert seen.models["b"].rate == pytest.approx(mean)
    assert seen.models["b"].output == pytest.approx((36 * 50 + 360 * 60) / 396)
    assert "c" not in seen.models


def test_the_mean_counts_all_hours() -> None:
    seen = seen_traffic(LOG, ["a", "b"], "mean", LATER)
    assert (seen.hour, seen.seconds) == (None, 3 * HOUR)
    assert seen.models["a"].rate == pytest.approx(1440 / (3 * HOUR))
    assert seen.models["a"].prompt == 150
    assert seen.mean.rate == pytest.approx(1836 / (3 * HOUR))


def test_an_hour_that_is_not_over_counts_only_if_there_is_no_other() -> None:
    now = BEGIN + 1.5 * HOUR
    assert seen_traffic(LOG[:2], ["a"], "peak", now).hour == BEGIN
    short = TrafficHour(hour=BEGIN, model="a", requests=30, prompt_tokens=30, minutes={10: 10, 11: 20})
    seen = seen_traffic([short], ["a"], "peak", BEGIN + 720.0)
    assert (seen.seconds, seen.models["a"].rate) == (120, 0.25)


def test_the_table_of_traffic_has_the_rates_that_are_planned_for() -> None:
    now = BEGIN + 120.0
    hours = [TrafficHour(hour=BEGIN, model="guide", requests=80, minutes={0: 30, 1: 50})]
    shown = traffic_table(hours, covered_seconds(hours, now)).columns[4]
    assert (shown.header, [*shown.cells]) == ("per second", ["0.667"])
    assert seen_traffic(hours, ["guide"], "peak", now).models["guide"].rate == pytest.approx(80 / 120)


def test_the_seconds_of_an_hour_that_a_log_has() -> None:
    def at(n: int, *minutes: int) -> TrafficHour:
        return TrafficHour(hour=BEGIN + n * HOUR, model="a", requests=1, minutes=dict.fromkeys(minutes, 1))

    hours = [at(0, 50), at(1, 30), at(2, 4), at(2, 9)]
    assert covered_seconds(hours, BEGIN + 2.5 * HOUR) == {
        BEGIN: 600,
        BEGIN + HOUR: HOUR,
        BEGIN + 2 * HOUR: 600,
    }
    assert covered_seconds(hours, LATER)[BEGIN + 2 * HOUR] == HOUR
    assert covered_seconds([], LATER) == {}


def test_requests_without_an_answer_count_and_those_of_adapters_are_the_bases() -> None:
    log = [hour(0, "a", 100), hour(0, "tuned", 50, prompt=400, base="a", unanswered=30)]
    seen = seen_traffic(log, ["a"], "peak", LATER)
    assert (seen.models["a"].rate, seen.models["a"].prompt) == (180 / HOUR, 200)
    assert seen.others == ()


def test_no_traffic_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no traffic for x, y; models with traffic: a, b, gone"):
        seen_traffic(LOG, ["x", "y"], "peak", LATER)


PAIR = """\
nodes: [{device: H100, gpus: 2}]
models:
  a: {shape: llama-7b}
  b: {shape: llama-7b}
"""


def test_a_plan_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, log, out = tmp_path / "cluster.yaml", tmp_path / "log.jsonl", tmp_path / "plan.json"
    cluster.write_text(PAIR)
    log.write_bytes(encode_hours(LOG) + b"damaged\n")
    assert main(["plan", str(cluster), "--from-traffic", str(log), "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "rates are those of the busiest hour" in told.out
    assert "left out: gone" in told.out
    assert "1 damaged line left out" in told.err
    assert "warning" not in told.out
    assert "4.7% off in the median, 13.5% at the 90th percentile" in told.out
    rates = {model.name: model.rate for unit in read_plan(out).units for model in unit.models}
    assert rates["a"] == 0.2
    assert [unit.gpus for unit in read_plan(out).units] == [1]  # which is ample
    assert main(["plan", str(cluster), "--from-traffic", str(log), "--at", "mean", "-o", str(out)]) == 0
    assert "rates are means of 3 hours of traffic" in capsys.readouterr().out
    rates = {model.name: model.rate for unit in read_plan(out).units for model in unit.models}
    assert rates["a"] == pytest.approx(1440 / (3 * HOUR))


def test_little_traffic_is_told_in_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, log = tmp_path / "cluster.yaml", tmp_path / "log.jsonl"
    cluster.write_text(PAIR)
    log.write_bytes(encode_hours([TrafficHour(hour=BEGIN, model="a", requests=3, minutes={10: 1, 11: 2})]))
    for at, said in (("peak", ", of which the log has 2 minutes"), ("mean", "means of 2 minutes of traffic")):
        assert main(["plan", str(cluster), "--from-traffic", str(log), "--at", at]) == 0
        told = capsys.readouterr().out
        assert said in told
        assert "warning: the log has 2 minutes, 3 requests: too little" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-traffic", "none.jsonl"], "--from-traffic: none.jsonl: No such file"),
        (["--from-traffic", "cluster.yaml"], "--from-traffic: cluster.yaml: no line of a traffic log"),
        (["--from-traffic", "x", "--workload", "y"], "--workload, --from-traffic: both are past traffic"),
        (["--from-traffic", "empty.jsonl"], "--from-traffic: no traffic for a, b; models with traffic: none"),
    ],
)
def test_traffic_that_cannot_be_used_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(PAIR)
    Path("empty.jsonl").touch()
    assert main(["plan", "cluster.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err

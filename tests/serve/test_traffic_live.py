"""Requests, the log of them, and a plan for them, which the fleet then serves. Real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from kvloom.journal.traffic import TrafficHour, decode_hours
from kvloom.plan.cost.profile import write_profile
from kvloom.plan.plan import read_plan
from tests.plan.cost.profiles import make_profile
from tests.processes import fleet
from tests.serve.streaming import call, serving, states, streams

CONFIG = f"""
kv_memory: 32MiB
traffic: traffic.jsonl
models: {{one: {DEMO / "guide"}, two: {DEMO / "sums"}}}
rescheduling: {{period: 50ms}}
units: [{{models: [one]}}, {{models: [two]}}]
"""


def ask(url: str, model: str, prompts: int = 1, tokens: int = 5) -> None:
    body = {"model": model, "prompt": [[20, 21, 22]] * prompts, "max_tokens": tokens, "ignore_eos": True}
    call(url, "/v1/completions", body)


def kept(folder: Path) -> dict[str, TrafficHour]:
    """By model, of the whole run, however many hours it touches."""
    found, damaged = decode_hours((folder / "traffic.jsonl").read_bytes())
    assert damaged == 0
    return {hour.model: hour for hour in found}


def test_a_fleet_is_planned_anew_by_what_it_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(make_profile(), profile)
    with serving(tmp_path, CONFIG) as (_, url):
        for _ in range(6):
            ask(url, "one")
        ask(url, "two", prompts=3)
        assert main(["traffic", "--url", url]) == 0
        table = capsys.readouterr().out
        assert [" one " in table, " two " in table, "3: 3 / 3" in table, "5: 5 / 5" in table] == [True] * 4
        assert main(["traffic", "--url", url, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert sum(line["requests"] for line in lines) == 9
        assert sum(line["prompt_tokens"] for line in lines) == 27
        arguments = ["replan", "--from-traffic", "--profile", str(profile), "--url", url, "-o", str(plan)]
        assert main([*arguments, "--apply"]) == 2  # the log has too little
        assert not plan.exists()
        assert "too little to size a fleet by" in capsys.readouterr().err
        with streams(url, 100, one=1, two=1) as ended:
            assert main(arguments) == 0
            assert "rates are those of the busiest hour" in capsys.readouterr().out
            assert main(["replan", str(plan), "--url", url, "--apply"]) == 0
            said = capsys.readouterr().out
            assert said.splitlines()[-1] == "the fleet is as planned"
            count = len(ended)
            while not {"one", "two"} <= {*ended[count:]}:
                pass
        made = read_plan(plan)
        assert {model.name for unit in made.units for model in unit.models} == {"one", "two"}
        assert all(model.throughput >= model.rate > 0 for unit in made.units for model in unit.models)
        assert len(made.units) == len(states(url)) == 1  # both are little asked, so that one unit is ample
    both = kept(tmp_path)
    assert both["one"].requests > 6  # the streams', too
    assert both["two"].prompts == {2: both["two"].requests}


def test_it_outlives_gateways_and_the_fleet(tmp_path: Path) -> None:
    """What a gateway counted that is told to end is kept, and what one counts that comes later is added."""
    with serving(tmp_path, CONFIG) as (_, url):
        ask(url, "one", prompts=4)
    assert kept(tmp_path)["one"].requests == 4
    with fleet(str(tmp_path / "fleet.yaml"), folder=tmp_path / "s") as running:
        url = running.wait_until_ready()
        ask(url, "one")
        assert main(["restart", "--rolling", "--url", url]) == 0
        ask(url, "one")
        assert main(["traffic", "--url", url]) == 0
        assert running.end(signal.SIGINT) == 0
    found, damaged = decode_hours((tmp_path / "traffic.jsonl").read_bytes())
    assert (sum(hour.requests for hour in found), damaged) == (6, 0)

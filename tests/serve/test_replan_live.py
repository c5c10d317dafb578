"""`kvloom replan --apply` while the fleet serves: streams go on and say the same. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.plan.cost.shapes import read_shape
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit, write_plan
from tests.checkpoints import make_checkpoint
from tests.serve.streaming import call, serving, states, streams

CONFIG = """
kv_memory: 32MiB
models: {{a: {a}, b: {b}}}
rescheduling: {{period: 50ms}}
units: [{{models: [a]}}, {{models: [b]}}]
"""


def together(*paths: Path) -> PlacementPlan:
    """One unit with all of them."""
    share = 1 / len(paths)
    models = tuple(
        PlannedModel(
            name=path.name,
            path=None,
            shape=read_shape(path, 4),
            rate=1.0,
            prompt=3.0,
            output=200.0,
            prefill_share=1.0,
            decode_share=share,
            quota=share,
            throughput=1.0,
        )
        for path in paths
    )
    unit = PlannedUnit(name="all", node="here", device="cpu", gpus=2, kv_bytes=16 << 20, models=models)
    return PlacementPlan(units=(unit,), throughput=2.0, made_by="a test")


def test_two_units_become_one_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: make_checkpoint(tmp_path / name, kind) for name, kind in (("a", "llama"), ("b", "qwen3"))}
    plan = tmp_path / "plan.json"
    write_plan(plan, together(*paths.values()))
    with serving(tmp_path, CONFIG.format(**paths)) as (running, url):
        with streams(url, 200, a=1, b=1) as ended:
            assert main(["replan", str(plan), "--url", url]) == 0
            assert "nothing is changed yet" in capsys.readouterr().out
            assert main(["replan", str(plan), "--url", url, "--apply"]) == 0
            assert capsys.readouterr().out.splitlines()[-1] == "the fleet is as planned"
            assert states(url) == {"unit-2": "up"}
            count = len(ended)
            while not {"a", "b"} <= {*ended[count:]}:
                pass
        assert {*running.children()} - {"scheduler"} == {"gateway", "unit-2"}
        [spec] = call(url, "/admin/placement")["units"]
        assert [model["name"] for model in spec["models"]] == ["a", "b"]

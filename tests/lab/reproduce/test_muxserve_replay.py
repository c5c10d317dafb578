"""Published placements become units, and what they have is set beside what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvloom.lab.reproduce.muxserve.end_to_end import chat
from kvloom.lab.reproduce.muxserve.replay import (
    PUBLISHED_RUNS,
    RUNS,
    MeasuredModel,
    Mesh,
    play_placements,
    published_plan,
    published_runs,
    replayed,
)
from kvloom.lab.reproduce.muxserve.setup import Load, Served
from kvloom.lab.reproduce.published import FOLDER
from kvloom.types.errors import ConfigError
from tests.lab.reproduce.played import played

MODELS = (Served("1-13b", "13b", 2.0), Served("4-7b", "7b", 4.0), Served("7-7b", "7b", 1.0))
FLEX = {
    "llm-1": MeasuredModel("llama-13b", (90, 30), Mesh(2, 1), 1.0, 0.2, 0.05, 4.0),
    "llm-4": MeasuredModel("llama-7b", (80, 40), Mesh(2, 1), 2.0, 0.2, 0.05, 4.0),
    "llm-7": MeasuredModel("llama-7b", (80, 30), Mesh(1, 0), 2.0, 0.2, 0.05, 4.0),
}


def test_a_published_placement_is_a_plan() -> None:
    plan = published_plan(Load(MODELS, 32, 1.0), FLEX)
    assert [(unit.gpus, [model.name for model in unit.models]) for unit in plan.units] == [
        (1, ["7-7b"]),
        (2, ["1-13b", "4-7b"]),
    ]
    assert plan.units[1].kv_bytes == pytest.approx(
        0.51 * 160e9
    )  # as configured for a 7B and a 13B on two GPUs
    assert [(model.prefill_share, model.decode_share) for model in plan.units[1].models] == [
        (0.9, 0.3),
        (0.8, 0.4),
    ]


def test_systems_play_on_the_published_placements_and_kvloom_on_its_own() -> None:
    found = play_placements(Load(MODELS, 4, 2.0), {"flexsm": FLEX}, lambda what, part: None)
    assert list(found) == ["MuxServe", "kvloom"]
    assert all(point.total > 0 for point in found.values())


def test_the_file_is_read_by_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ConfigError, match=FOLDER):
        published_runs()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ConfigError, match=PUBLISHED_RUNS):
        published_runs()
    (tmp_path / PUBLISHED_RUNS).write_text("{}")
    with pytest.raises(ConfigError, match="not what was published"):
        published_runs()
    runs = {run: {"systems": {"flexsm": FLEX}} for run in RUNS.values()}
    (tmp_path / PUBLISHED_RUNS).write_bytes(msgspec.json.encode({"runs": runs}))
    assert published_runs() == {rate: {"flexsm": FLEX} for rate in RUNS}


def test_the_small_scale_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr("kvloom.lab.reproduce.muxserve.replay._SMALL", 64)
    report = played(replayed, least=0.8)
    (cell,) = report.cells
    assert cell.row == "9.5 req/s a model, kvloom"
    assert 0 < cell.ours < max(model.rate for model in chat(9.5).models)

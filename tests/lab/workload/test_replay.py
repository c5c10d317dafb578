"""Streams of asks at other rates and lengths, and of traces for named models."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.workload.make import faster, longer, open_workload, replay
from kvloom.lab.workload.request import Prompts, Segment, WorkloadRequest
from kvloom.lab.workload.traces import NAMELESS
from kvloom.types.errors import ConfigError
from tests.lab.workload.specs import spec


def trace(count: int = 2000) -> list[WorkloadRequest]:
    """Two requests a second; each fourth begins a conversation of four."""
    return [
        WorkloadRequest(
            at=i / 2,
            model=NAMELESS,
            prompt=100 + i % 7,
            output=10,
            priority=i % 2,
            shared=(Segment(0, 30), Segment(1 + i // 4, 50)),
        )
        for i in range(count)
    ]


def replayed(asks: list[WorkloadRequest], **settings: object) -> list[WorkloadRequest]:
    plain = {"rate": ..., "lengths": ..., "seconds": ..., "replay": {"file": "x"}}
    return list(replay(iter(asks), spec(**(plain | settings))))


def test_faster_is_the_same_in_less_time() -> None:
    assert [ask.at for ask in faster(trace(4), 4.0)] == [0, 0.125, 0.25, 0.375]


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 20), st.lists(st.integers(1, 600), max_size=4), st.integers(0, 600))
def test_longer_keeps_what_is_shared(length: float, shared: list[int], own: int) -> None:
    segments = tuple(Segment(i, tokens) for i, tokens in enumerate(shared))
    ask = WorkloadRequest(at=0.0, model="a", prompt=sum(shared) + own or 1, output=7, shared=segments)
    [one] = longer([ask], length)
    held = sum(segment.tokens for segment in one.shared)
    assert [segment.id for segment in one.shared] == list(range(len(shared)))
    assert (one.prompt > held) == (ask.prompt > sum(shared))
    assert abs(one.prompt - ask.prompt * length) <= 1 + len(shared)
    assert len(Prompts(64)(0, one)) == one.prompt
    assert [*longer([ask], 1.0)] == [ask]


def test_a_trace_is_shared_out_among_the_models() -> None:
    made = replayed(trace(), alpha=1.0, models=["a", "b"])
    assert len(made) == 2000
    counts = Counter(ask.model for ask in made)
    assert counts["a"] / 2000 == pytest.approx(2 / 3, abs=0.06)
    models = defaultdict(set)
    for ask in made:
        models[ask.shared[1].id].add(ask.model)
    assert all(len(found) == 1 for found in models.values()), "a conversation stays with its model"
    assert [ask.priority for ask in made[:4]] == [0, 1, 0, 1]


def test_scales_limits_and_ends() -> None:
    kinds = {"file": "x", "rate_scale": 2, "length_scale": 0.5, "max_total": 57}
    made = replayed(trace(), replay=kinds, seconds=10, priorities={5: 1.0})
    assert 0 < len(made) < 40
    assert max(ask.at for ask in made) < 10
    assert max(ask.prompt + ask.output for ask in made) == 57
    assert {ask.priority for ask in made} == {5}
    assert len(replayed(trace(), requests=3)) == 3


def test_a_workload_of_other_models() -> None:
    with pytest.raises(ConfigError, match="asks for `c`; models: names a, b"):
        replayed([WorkloadRequest(at=0.0, model="c", prompt=1, output=1)])


def test_a_trace_lies_beside_its_spec(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    (tmp_path / "s.yaml").write_text("models: [m]\nreplay: {file: t.csv, length_scale: 0.5}\n")
    workload = open_workload(tmp_path / "s.yaml", seed=3)
    assert (workload.header.name, workload.header.seed) == ("s", 3)
    assert list(workload.requests()) == [WorkloadRequest(at=0.0, model="m", prompt=187, output=22)]

"""Decode jobs of several steps on the GPU's executor: the same tokens, however many steps they have and
wherever they are cut."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.exec.cuda.device import GpuDevice, HostEvent, HostStream, PartitionLane, Partitions
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.graphs import DecodeSteps
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from kvloom.types.job import Job, Phase
from kvloom.types.request import StartGenerate
from tests.checkpoints import make_checkpoint
from tests.engines import Answer, ask, body, spec_of
from tests.exec.cuda.devices import COMPUTE, one_lane
from tests.exec.cuda.engines import running_executor

COUNT = 24
PROMPTS = [[(11 * i + 3 * j) % 250 for j in range(5 + 9 * i)] for i in range(3)]


class _Stream(HostStream):
    """Before some waits, counted over all, whatever runs is cut."""

    def __init__(self) -> None:
        self.executor: GpuExecutor | None = None
        self.cuts: set[int] = set()
        self.waits = 0

    def mark(self) -> HostEvent:
        return _Mark(self)


class _Mark(HostEvent):
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        stream = self._stream
        stream.waits += 1
        if stream.executor is not None and stream.waits in stream.cuts:
            for progress in list(stream.executor._progress.values()):
                progress.cut()


class _Kept(GpuExecutor):
    """Engines come and go; its threads stay. seen: the steps that each decode job was to take."""

    seen: list[int]

    def launch(self, job: Job) -> asyncio.Future[object]:  # type: ignore[override]
        if job.phase is Phase.DECODE:
            self.seen.append(job.steps)
        return super().launch(job)  # type: ignore[return-value]

    def close(self) -> None:
        """Not yet."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[_Kept, _Stream]]:
    path = make_checkpoint(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=2)
    stream = _Stream()
    executor = load_executor(spec_of({"m": path}, max_running=4), one_lane(stream), plain_operations())
    executor.__class__ = _Kept
    assert isinstance(executor, _Kept)
    stream.executor = executor
    yield executor, stream
    GpuExecutor.close(executor)


def serve(executor: _Kept, stride: int, bodies: list[StartGenerate]) -> list[Answer]:
    executor.max_steps, executor.seen = stride, []

    async def run() -> list[Answer]:
        async with running_executor(spec_of({"m": Path("unread")}, max_running=4), executor) as engine:
            return await asyncio.gather(*(ask(engine, one) for one in bodies))

    return asyncio.run(run())


def asked(stops: list[tuple[int, ...]]) -> list[StartGenerate]:
    """Greedy, drawn, and drawn from few."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "min_p": 0.01}]
    return [
        body("m", prompt, max_tokens=COUNT, stop_token_ids=stop, **way)
        for prompt, stop, way in zip(PROMPTS, stops, ways, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(kept: tuple[_Kept, _Stream]) -> list[list[int]]:
    """What each request has where a job is one step."""
    answers = serve(kept[0], 1, asked([()] * 3))
    assert set(kept[0].seen) == {1}
    return [answer.tokens[0] for answer in answers]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    stride=st.integers(2, 9),
    cuts=st.sets(st.integers(1, 40), max_size=6),
    stops=st.lists(st.integers(0, COUNT), min_size=3, max_size=3),
)
def test_any_stride_cut_anywhere_gives_the_tokens_of_single_steps(
    kept: tuple[_Kept, _Stream], alone: list[list[int]], stride: int, cuts: set[int], stops: list[int]
) -> None:
    """stops: the place of the token that each request ends by; `COUNT` for none."""
    executor, stream = kept
    stream.waits, stream.cuts = 0, cuts
    ends = [tuple(tokens[at : at + 1]) for tokens, at in zip(alone, stops, strict=True)]
    answers = serve(executor, stride, asked(ends))
    stream.cuts = set()
    assert max(executor.seen, default=stride) == stride or min(stops) < COUNT
    for answer, tokens, end in zip(answers, alone, ends, strict=True):
        count = tokens.index(end[0]) + 1 if end else COUNT
        assert answer.tokens[0] == tokens[:count]
        assert answer.ends[0].reason == ("stop" if end else "length")


def test_a_lone_request_takes_a_job_for_each_stride(
    kept: tuple[_Kept, _Stream], alone: list[list[int]]
) -> None:
    answers = serve(kept[0], 8, asked([()] * 3)[:1])
    assert answers[0].tokens[0] == alone[0]
    assert kept[0].seen == [8, 8, 7]


def test_what_the_host_has_a_say_in_goes_step_by_step(kept: tuple[_Kept, _Stream]) -> None:
    ways: list[dict[str, Any]] = [{"logprobs": 0}, {"logit_bias": {7: 1.0}}, {"presence_penalty": 0.5}]
    for way in ways:
        serve(kept[0], 8, [body("m", PROMPTS[0], max_tokens=4, **way)])
        assert kept[0].seen == [1, 1, 1], way


@pytest.mark.parametrize("pairs", [0, 1])
def test_steps_of_two_models_come_between_each_other(tmp_path: Path, pairs: int) -> None:
    """On one lane, whose inputs and logits both use, and on two."""
    whole, first, second = (
        PartitionLane(size, HostStream()) for size in (COMPUTE, COMPUTE // 2, COMPUTE // 2)
    )
    device = GpuDevice(torch.device("cpu"), COMPUTE, Partitions(whole, [(first, second)] * pairs))
    kinds = {"m": "llama", "o": "qwen3"}
    paths = {name: make_checkpoint(tmp_path / name, kind) for name, kind in kinds.items()}
    spec = spec_of(paths, max_running=4)
    executor = load_executor(spec, device, plain_operations())
    executor.__class__ = _Kept
    assert isinstance(executor, _Kept)

    async def run(stride: int) -> list[list[int]]:
        executor.max_steps, executor.seen = stride, []
        async with running_executor(spec, executor) as engine:
            asked = [body(name, p, max_tokens=COUNT) for p in PROMPTS for name in kinds]
            return [answer.tokens[0] for answer in await asyncio.gather(*(ask(engine, one) for one in asked))]

    stepped, strode = asyncio.run(run(1)), asyncio.run(run(8))
    GpuExecutor.close(executor)
    assert max(executor.seen) == 8
    assert strode == stepped


def test_what_is_recorded_meanwhile_changes_no_step(kept: tuple[_Kept, _Stream]) -> None:
    """A job's inputs are made for the recordings that there are when it begins."""
    executor = kept[0]
    asked = [body("m", prompt, max_tokens=COUNT) for prompt in PROMPTS]
    wanted = [answer.tokens[0] for answer in serve(executor, 8, asked)]
    (steps,) = executor._steps.values()
    everything, steps_of, turns = steps._steps, executor._steps_of, Counter[int]()

    def late(job: Job, lane: PartitionLane) -> DecodeSteps:
        turns[id(job)] += 1
        steps._steps = [one for one in everything if one.rows != 4 or turns[id(job)] > 1]
        return steps_of(job, lane)

    executor._steps_of = late  # type: ignore[method-assign]
    try:
        again = [body("m", prompt, max_tokens=COUNT) for prompt in PROMPTS]
        assert [answer.tokens[0] for answer in serve(executor, 8, again)] == wanted
    finally:
        steps._steps = everything
        del executor._steps_of
    assert max(turns.values()) > 1


def test_room_that_is_missing_while_serving_is_asked_for_once(
    kept: tuple[_Kept, _Stream], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (steps,) = kept[0]._steps.values()
    fresh = DecodeSteps(steps._model, steps._lane, steps._buffers)

    def short(rows: int) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fresh, "record", short)
    plain: set[str] = set()
    for _ in range(3):
        fresh.record_late(2, plain)
    assert not plain
    assert [one.message for one in caplog.records] == [
        "m decodes without a graph of 2 rows: CUDA out of memory"
    ]

"""The GPU's executor in an engine: side by side, short of memory, out of what was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.exec.cuda import graphs
from kvloom.exec.cuda.device import GpuDevice, HostStream, Recording
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.graphs import prefill_sizes
from kvloom.types.job import Job
from kvloom.types.request import StartGenerate
from kvloom.types.spec import EngineSpec
from tests.checkpoints import make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.exec.cuda.devices import one_lane
from tests.exec.cuda.engines import running_on_device

DEADLINE = 120.0
PROMPTS = [[(11 * i + 3 * j) % 250 for j in range(7 + 7 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, kind) for name, kind in (("a", "qwen3"), ("b", "mistral"))}


def asked(names: list[str]) -> list[Any]:
    """Greedy, drawn, bent and watched; several choices of one prompt; all models at once."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {7: 2.0}},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"min_tokens": 3, "stop_token_ids": (9,)},
    ]
    return [
        body(name, prompt, n=1 + i % 2, max_tokens=5, **way)
        for name in names
        for i, (prompt, way) in enumerate(zip(PROMPTS, ways, strict=True))
    ]


def tokens(answers: list[Answer]) -> list[dict[int, list[int]]]:
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def wanted(paths: dict[str, Path]) -> list[Answer]:
    """The CPU's executor's; those of model `a` first."""

    async def run() -> list[Answer]:
        async with running(spec_of(paths)) as engine:
            return await asyncio.gather(*(ask(engine, one) for one in asked(list(paths))))

    return asyncio.run(run())


async def on_device(
    spec: EngineSpec, device: GpuDevice | None = None, requests: Sequence[StartGenerate] = ()
) -> tuple[list[Answer], GpuExecutor, int]:
    """And how many preemptions there were. requests: all that are `asked` where none are given."""
    requests = requests or asked([model.name for model in spec.models])
    async with running_on_device(spec, device) as (engine, executor):
        answers = await asyncio.gather(*(ask(engine, one) for one in requests))
        load = await engine.load()
        return answers, executor, sum(one.preemptions_total for one in load.models.values())


def test_two_models_side_by_side_give_the_cpus_tokens(paths: dict[str, Path], wanted: list[Answer]) -> None:
    """With shares, forks that copy a page, draws, and pages that are cached and read by others."""
    spec = spec_of(paths, max_running=4)  # more sequences than that are waiting
    answers, executor, _ = asyncio.run(on_device(spec))
    assert tokens(answers) == tokens(wanted)
    for found, want in zip(answers, wanted, strict=True):
        if want.prompt is not None:
            assert found.prompt is not None
            pairs = zip(found.prompt, want.prompt, strict=True)
            assert all(abs(one.logprob - other.logprob) < 1e-4 for one, other in pairs)
    assert all(lane.jobs == 0 for lane in executor._device.partitions.lanes)


def test_short_of_blocks_preempted_and_computed_again(paths: dict[str, Path]) -> None:
    """Each of three grows to most of the pool."""
    spec = spec_of({"a": paths["a"]}, max_running=8, kv_bytes=2048 * 36)
    requests = [body("a", prompt, max_tokens=80, temperature=0.7) for prompt in PROMPTS[:3]]

    async def on_the_cpu() -> list[Answer]:
        async with running(spec_of({"a": paths["a"]})) as engine:
            return await asyncio.gather(*(ask(engine, one) for one in requests))

    answers, _, preemptions = asyncio.run(on_device(spec, requests=requests))
    assert preemptions > 0
    assert tokens(answers) == tokens(asyncio.run(on_the_cpu()))


class _Unrecordable(HostStream):
    def record(self, work: Callable[[], None]) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_model_that_cannot_be_recorded_decodes_step_by_step(
    paths: dict[str, Path], wanted: list[Answer], caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of({"a": paths["a"]}, max_running=4)
    answers, _, _ = asyncio.run(on_device(spec, one_lane(_Unrecordable())))
    assert tokens(answers) == tokens(wanted[: len(answers)])
    assert [record.message for record in caplog.records if "without graphs" in record.message] == [
        "a runs without graphs: operation not permitted when stream is capturing"
    ]


class _Counting(HostStream):
    """Counts what is done again out of recordings."""

    replays = 0

    def record(self, work: Callable[[], None]) -> Recording:
        recording = super().record(work)

        def count() -> None:
            self.replays += 1
            recording.replay()

        return super().record(count)


def test_short_prefills_are_recorded_and_others_are_not(paths: dict[str, Path]) -> None:
    """With the tokens that the CPU draws. The only token of each is drawn from its prefill."""
    path = {"a": paths["a"]}
    prompt, long = PROMPTS[2], [(7 * j) % 250 for j in range(40)]
    requests = {
        "short": body("a", prompt, max_tokens=1),
        "two choices": body("a", PROMPTS[3], max_tokens=1, n=2, temperature=1.0),
        "more logits than a recording has": body("a", PROMPTS[4], max_tokens=1, prompt_logprobs=0),
        "in three chunks": body("a", long, max_tokens=1),
    }

    async def replays() -> tuple[list[Answer], list[int]]:
        spec, stream = spec_of(path, max_running=4, chunk_tokens=16), _Counting()
        async with running_on_device(spec, one_lane(stream)) as (engine, _):
            answers, counts = [], []
            for request in requests.values():
                before = stream.replays
                answers.append(await ask(engine, request))
                counts.append(stream.replays - before)
            return answers, counts

    async def on_the_cpu() -> list[Answer]:
        async with running(spec_of(path)) as engine:
            return [await ask(engine, one) for one in requests.values()]

    answers, counts = asyncio.run(replays())
    chunks = [-(-len(one.prompt) // 16) for one in requests.values()]
    assert counts == [chunks[0], chunks[1], 1, chunks[3]]  # the last 3 of 35 tokens have few logits
    assert tokens(answers) == tokens(asyncio.run(on_the_cpu()))


def test_sizes_of_recorded_prefills_follow_from_a_layers_size() -> None:
    """A large layer keeps the device busy while the host asks for it. A whole chunk is recorded always."""
    assert prefill_sizes(2048, 8_030_000_000, 32) == (2048, 512, 384, 256, 192, 128, 64, 32, 16)
    assert prefill_sizes(2048, 1_240_000_000, 16)[:4] == (2048, 1536, 1024, 768)
    assert prefill_sizes(100, 1_000_000, 2) == (100, 64, 32, 16)
    assert prefill_sizes(512, 10**15, 2) == (512,)


def test_a_recording_of_a_whole_chunk_takes_little_padding(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model for which nothing shorter is recorded."""
    monkeypatch.setattr(graphs, "WORK", 0)
    prompts = [[(5 * i + j) % 250 for j in range(size)] for i, size in enumerate((5, 13, 14, 16))]

    async def run() -> tuple[list[Answer], list[int]]:
        stream, found, counts = _Counting(), [], []
        spec = spec_of({"a": paths["a"]}, max_running=4, chunk_tokens=16)
        async with running_on_device(spec, one_lane(stream)) as (engine, _):
            for prompt in prompts:
                before = stream.replays
                found.append(await ask(engine, body("a", prompt, max_tokens=1)))
                counts.append(stream.replays - before)
        return found, counts

    async def on_the_cpu() -> list[Answer]:
        async with running(spec_of({"a": paths["a"]})) as engine:
            return [await ask(engine, body("a", prompt, max_tokens=1)) for prompt in prompts]

    found, counts = asyncio.run(run())
    assert counts == [0, 0, 1, 1]
    assert tokens(found) == tokens(asyncio.run(on_the_cpu()))


def test_out_of_memory_fails_the_job_and_nothing_else(paths: dict[str, Path]) -> None:
    async def run() -> tuple[Answer, Answer]:
        async with running_on_device(spec_of({"a": paths["a"]}, max_running=2)) as (engine, executor):
            prefill = executor._prefill

            def short(model: Any, job: Job, *rest: Any) -> Any:
                if job.tokens.size > 20:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return prefill(model, job, *rest)

            executor._prefill = short  # type: ignore[method-assign, assignment]
            long, brief = body("a", list(range(50)), max_tokens=4), body("a", list(range(9)), max_tokens=4)
            return await ask(engine, long), await ask(engine, brief)

    failed, served = asyncio.run(run())
    assert (failed.ends[0].reason, failed.tokens) == ("error", {})
    assert "Unavailable" in failed.ends[0].message
    assert len(served.tokens[0]) == 4


def test_a_device_that_has_failed_is_told_of(paths: dict[str, Path]) -> None:
    async def run() -> str:
        async with running_on_device(spec_of({"a": paths["a"]}, max_running=2)) as (engine, executor):

            def broken(*_: Any) -> Any:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

            executor._prefill = broken  # type: ignore[method-assign, assignment]
            await ask(engine, body("a", [1, 2, 3], max_tokens=4))
            return await asyncio.wait_for(executor.lost(), DEADLINE)

    assert asyncio.run(run()) == "cpu has failed: CUDA error: an illegal memory access was encountered"

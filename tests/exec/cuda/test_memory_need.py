"""The pool's size: what jobs need is measured first, and the pool gets what that and the weights leave."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.cuda.parallel import ParallelGpuExecutor
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.counted import CountedDevice, MemoryCount, counted_device
from tests.exec.cuda.engines import running_executor
from tests.exec.cuda.rank import start

TOTAL = 8 << 20
ROWS, CHUNK = 4, 16
ROUNDED = 64  # bytes
COSTLY: dict[str, Any] = {
    **{"max_tokens": 6, "temperature": 1.0, "logit_bias": {3: 1.0}},
    **{"logprobs": 20, "prompt_logprobs": 20},
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        name: make_checkpoint(folder / name, kind, num_hidden_layers=1)
        for name, kind in (("a", "qwen3"), ("b", "llama"))
    }
    return spec_of(paths, max_running=ROWS, chunk_tokens=CHUNK, kv_bytes=0)


@pytest.fixture(autouse=True)
def nothing_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.cuda.loader.SPARE", 0.0)


@contextmanager
def counted(total: int = TOTAL, pairs: int = 1) -> Iterator[CountedDevice]:
    """A device of so many bytes, which this thread uses meanwhile."""
    device = counted_device(MemoryCount(total), pairs=pairs)
    with device.count.watching(device.torch):
        yield device


def load(spec: EngineSpec, device: CountedDevice) -> GpuExecutor:
    return load_executor(spec, device, plain_operations())


def size(executor: GpuExecutor) -> int:
    return executor.blocks * executor.arena.block_bytes


def test_the_pool_gets_what_weights_and_jobs_leave_and_the_largest_jobs_run(
    spec: EngineSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of two models at once, on two partitions: prompts of a chunk, each of whose log-probabilities is
    asked for, and as many draws as there may be, in which the host has a say. The measuring leaves
    nothing."""
    caplog.set_level(logging.INFO, "kvloom.exec.cuda.loader")

    async def serve() -> tuple[int, list[str]]:
        with counted() as device:
            executor = load(spec, device)
            left = TOTAL - device.count.live
            asked = [
                body(name, [(7 * i + j) % 250 for j in range(CHUNK - i % 3)], **COSTLY)
                for name in ("a", "b")
                for i in range(ROWS + 2)
            ]
            async with running_executor(spec, executor) as engine:
                answers = await asyncio.gather(*(ask(engine, one) for one in asked))
        return left, [answer.ends[0].reason for answer in answers]

    left, reasons = asyncio.run(serve())
    assert set(reasons) == {"length"}
    [told] = [one.message for one in caplog.records if "the pool gets" in one.message]
    matched = re.fullmatch(
        r"weights leave [\d,]+ of the 8,388,608 bytes of cpu, and jobs need [\d,]+ \([\d,]+ for inputs, "
        r"recordings and libraries, ([\d,]+) for those that run at the same time\); of ([\d,]+) that are "
        r"left the pool gets \2",
        told,
    )
    assert matched is not None, told
    assert 0 <= left - int(matched[1].replace(",", "")) <= spec.block_bytes + ROUNDED


def test_a_pool_beside_which_jobs_do_not_fit_is_refused_with_the_bytes(spec: EngineSpec) -> None:
    with counted() as device:
        most = size(load(spec, device))
    fits, more = (replace(spec, kv_bytes=most + some) for some in (0, 2 * spec.block_bytes))
    with counted() as device:
        assert size(load(fits, device)) == most
    with counted() as device, pytest.raises(ConfigError) as caught:
        load(more, device)
    assert re.fullmatch(
        r"kv_memory: weights leave [\d,]+ of the 8,388,608 bytes of cpu, jobs need [\d,]+ \(.*\), and "
        rf"[\d,]+ are left for the {more.kv_bytes:,} that it asks for; fewer bytes, smaller models, or a "
        "smaller chunk_tokens or max_running, are right",
        caught.value.message,
    )


def test_each_rank_has_a_pool_for_which_the_one_with_the_least_room_has_room(spec: EngineSpec) -> None:
    """The other one is a process whose device has no bounds."""
    shared = replace(spec, models=spec.models[1:], tensor_parallel=2, device="cuda:0")
    with counted(pairs=0) as device:
        executor = ParallelGpuExecutor.over(shared, device, plain_operations(), start=start, seconds=30)
        assert TOTAL / 2 < size(executor) < TOTAL
        assert 0 < TOTAL - device.count.live < TOTAL / 8
        executor.close()


def test_a_pool_beside_which_weights_do_not_fit_is_refused_before_they_are_read(spec: EngineSpec) -> None:
    with counted() as device, pytest.raises(ConfigError) as caught:
        load(replace(spec, kv_bytes=TOTAL - 2048), device)
    assert re.match(
        r"models\.a: its weights need [\d,]+ bytes beside a pool of 8,386,560, and 8,388,608 of 8,388,608 "
        r"are free on cpu; ",
        caught.value.message,
    )


def test_weights_that_leave_too_little_to_run_jobs(spec: EngineSpec) -> None:
    alone = replace(spec, models=spec.models[:1], max_running=64)
    with counted(400_000) as device, pytest.raises(ConfigError) as caught:
        load(alone, device)
    assert re.match(
        r"kv_memory: weights leave [\d,]+ of the 400,000 bytes of cpu, too little to run jobs; fewer or "
        r"smaller models, or a smaller chunk_tokens or max_running, are right",
        caught.value.message,
    )

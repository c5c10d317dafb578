"""Law 2 over two ranks of the GPU's executor, one of them another process: gloo in NCCL's place."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.layers import DeviceGatedMLP
from kvloom.exec.cuda.loader import all_alike
from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.cuda.parallel import ParallelGpuExecutor
from kvloom.exec.cuda.prefill import Draws
from kvloom.exec.parallel.group import RankGroup
from kvloom.exec.parallel.slicing import Summed
from kvloom.types.errors import Unavailable
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import one_lane
from tests.exec.cuda.engines import running_executor, running_on_device
from tests.exec.cuda.rank import start
from tests.exec.ranks import both
from tests.oracle import Oracle

LENGTHS = (1, 17, WINDOW + 1, 70)  # ragged; past the window; more than a chunk
COUNT = 5


def spec(paths: dict[str, Path], kv_bytes: int = 4 << 20) -> EngineSpec:
    """Each rank has half of the pool."""
    made = spec_of(paths, max_running=4, kv_bytes=kv_bytes)
    return replace(made, tensor_parallel=2, device="cuda:0")


@asynccontextmanager
async def running(wanted: EngineSpec) -> AsyncIterator[tuple[Engine, ParallelGpuExecutor]]:
    executor = ParallelGpuExecutor.over(wanted, one_lane(), plain_operations(), start=start, seconds=30)
    async with running_executor(wanted, executor) as engine:
        yield engine, executor


async def one_job_fails(engine: Engine) -> None:
    """At the draw, when all ranks have done their parts: the unit serves on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draws, "take", lambda *_: 1 / 0)
        failed = await ask(engine, body("a", [1, 2, 3], max_tokens=1))
    assert "ZeroDivisionError" in failed.ends[0].message


async def one_gets_stuck(engine: Engine, executor: ParallelGpuExecutor) -> None:
    """The rank reads its orders no more, as one whose device hangs."""
    executor._seconds = 0.2
    executor._ranks._members[0].process.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(ask(engine, body("a", [1, 2, 3])))
    assert await executor.lost() == "unit-0: no job has ended within 0.2 s: a rank is stuck"
    executor._ranks.close()  # where an engine's process ends
    assert (await asyncio.gather(asked, return_exceptions=True))[0]


async def draws(engine: Engine, prompts: dict[str, list[list[int]]]) -> list[object]:
    """Draws on the device and by the host, choices that share pages, log-probabilities to 3 digits."""
    told: list[object] = []
    for model, some in prompts.items():
        drawn = await ask(engine, body(model, some[1], n=3, temperature=1.0, max_tokens=5))
        bent = await ask(engine, body(model, some[1], temperature=0.7, presence_penalty=1.0, max_tokens=5))
        scored = await ask(engine, body(model, some[2], max_tokens=1, prompt_logprobs=0))
        told += [sorted(drawn.tokens.items()), bent.tokens]
        told.append([round(one.logprob, 3) for one in scored.prompt or ()])
    return told


def test_tokens_are_those_of_one_rank_and_of_transformers(tmp_path: Path) -> None:
    paths = {
        name: make_checkpoint(tmp_path / name, kind, num_key_value_heads=2, num_hidden_layers=2)
        for name, kind in (("a", "qwen3"), ("b", "gemma2"))
    }
    rng = random.Random(0)
    prompts = {name: [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS] for name in paths}
    two = spec(paths, kv_bytes=2 * 24 * 2048)  # too little for all at once: as jobs fall, some are preempted

    async def over_two() -> tuple[list[list[int]], list[object]]:
        async with running(two) as (engine, executor):
            assert {cache.geometry.kv_heads for cache in engine.pool.caches.values()} == {1}
            assert engine.pool.total == 24
            assert (executor.max_steps, executor.lookahead) == (1, 0)
            kinds = [type(part) for part in executor._models["a"].module.modules()]
            assert (kinds.count(DeviceGatedMLP), kinds.count(Summed)) == (2, 4)
            asked = [ask(engine, body(name, p, max_tokens=COUNT)) for name in paths for p in prompts[name]]
            found = [answer.tokens[0] for answer in await asyncio.gather(*asked)]
            again = await ask(engine, body("a", prompts["a"][3], max_tokens=COUNT))
            assert again.ends[0].cached_tokens
            assert again.tokens[0] == found[3]
            await one_job_fails(engine)
            told = await draws(engine, prompts)
            await one_gets_stuck(engine, executor)
            return found, told

    async def over_one() -> list[object]:
        async with running_on_device(spec_of(paths, max_running=4)) as (engine, _):
            return await draws(engine, prompts)

    found, told = asyncio.run(over_two())
    answers = iter(found)
    for name, path in paths.items():
        oracle = Oracle(path)
        for prompt in prompts[name]:
            oracle.check(prompt, next(answers))
    assert told == asyncio.run(over_one())


def test_ranks_agree_on_blocks_and_on_what_is_recorded(tmp_path: Path) -> None:
    def run(group: RankGroup) -> list[object]:
        agree = all_alike(group)
        found: list[object] = [group.least(7 - group.rank), agree(True), agree(False)]
        try:
            agree(group.rank == 0)
        except Unavailable as error:
            found.append(error.message)
        return found

    first, second = both(tmp_path, run)
    assert first == [6, True, False, "decode steps could be recorded at some ranks and not at others"]
    assert second == [6, True, False]

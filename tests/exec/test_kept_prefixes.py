"""Law 2 for engines that start anew over the files of `cache_dir`, in each format of K and V."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.checkpoint import open_checkpoint
from kvloom.exec.cpu.executor import load_executor
from kvloom.serve.engine import open_store, open_transport
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, running, running_over, spec_of

MODEL = "m"
LENGTHS = (16, 17, 64, 131)
COUNT = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kept") / "model", "qwen2")


def prompts() -> list[list[int]]:
    rng = random.Random("kept")
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def keeping(path: Path, cache: Path, kv_dtype: KVDtype = "auto") -> EngineSpec:
    spec = spec_of({MODEL: path})
    models = tuple(replace(model, kv_dtype=kv_dtype) for model in spec.models)
    return replace(spec, models=models, cache_dir=str(cache), cache_size=1 << 30)


class StandingClock:
    """Time stands still, so that no disk is late."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def life(spec: EngineSpec) -> AsyncIterator[Engine]:
    """An engine with a store of its own; afterwards laws 1 and 4 hold."""
    executor = load_executor(spec)
    store, transport = open_store(spec, executor), open_transport(spec, executor.arena)
    async with running_over(spec, executor, transport, clock=StandingClock(), store=store) as engine:
        yield engine


async def answers(engine: Engine) -> list[list[int]]:
    """The tokens after each prompt, greedily and one after the other, so that no batch is another."""
    found: list[Answer] = [
        await ask(engine, body(MODEL, prompt, max_tokens=COUNT, temperature=0.0)) for prompt in prompts()
    ]
    return [answer.tokens[0] for answer in found]


async def restored(engine: Engine) -> int:
    return (await engine.load()).models[MODEL].restored_tokens_total


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "int8"])
def test_a_restarted_engine_goes_on_from_files_and_makes_the_same_tokens(
    path: Path, tmp_path: Path, kv_dtype: KVDtype
) -> None:
    spec = keeping(path, tmp_path / "cache", kv_dtype)

    async def test() -> None:
        async with running(replace(spec, cache_dir=None)) as engine:
            alone = await answers(engine)
        async with life(spec) as engine:
            assert await answers(engine) == alone
            assert await restored(engine) == 0
            width = (await engine.load()).models[MODEL].page_tokens
        for _ in range(2):
            async with life(spec) as engine:
                assert await answers(engine) == alone
                assert await restored(engine) == sum(length - length % width for length in LENGTHS)

    asyncio.run(test())


def test_formats_do_not_find_each_others_pages(path: Path, tmp_path: Path) -> None:
    async def test() -> None:
        for kv_dtype in ("auto", "int8", "bfloat16"):
            async with life(keeping(path, tmp_path, kv_dtype)) as engine:
                await answers(engine)
                assert await restored(engine) == 0

    asyncio.run(test())


def test_a_pool_for_one_prompt_has_the_others_in_files(path: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with running(replace(keeping(path, tmp_path), cache_dir=None)) as engine:
            alone = await answers(engine)
            total = engine.pool.total
            most = (await engine.load()).models[MODEL].blocks(max(LENGTHS) + COUNT)
        assert total > 2 * most
        async with life(replace(keeping(path, tmp_path), kv_bytes=(most + 20) * 2048)) as engine:
            assert await answers(engine) == alone
            assert await restored(engine) == 0
            assert await answers(engine) == alone
            assert await restored(engine) > 0

    asyncio.run(test())


def test_damaged_files_and_a_lost_folder_cost_the_cache_alone(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = keeping(path, cache)

    async def test() -> None:
        async with life(spec) as engine:
            alone = await answers(engine)
        for number, file in enumerate(files(cache)):
            data = bytearray(file.read_bytes())
            data[(number * 7919) % len(data)] ^= 1 << number % 8
            file.write_bytes(data[: len(data) // 2] if number % 3 == 0 else data)
        async with life(spec) as engine:
            assert await answers(engine) == alone
            assert await restored(engine) == 0
        assert files(cache), "written anew"
        async with life(spec) as engine:
            shutil.rmtree(cache)
            cache.touch()  # a file in its place
            assert await answers(engine) == alone

    asyncio.run(test())


def test_changed_weights_are_another_model(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    first = open_checkpoint(str(copy)).identity()
    assert open_checkpoint(str(copy)).identity() == first
    (weights,) = open_checkpoint(str(copy)).weights
    stamp = weights.stat().st_mtime_ns
    os.utime(weights, ns=(stamp, stamp + 1))
    assert open_checkpoint(str(copy)).identity() != first
    os.utime(weights, ns=(stamp, stamp))
    assert open_checkpoint(str(copy)).identity() == first
    config = copy / "config.json"
    config.write_text(config.read_text() + "\n")
    assert open_checkpoint(str(copy)).identity() != first


def test_in_the_hubs_cache_a_file_is_known_by_its_digest(path: Path, tmp_path: Path) -> None:
    """It is the same after another download."""
    found = []
    for home, stamp in (("a", 1), ("b", 2)):
        snapshot, blobs = tmp_path / home / "snapshots" / "main", tmp_path / home / "blobs"
        for folder in (snapshot, blobs):
            folder.mkdir(parents=True)
        for file in path.iterdir():
            blob = blobs / f"digest-of-{file.name}"
            shutil.copy(file, blob)
            os.utime(blob, (stamp, stamp))
            (snapshot / file.name).symlink_to(blob)
        found.append(open_checkpoint(str(snapshot)).identity())
    assert found[0] == found[1]

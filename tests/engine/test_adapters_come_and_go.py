"""Adapters that are loaded and unloaded while their base serves, and whose weights give way in the pool."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.serve.engine import open_store, open_transport
from kvloom.types.client import Frames
from kvloom.types.errors import BadRequest, Conflict, Unavailable, UnknownModel
from kvloom.types.job import ProvenAdapter
from kvloom.types.request import Event
from kvloom.types.spec import AdapterSpec, EngineSpec
from kvloom.types.verbs import LoadAdapter, UnloadAdapter
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.engine.plays import until
from tests.engines import ask, body, running, running_over, spec_of
from tests.oracle import Oracle

PROMPT = [7, 3, 9, 1, 5, 40, 2]
LONG = list(range(1, 65))
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", "qwen2")
    make_checkpoint(folder / "other", "llama")
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, base, seed=seed)
        merge(folder / f"{name}-merged", base, folder / name)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for name in NAMES:
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def spec(made: Path, *adapters: AdapterSpec, kv_bytes: int = 4 << 20) -> EngineSpec:
    found = spec_of({"base": made / "base"}, kv_bytes=kv_bytes)
    return replace(found, models=(replace(found.models[0], adapters=adapters),))


def loading(name: str, path: Path) -> LoadAdapter:
    return LoadAdapter(base="base", name=name, path=str(path))


async def check(engine: Engine, name: str, made: Path, of: str, prompt: list[int] = PROMPT) -> int:
    """The tokens of `name` are those of the merged weights of `of`. Returns how many it found cached."""
    answer = await ask(engine, body(name, prompt, max_tokens=12))
    merged = "base" if of == "base" else f"{of}-merged"
    Oracle(made / merged).check(prompt, answer.tokens[0])
    return answer.ends[0].cached_tokens


async def names(engine: Engine) -> set[str]:
    return {card.name for card in await engine.models()}


def test_an_adapter_comes_and_goes_while_its_base_serves(made: Path) -> None:
    async def test() -> None:
        async with running(spec(made)) as engine:
            with pytest.raises(UnknownModel):
                await ask(engine, body("x", PROMPT))
            busy = asyncio.create_task(check(engine, "base", made, "base", LONG))
            for _ in range(2):  # the second is the same again
                await engine.load_adapter(loading("x", made / "one"))
            assert await names(engine) == {"base", "x"}
            assert engine.pool.weights > 0
            await check(engine, "x", made, "one")
            await busy
            await engine.unload_adapter(UnloadAdapter(name="x"))
            assert await names(engine) == {"base"}
            assert engine.pool.weights == 0
            with pytest.raises(UnknownModel):
                await ask(engine, body("x", PROMPT))
            with pytest.raises(UnknownModel, match="the adapter x is not served here"):
                await engine.unload_adapter(UnloadAdapter(name="x"))
            await check(engine, "base", made, "base")

    asyncio.run(test())


def test_requests_of_an_unloaded_adapter_run_to_their_end(made: Path) -> None:
    async def test() -> None:
        async with running(spec(made)) as engine:
            await engine.load_adapter(loading("x", made / "one"))
            frames = engine.start_generate(body("x", PROMPT, max_tokens=40))
            events: list[Event] = []
            while not events:
                events += await anext(frames)
            await engine.unload_adapter(UnloadAdapter(name="x"))
            await engine.unload_adapter(UnloadAdapter(name="x"))
            assert await names(engine) == {"base"}
            with pytest.raises(UnknownModel):
                await ask(engine, body("x", PROMPT))
            with pytest.raises(Conflict, match="still run; load it again once they have ended"):
                await engine.load_adapter(loading("x", made / "two"))
            async for frame in frames:
                events += frame
            tokens = [event.token for event in events if hasattr(event, "token")]
            assert len(tokens) == 40
            Oracle(made / "one-merged").check(PROMPT, tokens)
            assert engine.pool.weights == 0
            await engine.load_adapter(loading("x", made / "two"))
            await check(engine, "x", made, "two")

    asyncio.run(test())


def test_a_caller_of_an_unloaded_adapter_hangs_up_while_it_waits(made: Path) -> None:
    """The engine has one place, so the adapter's request is still in the queue."""

    async def test() -> None:
        async with running(replace(spec(made), max_running=1)) as engine:
            await engine.load_adapter(loading("x", made / "one"))
            first = engine.start_generate(body("base", PROMPT, max_tokens=200))
            second = engine.start_generate(body("x", PROMPT, max_tokens=4))
            for frames in (first, first, second):
                await anext(frames)
            await engine.unload_adapter(UnloadAdapter(name="x"))
            await second.aclose()
            assert engine.pool.weights == 0
            await first.aclose()
            await check(engine, "base", made, "base")
            await engine.load_adapter(loading("x", made / "two"))
            await check(engine, "x", made, "two")

    asyncio.run(test())


def test_another_adapter_of_the_same_name_has_prefixes_of_its_own(made: Path) -> None:
    async def test() -> None:
        async with running(spec(made)) as engine:
            for of in ("one", "two"):
                await engine.load_adapter(loading("x", made / of))
                assert await check(engine, "x", made, of, LONG) == 0
                assert await check(engine, "x", made, of, LONG) > 0
                await engine.unload_adapter(UnloadAdapter(name="x"))

    asyncio.run(test())


def test_adapters_that_nobody_uses_give_way_and_come_back(made: Path) -> None:
    """The pool holds the weights of one of three beside what runs."""

    async def test() -> None:
        adapters = [AdapterSpec(name, str(made / name)) for name in NAMES]
        async with running(spec(made, *adapters, kv_bytes=120 << 10)) as engine:
            pool = engine.pool
            for name in (*NAMES, "base", *NAMES):
                await check(engine, name, made, name, LONG[:20])
                pool.check()
                assert pool.available == pool.total
                assert 0 <= pool.weights < pool.total
            assert pool.weights > 0
            held = pool.weights
            blocks = pool.yield_to_weights(pool.total)  # whoever wants all has all
            assert (held, pool.weights) == (held, pool.total)
            pool.take_from_weights(blocks)
            await check(engine, "one", made, "one")
            mixed = [body(name, PROMPT, max_tokens=12) for name in (*NAMES, "base") * 3]
            answers = await asyncio.gather(*(ask(engine, one) for one in mixed))
            for one, answer in zip(mixed, answers, strict=True):
                merged = "base" if one.model == "base" else f"{one.model}-merged"
                Oracle(made / merged).check(PROMPT, answer.tokens[0])

    asyncio.run(test())


@asynccontextmanager
async def crowded(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Engine, Frames, list[str]]]:
    """A unit with room for one of three adapters, a stream of the first one, and which are read from now
    on."""
    adapters = [AdapterSpec(name, str(made / name)) for name in NAMES]
    unit = spec(made, *adapters, kv_bytes=120 << 10)
    executor, reads = load_executor(unit), list[str]()
    assert executor.adapters is not None
    read = executor.adapters.read

    def noted(base: str, adapter: AdapterSpec) -> asyncio.Future[ProvenAdapter]:
        reads.append(adapter.name)
        return read(base, adapter)

    async with running_over(unit, executor, open_transport(unit, executor.arena)) as engine:
        let_go(engine)
        stream = engine.start_generate(body("one", PROMPT, max_tokens=40))
        await anext(stream)
        monkeypatch.setattr(executor.adapters, "read", noted)
        yield engine, stream, reads


async def turns() -> None:
    """Lets all that can go on by itself do so."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_the_adapter_of_the_most_urgent_request_comes_first(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with crowded(made, monkeypatch) as (engine, stream, reads):
            asked = []
            for name, priority in (("two", 0), ("three", -1)):
                one = replace(body(name, PROMPT, max_tokens=4), priority=priority)
                asked.append(asyncio.create_task(ask(engine, one)))
                await turns()
            assert reads == []
            await stream.aclose()
            await asyncio.gather(*asked)
            assert reads == ["three", "two"]

    asyncio.run(test())


def test_an_adapter_that_nobody_waits_for_any_more_is_not_read(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with crowded(made, monkeypatch) as (engine, stream, reads):
            gone, stays = (
                asyncio.create_task(ask(engine, body(name, PROMPT, max_tokens=4)))
                for name in ("two", "three")
            )
            await turns()
            gone.cancel()
            await turns()
            await stream.aclose()
            await stays
            assert reads == ["three"]
            await check(engine, "two", made, "two")

    asyncio.run(test())


def test_other_weights_in_the_same_folder_are_another_adapter(made: Path, folder: Path) -> None:
    """The unload has not reached this unit."""

    async def test() -> None:
        async with running(spec(made)) as engine:
            await engine.load_adapter(loading("x", folder / "one"))
            await check(engine, "x", made, "one", LONG)
            shutil.rmtree(folder / "one")
            shutil.copytree(made / "two", folder / "one")
            stream = engine.start_generate(body("x", PROMPT, max_tokens=40))
            await anext(stream)
            with pytest.raises(Conflict, match="whose folder had other weights; load it again once they"):
                await engine.load_adapter(loading("x", folder / "one"))
            await stream.aclose()
            await until(lambda: engine.pool.available == engine.pool.total)  # the job under way has ended
            await engine.load_adapter(loading("x", folder / "one"))
            assert await check(engine, "x", made, "two", LONG) == 0
            shutil.rmtree(folder / "one")
            with pytest.raises(BadRequest, match="has no adapter_config"):
                await engine.load_adapter(loading("x", folder / "one"))

    asyncio.run(test())


def let_go(engine: Engine) -> None:
    """All adapters give way."""
    engine.pool.take_from_weights(engine.pool.yield_to_weights(engine.pool.total))


@pytest.mark.parametrize("how", ["vanished", "changed"])
def test_files_that_are_not_as_they_were_end_the_request_and_no_other(
    made: Path, folder: Path, how: str
) -> None:
    async def test() -> None:
        async with running(spec(made, AdapterSpec("one", str(folder / "one")))) as engine:
            await engine.load_adapter(loading("two", folder / "two"))
            await check(engine, "one", made, "one")
            let_go(engine)
            shutil.rmtree(folder / "one")
            if how == "changed":
                shutil.copytree(made / "three", folder / "one")
            said = "holds other weights than when" if how == "changed" else "has no adapter_config.json"
            for _ in range(2):
                with pytest.raises(Unavailable, match=f"the adapter one cannot be read: .*{said}"):
                    await ask(engine, body("one", PROMPT))
            await check(engine, "two", made, "two")
            await check(engine, "base", made, "base")
            assert engine.pool.available == engine.pool.total
            shutil.rmtree(folder / "one", ignore_errors=True)
            shutil.copytree(made / "one", folder / "one")
            await check(engine, "one", made, "one")

    asyncio.run(test())


def spoil(path: Path, how: str) -> None:
    weights = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    first = next(iter(weights))
    if how == "nan":
        weights[first][0, 0] = torch.nan
    elif how == "shape":
        weights[first] = weights[first][:, :-1].contiguous()
    elif how == "rank":
        config["r"] = 5
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    if how == "link":
        (path / "adapter_model.safetensors").rename(path.parent / "elsewhere")
        (path / "adapter_model.safetensors").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "has numbers that are NaN or infinite"),
        ("shape", "is right for this base"),
        ("rank", "has the rank 4, and adapter_config.json says 5"),
        ("link", "models.x: "),
    ],
)
def test_what_cannot_be_served_is_not_loaded(made: Path, folder: Path, how: str, said: str) -> None:
    async def test() -> None:
        spoil(folder / "one", how)
        async with running(spec(made)) as engine:
            with pytest.raises(BadRequest, match=said):
                await engine.load_adapter(loading("x", folder / "one"))
            assert await names(engine) == {"base"}
            assert engine.pool.weights == 0
            await engine.load_adapter(loading("x", folder / "two"))
            await check(engine, "x", made, "two")

    asyncio.run(test())


def test_names_and_bases_that_are_wrong(made: Path, folder: Path) -> None:
    async def test() -> None:
        async with running(spec(made, AdapterSpec("one", str(made / "one")))) as engine:
            with pytest.raises(Conflict, match="base is served already; another name is right"):
                await engine.load_adapter(loading("base", made / "two"))
            with pytest.raises(Conflict, match="one is served already"):
                await engine.load_adapter(loading("one", made / "two"))
            for base in ("one", "none"):
                with pytest.raises(UnknownModel):
                    await engine.load_adapter(LoadAdapter(base=base, name="x", path=str(made / "two")))
            with pytest.raises(BadRequest, match=r"has no adapter_config\.json"):
                await engine.load_adapter(loading("x", folder / "none"))
            await check(engine, "one", made, "one")
        make_adapter(folder / "large", made / "base", rank=256)
        async with running(spec(made, kv_bytes=160 << 10)) as engine:
            with pytest.raises(BadRequest, match=r"its weights take .* the longest request leaves"):
                await engine.load_adapter(loading("x", folder / "large"))
            assert await names(engine) == {"base"}

    asyncio.run(test())


def test_adapters_beside_weights_that_sleep(made: Path, tmp_path: Path) -> None:
    """One budget for two models, of which one has two adapters, and a pool."""

    async def test() -> None:
        found = spec_of({"base": made / "base", "other": made / "other"}, kv_bytes=1400 << 10)
        adapters = tuple(AdapterSpec(name, str(made / name)) for name in NAMES[:2])
        models = replace(found.models[0], adapters=adapters), found.models[1]
        async with running(replace(found, models=models, sleep_dir=str(tmp_path))) as engine:
            bodies = [body(name, PROMPT, max_tokens=12) for name in ("one", "other", "base", "two") * 3]
            answers = await asyncio.gather(*(ask(engine, one) for one in bodies))
            await engine.load_adapter(loading("three", made / "three"))
            await check(engine, "three", made, "three")
        where = {"one": "one-merged", "two": "two-merged", "base": "base", "other": "other"}
        for one, answer in zip(bodies, answers, strict=True):
            Oracle(made / where[one.model]).check(PROMPT, answer.tokens[0])

    asyncio.run(test())


def test_weights_that_nobody_wants_make_room_for_an_adapter(made: Path, tmp_path: Path) -> None:
    """The budget holds two models that are idle, and beside them half of what the adapter takes."""

    async def test() -> None:
        found = spec_of({"base": made / "base", "other": made / "base"}, kv_bytes=8 << 20)
        models = tuple(replace(model, max_context=32) for model in found.models)
        found = replace(found, models=models, sleep_dir=str(tmp_path))
        executor = load_executor(found)
        assert executor.weights is not None
        assert executor.adapters is not None
        adapter = await executor.adapters.read("base", AdapterSpec("x", str(made / "one")))
        room = 2 * max(executor.weights.blocks.values()) + adapter.blocks // 2
        executor.close()
        room *= found.block_bytes
        found = replace(found, kv_bytes=room + room // 19 + found.block_bytes)
        async with asyncio.timeout(60), running(found) as engine:
            for name in ("other", "base"):
                await ask(engine, body(name, PROMPT, max_tokens=4))
            await engine.load_adapter(loading("x", made / "one"))
            await check(engine, "x", made, "one")

    asyncio.run(test())


@asynccontextmanager
async def keeping(found: EngineSpec) -> AsyncIterator[Engine]:
    """An engine with a store of its own."""
    executor = load_executor(found)
    store, transport = open_store(found, executor), open_transport(found, executor.arena)
    async with running_over(found, executor, transport, store=store) as engine:
        yield engine


def test_prefixes_of_adapters_come_back_from_files_for_the_same_weights_alone(
    made: Path, tmp_path: Path
) -> None:
    async def lives(of: str) -> int:
        found = spec(made, AdapterSpec("x", str(made / of)))
        async with keeping(replace(found, cache_dir=str(tmp_path), cache_size=1 << 30)) as engine:
            cached = await check(engine, "x", made, of, LONG)
            assert (cached > 0) == ((await engine.load()).models["base"].restored_tokens_total > 0)
            return cached

    async def test() -> None:
        assert [await lives(of) for of in ("one", "two")] == [0, 0]
        assert await lives("one") > 0

    asyncio.run(test())


def test_other_weights_that_are_refused_leave_those_that_are_served(made: Path, folder: Path) -> None:
    async def test() -> None:
        async with running(spec(made, kv_bytes=1 << 20)) as engine:
            await engine.load_adapter(loading("x", folder / "one"))
            shutil.rmtree(folder / "one")
            make_adapter(folder / "one", made / "base", seed=7, rank=128)
            with pytest.raises(BadRequest, match=r"its weights take \d+ blocks"):
                await engine.load_adapter(loading("x", folder / "one"))
            assert await names(engine) == {"base", "x"}
            await check(engine, "x", made, "one")

    asyncio.run(test())


def test_an_adapter_that_is_unloaded_while_it_is_loaded_again_is_loaded(made: Path, folder: Path) -> None:
    async def test() -> None:
        async with running(spec(made)) as engine:
            await engine.load_adapter(loading("x", folder / "one"))
            shutil.rmtree(folder / "one")
            shutil.copytree(made / "two", folder / "one")
            again = asyncio.create_task(engine.load_adapter(loading("x", folder / "one")))
            await asyncio.sleep(0)
            await engine.unload_adapter(UnloadAdapter(name="x"))
            await again
            await check(engine, "x", made, "two")

    asyncio.run(test())

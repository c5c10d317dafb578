"""Adapters at an engine: each request gets the tokens of its own merged weights, in whatever company."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from kvloom.kv.prefix_feed import page_name, root_name, split_names
from kvloom.types.errors import UnknownModel
from kvloom.types.spec import AdapterSpec, EngineSpec
from kvloom.types.verbs import CachedSince, Prefix
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.oracle import Oracle

PROMPTS = [[7, 3, 9, 1, 5], [40, 2, 11], [8, 8, 100, 31, 2, 77, 5, 6, 1], [250, 19]]
ADAPTERS = {
    "one": {"seed": 1},
    "two": {"seed": 2, "rank": 16, "targets": ("q_proj", "v_proj")},
    "three": {"seed": 3, "targets": ("o_proj", "up_proj")},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    path = make_checkpoint(folder / "base", "qwen2")
    for name, settings in ADAPTERS.items():
        make_adapter(folder / name, path, **settings)  # type: ignore[arg-type]
        merge(folder / f"{name}-merged", path, folder / name)
    return path


def spec_with(base: Path, kv_bytes: int = 4 << 20) -> EngineSpec:
    spec = spec_of({"base": base}, kv_bytes=kv_bytes)
    adapters = tuple(AdapterSpec(name, str(base.parent / name)) for name in ADAPTERS)
    return structs.replace(spec, models=(structs.replace(spec.models[0], adapters=adapters),))


def oracle(base: Path, name: str) -> Oracle:
    return Oracle(base if name == "base" else base.parent / f"{name}-merged")


@pytest.mark.parametrize("kv_bytes", [4 << 20, 160 << 10])  # plenty, and so little that adapters take turns
def test_each_request_has_the_tokens_of_its_merged_weights(base: Path, kv_bytes: int) -> None:
    """Law 2 for a mixed batch of the base and three adapters, with the same prompts for all."""

    async def test() -> None:
        names = ["base", *ADAPTERS]
        async with running(spec_with(base, kv_bytes=kv_bytes)) as engine:
            bodies = [body(name, prompt, max_tokens=24) for prompt in PROMPTS for name in names]
            answers = await asyncio.gather(*(ask(engine, one) for one in bodies))
        for one, answer in zip(bodies, answers, strict=True):
            oracle(base, one.model).check(one.prompt, answer.tokens[0])

    asyncio.run(test())


def test_prefixes_of_an_adapter_are_its_own(base: Path) -> None:
    async def test() -> None:
        prompt = list(range(1, 65))
        async with running(spec_with(base)) as engine:
            cached = dict[str, list[int]]()
            for name in ("base", "one", "two", "base", "one"):
                answer = await ask(engine, body(name, prompt, max_tokens=8))
                cached.setdefault(name, []).append(answer.ends[0].cached_tokens)
                oracle(base, name).check(prompt, answer.tokens[0])
            assert [found[0] for found in cached.values()] == [0, 0, 0]
            assert cached["base"][1] > 0
            assert cached["one"][1] > 0
            told = {*split_names((await engine.contents(CachedSince(life="", version=0))).come)}
            form = (await engine.models())[0].form
            assert form is not None
            for name in ("base", "one", "two"):  # as a router names them, which knows adapters as models
                first = page_name(root_name(name, form.tokens_per_block, ""), prompt[: form.tokens_per_block])
                assert first in told
            await engine.evict(Prefix(model="one", prompt=prompt))
            assert (await ask(engine, body("one", prompt))).ends[0].cached_tokens == 0
            assert (await ask(engine, body("base", prompt))).ends[0].cached_tokens > 0
            await ask(engine, structs.replace(body("one", prompt), salt="alice"))
            await engine.evict(Prefix(model="one", prompt=[]))
            for salt in ("", "alice"):
                assert (await ask(engine, structs.replace(body("one", prompt), salt=salt))).ends[
                    0
                ].cached_tokens == 0
            assert (await ask(engine, body("two", prompt))).ends[0].cached_tokens > 0

    asyncio.run(test())


def test_adapters_are_models_of_their_base(base: Path) -> None:
    async def test() -> None:
        async with running(spec_with(base)) as engine:
            cards = {card.name: card for card in await engine.models()}
            assert set(cards) == {"base", *ADAPTERS}
            assert cards["base"].parent is None
            assert cards["one"].parent == "base"
            assert cards["one"].path == str(base.parent / "one")
            load = await engine.load()
            assert set(load.models) == {"base"}
            assert load.model("two") is load.models["base"]
            with pytest.raises(UnknownModel):
                await ask(engine, body("four", [1, 2]))

    asyncio.run(test())

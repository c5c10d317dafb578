"""K and V in another number format than the model computes in."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from benchmarks.kv_formats import DEMO, MODELS, divergences
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.loader import DeviceTarget
from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.loader import load_model
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import EngineSpec, ModelSpec
from kvloom.types.verbs import PrepRecv
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.exec.cuda.devices import COMPUTE
from tests.exec.cuda.engines import running_on_device
from tests.exec.kept import KeptOracle
from tests.exec.loading import BLOCK, load
from tests.weaving import MODEL, PAGES, weaving, woven_of

LENGTHS = (1, 3, 17, WINDOW, WINDOW + 1, 90, 130)  # ragged; past the window; more than a chunk
COUNT = 20
TIE = 1e-3


def prompts_of(seed: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def kept(path: Path, kv_dtype: KVDtype, **changes: int) -> EngineSpec:
    spec = spec_of({MODEL: path})
    models = tuple(replace(model, kv_dtype=kv_dtype) for model in spec.models)
    return replace(spec, models=models, **changes)


async def greedy(engine: Engine | Router, prompts: list[list[int]]) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(engine, body(MODEL, p, max_tokens=COUNT)) for p in prompts))
    assert {len(answer.tokens[0]) for answer in answers} == {COUNT}
    return [answer.tokens[0] for answer in answers]


def check(path: Path, kv_dtype: KVDtype, prompts: list[list[int]], found: list[list[int]]) -> None:
    oracle = KeptOracle(path, kv_dtype)
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens, TIE)
    print(f"{kv_dtype}: {oracle.worst:.1e}")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gpt_neox", "mixtral"])
def test_greedy_is_that_of_a_model_whose_k_and_v_are_rounded(
    architecture: str, kv_dtype: KVDtype, tmp_path: Path
) -> None:
    """All at once, in chunks, by fused decoders and by transformers' own modules."""
    path, prompts = make_checkpoint(tmp_path, architecture), prompts_of(architecture)

    async def serve() -> list[list[int]]:
        async with running(kept(path, kv_dtype)) as engine:
            return await greedy(engine, prompts)

    check(path, kv_dtype, prompts, asyncio.run(serve()))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen2")


def test_preempted_requests_and_cached_prefixes_keep_their_tokens(path: Path) -> None:
    """Answers need more pages of 12 tokens than there are; then prompts that begin alike are found in the
    cache."""
    base = prompts_of("base", (100,))[0]
    prompts = prompts_of("rest", (45,) * 10)
    alike = [base[: 40 + 5 * i] + p[:3] for i, p in enumerate(prompts)]

    async def serve() -> list[list[int]]:
        async with running(kept(path, "int8", kv_bytes=60 << 10, block_bytes=512)) as engine:
            found = await greedy(engine, prompts)
            load = (await engine.load()).models[MODEL]
            assert load.preemptions_total > 0
            for prompt in alike:
                found += await greedy(engine, [prompt])
            assert (await engine.load()).models[MODEL].cached_tokens_total > load.cached_tokens_total + 200
        return found

    check(path, "int8", prompts + alike, asyncio.run(serve()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_sixteen_bits_may_keep_int8(path: Path, dtype: str) -> None:
    """Its best tokens are among the float32 model's best few."""
    prompts = prompts_of(dtype)

    async def serve() -> list[list[int]]:
        spec = kept(path, "int8")
        halves = tuple(replace(model, dtype=dtype) for model in spec.models)
        async with running(replace(spec, models=halves)) as engine:
            return await greedy(engine, prompts)

    oracle = KeptOracle(path, "int8")
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        oracle.check(prompt, tokens, 0.3)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_what_moves_between_units_keeps_its_tokens(path: Path, kv_dtype: KVDtype) -> None:
    prompts = prompts_of("moves", (1, 17, 40, 90, 130))

    async def serve() -> list[list[int]]:
        spec = kept(path, kv_dtype)
        async with running(replace(spec, unit="p")) as p, running(replace(spec, unit="d")) as d:
            program = load_program("balanced", {"ratio": 0.4})
            async with Router({"p": p, "d": d}, program, WallClock()) as router:
                found = await greedy(router, prompts)
            loads = [(await one.load()).models[MODEL] for one in (p, d)]
            assert sum(one.received_tokens_total for one in loads) > 20
        return found

    check(path, kv_dtype, prompts, asyncio.run(serve()))


def test_two_ranks_keep_int8(path: Path) -> None:
    """Each rank rounds its own heads, as one would."""
    prompts = prompts_of("ranks", (1, 17, 90))

    async def serve() -> list[list[int]]:
        async with running(kept(path, "int8", tensor_parallel=2)) as engine:
            return await greedy(engine, prompts)

    check(path, "int8", prompts, asyncio.run(serve()))


def test_units_of_unlike_formats_exchange_nothing(path: Path) -> None:
    async def test() -> None:
        async with running(kept(path, "int8")) as d, running(kept(path, "bfloat16")) as p:
            (theirs,), (ours,) = await p.models(), await d.models()
            assert (ours.dtype, ours.kv_dtype, theirs.kv_dtype) == ("float32", "int8", "bfloat16")
            with pytest.raises(BadRequest, match="has dtype bfloat16 instead of int8") as caught:
                await d.prep_recv(PrepRecv(model=MODEL, request="r", prompt=[1, 2, 3], sender=theirs.form))
            assert "\n" not in caught.value.message

    asyncio.run(test())


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_offloaded_attention_keeps_its_tokens(path: Path, kv_dtype: KVDtype, tmp_path: Path) -> None:
    prompts = prompts_of("woven")
    other = make_checkpoint(tmp_path / "cold", "llama", seed=1)

    async def serve() -> list[list[int]]:
        async with (
            weaving(kept(other, kv_dtype, threads=1)) as cold,
            weaving(kept(path, kv_dtype, threads=1)) as hot,
        ):
            terms = hot.borrower.terms(MODEL, PAGES)
            hot.borrower.borrow(terms, cold.lender.lend(terms), 0.6)
            found = await greedy(hot, prompts)
            assert woven_of(hot).tokens > COUNT
        return found

    check(path, kv_dtype, prompts, asyncio.run(serve()))


def test_unlike_formats_are_not_woven(path: Path) -> None:
    async def test() -> None:
        async with weaving(kept(path, "auto")) as cold, weaving(kept(path, "int8")) as hot:
            with pytest.raises(BadRequest, match="has dtype int8 instead of float32"):
                cold.lender.lend(hot.borrower.terms(MODEL, PAGES))

    asyncio.run(test())


def test_what_no_kernel_attends_over_is_not_lent(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")  # It computes in the format of its weights.

    async def test() -> None:
        halves = replace(kept(path, "auto"), models=(ModelSpec(name=MODEL, path=str(path), dtype="float16"),))
        async with weaving(halves) as cold, weaving(halves) as hot:
            with pytest.raises(BadRequest, match="K and V in float16; float32, bfloat16, int8 are right"):
                cold.lender.lend(hot.borrower.terms(MODEL, PAGES))
            assert cold.pool.lent == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("kv_dtype", "tokens", "row"),
    [("auto", 16, 64), ("float32", 16, 64), ("bfloat16", 32, 32), ("int8", 51, 20)],
)
def test_a_block_holds_as_many_tokens_as_fit(path: Path, kv_dtype: KVDtype, tokens: int, row: int) -> None:
    """Heads of 16 numbers, in blocks of 2048 bytes."""
    model = load(path, kv_dtype=kv_dtype)
    geometry = model.geometry
    assert (geometry.tokens_per_block, geometry.row_bytes, geometry.token_bytes) == (tokens, row, 2 * row)
    assert model.card.dtype == "float32"
    assert model.card.kv_dtype == ("float32" if kv_dtype == "auto" else kv_dtype)


@pytest.mark.parametrize("name", MODELS)
def test_fewer_bits_cost_a_trained_model_next_to_nothing(name: str) -> None:
    """The mean divergence of the next token's distribution, over what the model has written."""
    found = divergences(DEMO / name, 4, 40)
    assert found["float32"].tokens > 20
    assert found["float32"].mean < 1e-12
    assert 1e-12 < found["bfloat16"].mean < found["int8"].mean < 1e-4


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_a_gpu_keeps_fp8(architecture: str, tmp_path: Path) -> None:
    """In chunks, recorded, of prefixes that are cached: all attend to the rounded numbers."""
    path, prompts = make_checkpoint(tmp_path, architecture), prompts_of(architecture)

    async def serve() -> list[list[int]]:
        async with running_on_device(kept(path, "float8_e4m3fn", max_running=4, chunk_tokens=40)) as (
            engine,
            _,
        ):
            found = await greedy(engine, prompts)
            assert await greedy(engine, prompts) == found
            return found

    oracle = KeptOracle(path, "float8_e4m3fn")
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        oracle.check(prompt, tokens, 2e-2)
    print(f"{oracle.worst:.1e}")


def test_a_cpu_does_not_keep_fp8(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype: float8_e4m3fn on a CPU.*int8 is right"):
        load(path, kv_dtype="float8_e4m3fn")


def test_a_gpu_keeps_what_it_computes_in(path: Path) -> None:
    target = DeviceTarget(host_device(COMPUTE), plain_operations())

    def on_device(kv_dtype: KVDtype) -> torch.dtype:
        spec = ModelSpec(name="mine", path=str(path), kv_dtype=kv_dtype)
        return load_model(spec, BLOCK, target).kv_dtype

    assert on_device("auto") == on_device("float32") == torch.float32
    assert on_device("float8_e4m3fn") == torch.float8_e4m3fn
    for kv_dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match=f"models.mine: kv_dtype: {kv_dtype} on cpu, a GPU") as caught:
            on_device(kv_dtype)
        assert "\n" not in caught.value.message

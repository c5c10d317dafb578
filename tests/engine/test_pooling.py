"""Models that make vectors beside models that generate, in one engine: no verb of K and V takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.types.clock import WallClock
from kvloom.types.errors import BadRequest
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate
from kvloom.types.spec import Quotas
from kvloom.types.transfer import NoTransport
from kvloom.types.verbs import Pin, Prefix, PrepRecv, RemoteSend
from tests.checkpoints import make_checkpoint
from tests.engines import running, running_over, spec_of
from tests.pooling_models import make_encoder, save_pooling

TEXT = [2, 40, 41, 3]


def body(request: str, texts: int) -> StartGenerate:
    return StartGenerate(
        model="vectors",
        request=request,
        prompt=TEXT,
        sampling=SamplingParams(max_tokens=1, seed=0),
        n=texts,
        task="embed",
        more=[TEXT] * (texts - 1),
    )


async def ends(engine: Engine, asked: StartGenerate) -> list[EndEvent]:
    frames = [frame async for frame in engine.start_generate(asked)]
    return [event for frame in frames for event in frame if isinstance(event, EndEvent)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pooling")
    vectors = save_pooling(make_encoder(folder / "vectors", "bert"))
    return {"text": make_checkpoint(folder / "text", "qwen2"), "vectors": vectors}


@asynccontextmanager
async def engine_of(paths: dict[str, Path]) -> AsyncIterator[Engine]:
    async with running(spec_of(paths, kv_bytes=1 << 20, block_bytes=2048)) as engine:
        yield engine


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_verbs_of_k_and_v_are_refused(paths: dict[str, Path]) -> None:
    """A text has no pages that could be sent, and a job that looked for them would end the engine."""

    async def test() -> None:
        async with engine_of(paths) as engine:
            spot = await engine.prep_recv(PrepRecv(model="text", request="r", prompt=TEXT, end=-1))
            own: dict[str, Any] = {"model": "vectors", "request": "r", "prompt": TEXT}
            send = RemoteSend(**own, address=spot.address, peer=spot.peer)
            for asked in (
                engine.prep_recv(PrepRecv(**own, end=-1)),
                engine.remote_send(send),
                engine.hold("r", [send]),
                engine.pin(Pin(**own)),
                engine.evict(Prefix(model="vectors", prompt=TEXT)),
            ):
                with pytest.raises(BadRequest, match="vectors makes vectors of texts and keeps no K and V"):
                    await asked
            assert [end.reason for end in await ends(engine, body("e", 3))] == ["stop"] * 3

    run(test)


class HastyClock(WallClock):
    """Counts a thousand seconds for each one, so that every period ends between two jobs."""

    def now(self) -> float:
        return 1000.0 * super().now()


@pytest.mark.parametrize("quotas", get_args(Quotas))
def test_a_unit_whose_models_all_make_vectors_goes_on(paths: dict[str, Path], quotas: Quotas) -> None:
    """None of them has a quota that could be moved."""

    async def test() -> None:
        spec = spec_of({"vectors": paths["vectors"]}, kv_bytes=1 << 20, block_bytes=2048)
        spec = replace(spec, quotas=quotas)
        executor = load_executor(spec)
        async with running_over(spec, executor, NoTransport(spec.unit), clock=HastyClock()) as engine:
            for request in range(20):
                assert [end.reason for end in await ends(engine, body(f"e{request}", 3))] == ["stop"] * 3

    run(test)


@pytest.mark.parametrize(("models", "jobs"), [(["vectors"], 1), (["vectors", "text"], 4)])
def test_jobs_of_texts_are_larger_if_there_are_no_streams(
    paths: dict[str, Path], models: list[str], jobs: int
) -> None:
    async def test() -> None:
        spec = spec_of({name: paths[name] for name in models}, kv_bytes=1 << 20, block_bytes=2048)
        spec = replace(spec, chunk_tokens=3 * len(TEXT), vector_tokens=12 * len(TEXT))
        async with running(spec) as engine:
            await ends(engine, body("e", 12))
            assert (await engine.load()).models["vectors"].prefill_jobs_total == jobs

    run(test)

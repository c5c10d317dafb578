"""Law 2 over the router: real engines, every program, and the answers of a lone engine, token by token."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from kvloom.api.app import create_app
from kvloom.config.config import DEMO
from kvloom.engine.engine import Engine
from kvloom.router.program import load_program
from kvloom.router.programs import PROGRAMS
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from tests.checkpoints import make_checkpoint
from tests.engines import running, spec_of

UNITS = 3
PAGE = 16  # tokens of "llama" in a block, below
JSON_SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
Ask = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    random_ones = {name: make_checkpoint(root / name, name) for name in ("llama", "gemma2")}
    return random_ones | {name: DEMO / name for name in ("sums", "guide")}


@asynccontextmanager
async def engines(models: dict[str, Path], count: int) -> AsyncIterator[dict[str, Engine]]:
    async with AsyncExitStack() as stack:
        made = {}
        for i in range(count):
            spec = replace(spec_of(models, kv_bytes=8 << 20, threads=1), unit=f"unit-{i}")
            made[spec.unit] = await stack.enter_async_context(running(spec))
        yield made


def asks() -> list[Ask]:
    """Prompts that share beginnings of every length around page edges, and every kind of request."""
    rng = random.Random(0)
    base = [rng.randrange(256) for _ in range(3 * PAGE + 2)]
    out: list[Ask] = []
    edges = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, len(base))
    for model, lengths in (("llama", edges), ("gemma2", edges[::2])):
        for length in lengths:
            prompt = base[:length] + [rng.randrange(256) for _ in range(length % 3)]
            out.append(completion(model, prompt))
        out.append(completion(model, base, n=3, temperature=0.9, seed=5))
        out.append(completion(model, base[:-1], logprobs=3))
        out.append(completion(model, base[:PAGE], echo=True, logprobs=1))
        out.append(completion(model, base[:40], presence_penalty=0.7, repetition_penalty=1.3))
    for a, b in ((17, 25), (3, 4)):
        out.append(chat("sums", f"What is {a} + {b}?"))
        out.append(chat("sums", f"What is {a} + {b}?", stop=["="]))
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": JSON_SCHEMA}}
    out.append(chat("guide", "What is kvloom?", logprobs=True, top_logprobs=2))
    out.append(chat("guide", "Name a sum as JSON.", response_format=schema, max_tokens=40))
    return out


def completion(model: str, prompt: Sequence[int], **more: object) -> Ask:
    body = {"model": model, "prompt": list(prompt), "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", body | more


def chat(model: str, text: str, **more: object) -> Ask:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    return "/v1/chat/completions", body | more


async def answers(router: Router, asked: Sequence[Ask]) -> list[Any]:
    """All twice, the second time with everything cached somewhere; some at once."""
    transport = httpx.ASGITransport(create_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://kvloom", timeout=60) as http:

        async def one(path: str, body: dict[str, Any]) -> Any:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        out: list[Any] = []
        for i in range(0, len(asked), 4):
            out += await asyncio.gather(*[one(*ask) for ask in asked[i : i + 4]])
        return out + [await one(*ask) for ask in asked]


def same(a: Any, b: Any) -> bool:
    """Equal, log-probabilities to four digits: batching differently may change their last bits."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, abs_tol=1e-4) if isinstance(a, float) else bool(a == b)


def test_every_program_streams_what_a_lone_engine_does(models: dict[str, Path]) -> None:
    async def test() -> None:
        asked = asks()
        async with engines(models, 1) as alone:
            (engine,) = alone.values()
            async with Router({"unit-0": engine}, load_program("data_parallel"), WallClock()) as router:
                expected = await answers(router, asked)
        async with (
            engines(models, UNITS) as fleet,
            Router(fleet, load_program("data_parallel"), WallClock()) as router,
        ):
            for name in PROGRAMS:
                router.set_program(load_program(name))
                found = await answers(router, asked)
                for ask, want, got in zip([*asked, *asked], expected, found, strict=True):
                    assert same(got, want), (name, ask, got, want)
            loads = [load.models["llama"] for load in (await router.loads()).values()]
            assert all(load.prompt_tokens_total and load.cached_tokens_total for load in loads)

    asyncio.run(test())

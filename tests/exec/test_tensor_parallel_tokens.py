"""Law 2 over two ranks, one of them another process: tokens are those of one rank and of transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.oracle import Oracle

MODELS = {"llama": "llama", "qwen": "qwen3", "gemma": "gemma2"}
LENGTHS = (1, 17, WINDOW + 1, 90)  # ragged; past the window; more than a chunk
COUNT = 20
Prompts = dict[str, list[list[int]]]


async def greedy(engine: Engine, prompts: Prompts) -> list[tuple[str, list[int], Answer]]:
    """All at once."""
    asked = [(model, prompt) for model, some in prompts.items() for prompt in some]
    answers = await asyncio.gather(*(ask(engine, body(m, p, max_tokens=COUNT)) for m, p in asked))
    return [(*one, answer) for one, answer in zip(asked, answers, strict=True)]


async def others(engine: Engine, prompts: Prompts) -> list[object]:
    """Draws, choices that share a prompt's pages, and the prompt's own log-probabilities, to 3 digits."""
    told: list[object] = []
    for model, some in prompts.items():
        drawn = await ask(engine, body(model, some[1], n=3, temperature=1.0, max_tokens=6))
        told.append(sorted(drawn.tokens.items()))
        scored = await ask(engine, body(model, some[2], max_tokens=1, prompt_logprobs=0))
        told.append([round(one.logprob, 3) for one in scored.prompt or ()])
    return told


def test_tokens_over_two_ranks(tmp_path: Path) -> None:
    paths = {
        name: make_checkpoint(tmp_path / name, architecture, num_key_value_heads=2, num_hidden_layers=2)
        for name, architecture in MODELS.items()
    }
    rng = random.Random(0)
    prompts = {
        model: [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS] for model in paths
    }
    one = spec_of(paths)
    # a core of each rank for each model, so that jobs run at the same time; too little room for all at once
    two = replace(one, tensor_parallel=2, threads=6, policy="partitioned", kv_bytes=2 * 24 * one.block_bytes)

    async def serve(spec: EngineSpec) -> list[object]:
        async with running(spec) as engine:
            return await others(engine, prompts)

    async def serve_two() -> tuple[list[tuple[str, list[int], Answer]], list[object]]:
        async with running(two) as engine:
            assert {cache.geometry.kv_heads for cache in engine.pool.caches.values()} == {1}
            assert engine.pool.total == 24
            answers = await greedy(engine, prompts)
            load = await engine.load()
            assert sum(model.preemptions_total for model in load.models.values()) > 0
            repeated = {model: some[1:2] for model, some in prompts.items()}
            first, again = [await greedy(engine, repeated) for _ in range(2)]
            assert all(answer.ends[0].cached_tokens for _, _, answer in again)
            return answers + first + again, await others(engine, prompts)

    answers, told = asyncio.run(serve_two())
    oracles = {name: Oracle(path) for name, path in paths.items()}
    for model, prompt, answer in answers:
        oracles[model].check(prompt, answer.tokens[0])
    assert told == asyncio.run(serve(one))

"""The engine over real models in one pool: law 2 whatever the company, and what callers are promised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from kvloom.core.errors import (
    BadRequest,
    KvloomError,
    PromptTooLong,
    QueueFull,
    Unavailable,
    UnknownModel,
)
from kvloom.core.request import Event, StartGenerate
from kvloom.core.spec import EngineSpec, Policy
from tests.checkpoints import EOS, VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.oracle import Oracle

BLOCK = 2048
HALF = "small"  # the model served in bfloat16
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 42}


@dataclass(frozen=True)
class Fleet:
    paths: dict[str, Path]
    oracles: dict[str, Oracle]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Heads of 16, 24 and 32; 3, 4 and 2 layers; 2, 1 and 2 KV heads."""
    root = tmp_path_factory.mktemp("fleet")
    paths = {
        "wide": make_checkpoint(root / "wide", "qwen2"),
        "tall": make_checkpoint(root / "tall", "qwen3", num_hidden_layers=4),
        "small": make_checkpoint(root / "small", "mistral", num_hidden_layers=2),
    }
    return Fleet(paths, {name: Oracle(path) for name, path in paths.items() if name != HALF})


def spec(fleet: Fleet, *, policy: Policy = "adbs", blocks: int = 2000, **changes: int) -> EngineSpec:
    plain = spec_of(fleet.paths, policy=policy, kv_bytes=blocks * BLOCK, block_bytes=BLOCK, **changes)
    models = tuple(replace(m, dtype="bfloat16") if m.name == HALF else m for m in plain.models)
    return replace(plain, models=models)


def orders() -> list[StartGenerate]:
    rng = random.Random(11)
    out: list[StartGenerate] = []
    for i in range(15):
        name = ("wide", "tall", "small")[i % 3]
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 23, 40, 60]))]
        kind: dict[str, Any] = ({}, DRAWN | {"seed": i // 6}, {})[i % 3 if name != HALF else 0]
        out.append(body(name, prompt, n=1 + i % 3, priority=i % 2, max_tokens=20, **kind))
    for one in out[:4]:  # the same prompts in the other mode
        out.append(body(one.model, one.prompt, n=3, max_tokens=20, **DRAWN))
    return out


async def gather(spec: EngineSpec, asked: list[StartGenerate]) -> tuple[list[Answer], int]:
    async with running(spec) as engine:
        answers = await asyncio.gather(*(ask(engine, one) for one in asked))
        load = await engine.load()
        return answers, sum(m.preemptions_total for m in load.models.values())


@pytest.fixture(scope="module")
def alone(fleet: Fleet) -> list[Answer]:
    """Each request by itself, and no two of its sequences at a time."""

    async def one_by_one() -> list[Answer]:
        async with running(spec(fleet, threads=1, max_running=1, chunk_tokens=512)) as engine:
            return [await ask(engine, one) for one in orders()]

    return asyncio.run(one_by_one())


def test_alone_is_what_transformers_says(fleet: Fleet, alone: list[Answer]) -> None:
    for one, answer in zip(orders(), alone, strict=True):
        if one.model != HALF and not one.sampling.temperature:
            for choice in range(one.n):
                fleet.oracles[one.model].check(one.prompt, answer.tokens[choice])
        if one.sampling.temperature and one.n > 1:
            assert len({tuple(tokens) for tokens in answer.tokens.values()}) > 1
    print("ties:", {name: oracle.ties for name, oracle in fleet.oracles.items()})


CROWDS: list[tuple[Policy, int, int, int]] = [
    ("adbs", 130, 16, 2),
    ("adbs", 2000, 7, 1),
    ("fcfs", 130, 64, 2),
    ("round-robin", 130, 16, 2),
    ("round-robin", 130, 512, 1),
]


@pytest.mark.parametrize(("policy", "blocks", "chunk", "threads"), CROWDS)
def test_company_changes_no_token(
    fleet: Fleet, alone: list[Answer], policy: Policy, blocks: int, chunk: int, threads: int
) -> None:
    asked = orders()
    answers, preemptions = asyncio.run(
        gather(spec(fleet, policy=policy, blocks=blocks, chunk_tokens=chunk, threads=threads), asked)
    )
    assert (preemptions > 0) == (blocks < 2000)
    half = AutoModelForCausalLM.from_pretrained(fleet.paths[HALF], dtype=torch.bfloat16)
    for one, answer, expected in zip(asked, answers, alone, strict=True):
        for choice in range(one.n):
            found, wanted = answer.tokens[choice], expected.tokens[choice]
            if one.model == HALF:
                near_best(half, one.prompt, found) if not one.sampling.temperature else None
            elif one.sampling.temperature:
                assert found == wanted
            else:
                fleet.oracles[one.model].check_at_once(one.prompt, found)
            assert len(found) == 20
    print(f"{policy}: {preemptions} preemptions")


def near_best(model: torch.nn.Module, prompt: list[int], found: list[int]) -> None:
    """bfloat16 has ties in plenty: each token is as good as the best to within its precision."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + found]), use_cache=False).logits[0].float()
    rows = logits[len(prompt) - 1 : -1]
    gaps = rows.max(-1).values - rows.gather(-1, torch.tensor(found)[:, None])[:, 0]
    assert float(gaps.max()) < 0.04 * float(rows.abs().max())


def test_a_seed_decides_and_nothing_else(fleet: Fleet) -> None:
    prompt = list(range(30))

    async def play() -> None:
        async with running(spec(fleet)) as engine:

            async def tokens(n: int, **changes: int) -> dict[int, list[int]]:
                return (await ask(engine, body("wide", prompt, n=n, **(DRAWN | changes)))).tokens

            three, five, other = await asyncio.gather(tokens(3), tokens(5), tokens(3, seed=43))
            assert three == {choice: five[choice] for choice in range(3)}
            assert len({tuple(t) for t in [*five.values(), *other.values()]}) == 8

    asyncio.run(play())


def test_two_engines_in_one_process(fleet: Fleet) -> None:
    async def play() -> None:
        first = spec(fleet, threads=1)
        second = replace(spec(fleet, threads=2, policy="fcfs"), models=(first.models[0], first.models[1]))
        async with running(first) as one, running(second) as two:
            asked = [body("wide", [5, 6, 7, i], max_tokens=12) for i in range(4)]
            asked += [body("tall", [5, 6, 7, i], max_tokens=12) for i in range(4)]
            both = [ask(engine, order) for order in asked for engine in (one, two)]
            answers = await asyncio.gather(*both)
            for i, order in enumerate(asked):
                assert answers[2 * i].tokens == answers[2 * i + 1].tokens
                fleet.oracles[order.model].check_at_once(order.prompt, answers[2 * i].tokens[0])
            with pytest.raises(UnknownModel, match="`small` is not served here; served: wide, tall"):
                await ask(two, body("small", [1]))

    asyncio.run(play())


def test_an_abort_frees_the_blocks_within_one_job(fleet: Fleet) -> None:
    async def play() -> None:
        async with running(spec(fleet)) as engine:
            for hangs_up in (False, True):
                order = body("wide", [1, 2, 3], n=3, max_tokens=200)
                stream: AsyncGenerator[list[Event], None] = engine.start_generate(order)
                frames = 0
                async for _ in stream:
                    frames += 1
                    if frames == 4:
                        break
                jobs = await count(engine.load())
                if hangs_up:
                    await stream.aclose()
                else:
                    await engine.abort(order.request)
                async with asyncio.timeout(20):
                    while engine.pool.free < engine.pool.total:
                        await engine.load()
                        await asyncio.sleep(0)
                assert engine.pool.free == engine.pool.total
                assert await count(engine.load()) - jobs <= 1
                await stream.aclose()

    async def count(load: object) -> int:
        models = (await load).models.values()  # type: ignore[misc]
        return sum(m.prefill_jobs_total + m.decode_jobs_total for m in models)

    asyncio.run(play())


def test_what_cannot_be_served_is_refused_at_the_door(fleet: Fleet) -> None:
    async def refused(stream: AsyncGenerator[list[Event], None]) -> KvloomError:
        with pytest.raises(KvloomError) as caught:
            await anext(stream)
        return caught.value

    async def play() -> None:
        async with running(spec(fleet, max_running=1, max_waiting=2)) as engine:
            long = await refused(engine.start_generate(body("wide", [1] * 256)))
            assert isinstance(long, PromptTooLong)
            assert "256 tokens" in str(long)
            assert "holds 256" in str(long)
            for bad, word in (
                (body("wide", [VOCAB]), str(VOCAB)),
                (body("wide", [1], logit_bias={VOCAB: 1.0}), "logit_bias"),
                (body("wide", [1], stop_token_ids=(VOCAB,)), "stop_token_ids"),
            ):
                problem = await refused(engine.start_generate(bad))
                assert isinstance(problem, BadRequest)
                assert word in str(problem)
            let_in = [engine.start_generate(body("wide", [1], max_tokens=50)) for _ in range(2)]
            for stream in let_in:
                await anext(stream)
            full = await refused(engine.start_generate(body("wide", [1])))
            assert isinstance(full, QueueFull)
            assert full.retry_after == 1
            assert (await ask(engine, body("tall", [1], max_tokens=2))).ends[0].reason == "length"
            for stream in let_in:
                await stream.aclose()
            await engine.stop()
            assert isinstance(await refused(engine.start_generate(body("wide", [1]))), Unavailable)
        async with running(spec(fleet, blocks=18)) as engine:
            long = await refused(engine.start_generate(body("wide", [1] * 60)))
            assert isinstance(long, PromptTooLong)
            assert "60 tokens, and wide holds 48" in str(long)

    asyncio.run(play())


def test_stop_tokens_and_min_tokens(fleet: Fleet) -> None:
    oracle, prompt = fleet.oracles["wide"], [9, 8, 7, 6]
    free = oracle.greedy(prompt, 16)
    stop = free[5]
    first = free.index(stop)

    async def play() -> None:
        async with running(spec(fleet)) as engine:
            stopped = await ask(engine, body("wide", prompt, stop_token_ids=(stop,)))
            assert stopped.tokens[0] == free[: first + 1]
            assert (stopped.ends[0].reason, stopped.ends[0].stop_token) == ("stop", stop)
            later = await ask(engine, body("wide", prompt, stop_token_ids=(stop,), min_tokens=10))
            tokens = list(prompt)
            for index in range(16):
                logits = oracle.logits(tokens).clone()
                if index < 10:
                    logits[stop] = float("-inf")
                tokens.append(int(logits.argmax()))
                if tokens[-1] == stop:
                    break
            assert later.tokens[0] == tokens[len(prompt) :]
            assert stop not in later.tokens[0][:10]
            always: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "max_tokens": 5}
            ignored = await ask(
                engine, body("wide", prompt, **always)
            )  # the engine knows only stop_token_ids
            assert ignored.tokens[0] == [EOS] * 5
            assert ignored.ends[0].reason == "length"
            heeded = await ask(engine, body("wide", prompt, stop_token_ids=(EOS,), **always))
            assert heeded.tokens[0] == [EOS]
            full = await ask(engine, body("wide", [3] * 250, max_tokens=100))
            assert (len(full.tokens[0]), full.ends[0].reason) == (6, "length")  # up to its context of 256

    asyncio.run(play())


def test_logprobs_are_the_oracles(fleet: Fleet) -> None:
    """Prompt reports come in chunks of 7 and, with preemption, more than one at a time; they are whole."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 7, 8, 33, 61)]

    async def play() -> list[tuple[list[int], Answer]]:
        async with running(spec(fleet, blocks=42, chunk_tokens=7)) as engine:
            asked = [
                body("wide", p, n=2, max_tokens=20, logprobs=3, prompt_logprobs=2, logit_bias={4: 5.0})
                for p in prompts
            ]
            answers = await asyncio.gather(*(ask(engine, one) for one in asked))
            assert (await engine.load()).models["wide"].preemptions_total
            return list(zip(prompts, answers, strict=True))

    model = fleet.oracles["wide"].model
    for prompt, answer in asyncio.run(play()):
        tokens = prompt + answer.tokens[0]
        with torch.inference_mode():
            normal = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        reports = [*(answer.prompt or []), *answer.logprobs[0]]
        assert len(reports) == len(tokens) - 1
        for position, report in enumerate(reports):
            assert report is not None
            assert report.logprob == pytest.approx(float(normal[position, tokens[position + 1]]), abs=1e-4)
            best = normal[position].topk(len(report.top))
            assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert len(report.top) == (2 if position < len(prompt) - 1 else 3)

"""The engine over real models in one pool: law 2 whatever the company."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from kvloom.types.errors import UnknownModel
from kvloom.types.request import StartGenerate
from kvloom.types.spec import EngineSpec, Policy
from tests.checkpoints import VOCAB
from tests.engine.real_fleet import DRAWN, HALF, Fleet, spec
from tests.engines import Answer, ask, body, running


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
                fleet.oracles[one.model].check_at_once(one.prompt, answer.tokens[choice])
        if one.sampling.temperature and one.n > 1:
            assert len({tuple(tokens) for tokens in answer.tokens.values()}) > 1
    print("ties:", {name: oracle.ties for name, oracle in fleet.oracles.items()})


CROWDS: list[tuple[Policy, int, int, int]] = [
    ("adbs", 130, 16, 2),
    ("adbs", 2000, 7, 1),
    ("fcfs", 130, 64, 2),
    ("round-robin", 130, 16, 2),
    ("round-robin", 130, 512, 1),
    ("partitioned", 130, 16, 2),
    ("vllm-2023", 130, 64, 2),
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
            with pytest.raises(UnknownModel, match=r"`small` does not exist .*; served: wide, tall"):
                await ask(two, body("small", [1]))

    asyncio.run(play())

"""Penalties see a sequence's own tokens, whatever becomes of it on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from kvloom.types.request import SamplingParams
from tests.checkpoints import VOCAB
from tests.draws import bent
from tests.engine.real_fleet import Fleet, spec
from tests.engines import Answer, ask, body, running

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "max_tokens": 24,
}


def short_of_the_best(model: Any, chosen: SamplingParams, prompt: list[int], output: list[int]) -> float:
    """By how much at most a token's penalised logit lies below the best."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    rows = [bent(logits[len(prompt) - 1 + i], chosen, prompt, output[:i]) for i in range(len(output))]
    return max(float(row.max() - row[token]) for row, token in zip(rows, output, strict=True))


def test_penalties_across_preemption_and_forks(fleet: Fleet) -> None:
    """The drawn ones differ by choice, and each is what it is without company."""
    prompts = [[(7 * i + j) % VOCAB for j in range(length)] for i, length in enumerate((1, 7, 20, 33))]
    greedy = [body("wide", prompt, **PENALTIES) for prompt in prompts]
    drawn = [body("wide", prompt, n=3, temperature=0.9, **PENALTIES) for prompt in prompts]

    async def play(*, blocks: int = 2000, max_running: int = 64) -> tuple[list[Answer], int]:
        async with running(spec(fleet, chunk_tokens=7, blocks=blocks, max_running=max_running)) as engine:
            answers = await asyncio.gather(*(ask(engine, one) for one in [*greedy, *drawn]))
            return answers, (await engine.load()).models["wide"].preemptions_total

    alone, none = asyncio.run(play(max_running=1))
    crowd, preemptions = asyncio.run(play(blocks=60))
    assert (none, preemptions > 0) == (0, True)
    model = fleet.oracles["wide"].model
    for one, answer in zip(greedy, crowd, strict=False):
        assert short_of_the_best(model, one.sampling, one.prompt, answer.tokens[0]) < 1e-4
    for before, after in zip(alone[len(greedy) :], crowd[len(greedy) :], strict=True):
        assert before.tokens == after.tokens
        assert len({tuple(tokens) for tokens in after.tokens.values()}) == 3

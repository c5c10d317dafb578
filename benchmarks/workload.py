"""What is asked of the servers: seeded, so that every server is asked the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROMPTS = (32, 128, 256)
_VOCAB = range(300, 8192)  # past the special tokens of both shapes


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `output` tokens after `prompt`, sent `at` seconds after the start."""

    model: str
    prompt: list[int]
    output: int
    at: float = 0.0

    @property
    def kind(self) -> tuple[int, int]:
        """What a lone request's latency depends on, beside the model's shape."""
        return len(self.prompt), self.output


def burst(model: str, requests: int, output: int, seed: int) -> list[Ask]:
    """`requests` at once, with prompts of 32, 128 and 256 tokens in turn. Prompts differ from seed to seed,
    so that no server answers a later round from an earlier one's prefixes."""
    draw = random.Random(seed)
    return [Ask(model, _prompt(draw, PROMPTS[i % len(PROMPTS)]), output) for i in range(requests)]


def lone(model: str, prompt: int, output: int, count: int) -> list[Ask]:
    """`count` requests of one kind, no two with the same prompt, whatever the kind."""
    draw = random.Random(f"{model}/{prompt}/{output}")
    return [Ask(model, _prompt(draw, prompt), output) for _ in range(count)]


def power_law(models: Sequence[str], alpha: float, total: float) -> dict[str, float]:
    """Requests a second of each model: that of number i in proportion to (i + 1)^-alpha, `total` in sum."""
    weights = [(i + 1) ** -alpha for i in range(len(models))]
    return {model: total * weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


def poisson(rates: Mapping[str, float], seconds: float, outputs: Sequence[int], seed: int) -> list[Ask]:
    """Each model's own Poisson stream over `seconds`, merged; lengths drawn evenly from PROMPTS × outputs.
    Another rate brings other prompts."""
    asks: list[Ask] = []
    for model, rate in rates.items():
        draw = random.Random(f"{seed}/{model}/{rate}")
        at = draw.expovariate(rate)
        while at < seconds:
            asks.append(Ask(model, _prompt(draw, draw.choice(PROMPTS)), draw.choice(outputs), at))
            at += draw.expovariate(rate)
    return sorted(asks, key=lambda ask: ask.at)


def _prompt(draw: random.Random, length: int) -> list[int]:
    return draw.choices(_VOCAB, k=length)

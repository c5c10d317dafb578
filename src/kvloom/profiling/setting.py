"""What is measured: jobs, as many and as unlike as a fit needs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXTS: Final = (16, 128, 512, 2048)
SPLITS: Final = (4, 16)  # prompts of a prefill job
SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A job to be. starts, appends: tokens that each sequence has, and computes."""

    model: str
    phase: Phase
    cores: int
    starts: tuple[int, ...]
    appends: tuple[int, ...]

    def work(self, cores: int) -> Work:
        """On its cores of so many."""
        appends, starts = np.asarray(self.appends), np.asarray(self.starts)
        return Work.of(self.model, self.phase, self.cores / cores, appends, starts, len(self.starts))

    def fits(self, limits: Limits) -> bool:
        lengths = [start + append for start, append in zip(self.starts, self.appends, strict=True)]
        pages = sum(-(-length // limits.page) for length in lengths)
        return (
            len(lengths) <= limits.batch
            and max(lengths) <= limits.context
            and pages * limits.page <= limits.tokens
            and (self.phase is Phase.DECODE or sum(self.appends) <= limits.chunk)
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one model in its pool: tokens of the longest sequence, of a page and of the whole pool, tokens that
    a prefill job takes, sequences that run together."""

    context: int
    page: int
    tokens: int
    chunk: int
    batch: int


def prefill(model: str, cores: int, prompts: int, tokens: int, context: int = 0) -> Setting:
    """`tokens` new tokens in all, shared evenly among prompts that have `context` tokens each."""
    appends = tuple(tokens // prompts + (i < tokens % prompts) for i in range(prompts))
    return Setting(model, Phase.PREFILL, cores, (context,) * prompts, appends)


def decode(model: str, cores: int, batch: int, context: int) -> Setting:
    """A step of sequences that have `context` tokens on average, the longest three times the shortest."""
    spread = np.linspace(0.5, 1.5, batch) if batch > 1 else np.ones(1)
    starts = tuple(max(1, round(context * float(part))) for part in spread)
    return Setting(model, Phase.DECODE, cores, starts, (1,) * batch)


def shares(cores: int) -> list[int]:
    """Cores that a job is measured on: each number up to 4, then powers of two, half of all, and all."""
    return sorted({*range(1, min(cores, 4) + 1), *_doubling(4, cores), (cores + 1) // 2, cores})


def grid(model: str, cores: int, limits: Limits, *, quick: bool = False) -> list[Setting]:
    """Settings that fit: of a grid, and some between its lines. quick: a quarter of them."""
    rng = random.Random(SEED)
    found = [*_prefills(model, cores, limits), *_decodes(model, cores, limits)]
    found += [_between(rng, model, cores, limits) for _ in range(24)]
    fitting = [setting for setting in dict.fromkeys(found) if setting.fits(limits)]
    every = 4 if quick else 1
    prefills = [setting for setting in fitting if setting.phase is Phase.PREFILL]
    decodes = [setting for setting in fitting if setting.phase is Phase.DECODE]
    return prefills[::every] + decodes[::every]


def _prefills(model: str, cores: int, limits: Limits) -> Iterator[Setting]:
    sizes = [*_doubling(4, limits.chunk), limits.chunk]
    for tokens in sizes:
        yield prefill(model, cores, 1, tokens)
    for tokens in sizes:
        for prompts in SPLITS:
            if tokens >= 8 * prompts:
                yield prefill(model, cores, prompts, tokens)
    for tokens in sizes[2::2]:
        for context in CONTEXTS[1:]:
            yield prefill(model, cores, 1, tokens, context)


def _decodes(model: str, cores: int, limits: Limits) -> Iterator[Setting]:
    for batch in BATCHES:
        for context in (*CONTEXTS, 2 * limits.context // 3 - 1):
            yield decode(model, cores, batch, context)


def _between(rng: random.Random, model: str, cores: int, limits: Limits) -> Setting:
    """A job such as the engine makes."""
    if rng.random() < 0.5:
        batch = round(limits.batch ** rng.random())
        return decode(model, cores, batch, round(limits.context ** rng.uniform(0.4, 0.9)))
    tokens = max(2, round(limits.chunk ** rng.uniform(0.3, 1.0)))
    context = round(limits.context ** rng.uniform(0.4, 0.8)) if rng.random() < 0.4 else 0
    return prefill(model, cores, min(tokens // 2, rng.choice((1, 1, 2, 3, 5, 8))), tokens, context)


def _doubling(begin: int, end: int) -> list[int]:
    """begin, 2·begin, … less than end."""
    return [begin << i for i in range(32) if begin << i < end]

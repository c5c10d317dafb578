"""MuxServe's set-up (section 4): LLaMAs on nodes of A100-80, asked as ShareGPT asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Final

import numpy as np

from kvloom.plan.cluster import Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.plan.plan import Demand
from kvloom.types.geometry import I64
from kvloom.workload.arrivals import Steps, arrivals, poisson
from kvloom.workload.ask import Ask
from kvloom.workload.stand_ins import STAND_INS
from kvloom.workload.tokens import Tokens

DEVICE: Final = "A100-80"
ALONE: Final[Mapping[str, int]] = {"7b": 1, "13b": 1, "30b": 4, "65b": 8}
"""GPUs that a model of a size has for itself: in spatial partitioning, and where an SLO asks how long a
request takes alone."""

VOCAB: Final = 32000
_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and of answers, with their means in tokens."""

    prompt: Tokens
    output: Tokens
    mean_prompt: float
    mean_output: float


@dataclass(frozen=True, slots=True)
class _Times:
    """Satisfies `Tokens`: others, `factor` times as many."""

    tokens: Tokens
    factor: float

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn: I64 = np.rint(self.tokens.draw(rng, count) * self.factor).astype(np.int64)
        return np.maximum(drawn, 1)


SHAREGPT: Final = Lengths(*STAND_INS["sharegpt"], 161, 338)
CHATLMSYS: Final = Lengths(*STAND_INS["chatlmsys"], 100, 261)


def like_sharegpt(prompt: float, output: float) -> Lengths:
    """ShareGPT's lengths with other means."""
    sides = (
        _Times(SHAREGPT.prompt, prompt / SHAREGPT.mean_prompt),
        _Times(SHAREGPT.output, output / SHAREGPT.mean_output),
    )
    return Lengths(*sides, prompt, output)


@dataclass(frozen=True, slots=True)
class Served:
    """A LLaMA of a size, as `7b`, and what it is asked, in requests a second."""

    name: str
    size: str
    rate: float
    lengths: Lengths = SHAREGPT

    @property
    def demand(self) -> Demand:
        lengths = self.lengths
        shape = find_shape(f"llama-{self.size}")
        return Demand(self.name, shape, self.rate, lengths.mean_prompt, lengths.mean_output)


def served(sizes: Sequence[str], rates: Iterable[float], lengths: Lengths = SHAREGPT) -> tuple[Served, ...]:
    """Models of these sizes, numbered from 1."""
    pairs = zip(sizes, rates, strict=True)
    return tuple(Served(f"{n}-{size}", size, rate, lengths) for n, (size, rate) in enumerate(pairs, 1))


def falling(sizes: Sequence[str], alpha: float, top: float) -> tuple[Served, ...]:
    """Rates that fall by a power law from `top` on, in the order of the sizes (section 4.2)."""
    return served(sizes, (top * (i + 1) ** -alpha for i in range(len(sizes))))


def cluster(gpus: int) -> list[Nodes]:
    """Nodes of eight, or a smaller one."""
    each = min(gpus, 8)
    return [Nodes(DEVICE, find_device(DEVICE).memory, each, gpus // each)]


def asks(models: Sequence[Served], seconds: float, seed: int = 0) -> Iterator[Ask]:
    """Poisson. What a model is asked does not depend on the others."""
    return merge(*(_asks(model, seconds, seed) for model in models), key=attrgetter("at"))


def _asks(model: Served, seconds: float, seed: int) -> Iterator[Ask]:
    timing, sizing = (np.random.default_rng([seed, kind, *model.name.encode()]) for kind in (1, 2))
    pairs = _pairs(model.lengths, sizing)
    for at in arrivals(poisson, Steps(np.array([model.rate])), timing):
        if at >= seconds:
            return
        prompt, output = next(pairs)
        yield Ask(at=at, model=model.name, prompt=prompt, output=output)


def _pairs(lengths: Lengths, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        prompts, outputs = lengths.prompt.draw(rng, _AT_ONCE), lengths.output.draw(rng, _AT_ONCE)
        yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


class Alone:
    """How long requests take that have `ALONE`'s GPUs for themselves: one prefill and the decode steps."""

    def __init__(self, models: Sequence[Served]) -> None:
        device = find_device(DEVICE)
        self._costs = {
            model.name: Roofline(device, ALONE[model.size], {model.name: find_shape(f"llama-{model.size}")})
            for model in models
        }

    def seconds(self, ask: Ask) -> float:
        cost = self._costs[ask.model]
        prefill = cost.seconds(Work.prefill(ask.model, 1.0, [ask.prompt]))
        step = cost.seconds(Work.decode(ask.model, 1.0, [ask.prompt + ask.output // 2]))
        return prefill + (ask.output - 1) * step

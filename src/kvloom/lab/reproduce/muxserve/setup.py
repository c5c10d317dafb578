"""MuxServe's set-up (section 4): LLaMAs on nodes of A100-80, and what they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.report import Scale
from kvloom.lab.reproduce.setup import AT_ONCE, poisson_requests
from kvloom.lab.workload.lengths import STAND_INS, Tokens
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.plan.cluster import Demand, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.geometry import I64
from kvloom.types.spec import UnitAbilities, unit_abilities

DEVICE: Final = "A100-80"
ALONE: Final[Mapping[str, int]] = {"7b": 1, "13b": 1, "30b": 4, "65b": 8}
"""The number of GPUs that a model of a size has for itself: in spatial partitioning of figure 5, and if an
SLO asks how long a request takes alone."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and of answers, with their means in tokens."""

    prompt: Tokens
    output: Tokens
    mean_prompt: float
    mean_output: float

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yields the lengths of prompts and answers, without end."""
        while True:
            prompts, outputs = self.prompt.draw(rng, AT_ONCE), self.output.draw(rng, AT_ONCE)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)

    def scaled(self, prompt: float, output: float) -> Lengths:
        """Returns lengths that spread alike, with other means."""
        sides = (
            _Times(self.prompt, prompt / self.mean_prompt),
            _Times(self.output, output / self.mean_output),
        )
        return Lengths(*sides, prompt, output)


@dataclass(frozen=True, slots=True)
class _Times:
    """Satisfies `Tokens`: it draws other tokens, `factor` times as many."""

    tokens: Tokens
    factor: float

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn: I64 = np.rint(self.tokens.draw(rng, count) * self.factor).astype(np.int64)
        return np.maximum(drawn, 1)


SHAREGPT: Final = Lengths(*STAND_INS["sharegpt"], 161, 338)
CHATLMSYS: Final = Lengths(*STAND_INS["chatlmsys"], 100, 261)


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

    @property
    def billions(self) -> int:
        """Returns the parameters, as the size is called."""
        return int(self.size.removesuffix("b"))


def served(sizes: Sequence[str], rates: Iterable[float], lengths: Lengths = SHAREGPT) -> tuple[Served, ...]:
    """Returns models of these sizes, numbered from 1."""
    pairs = zip(sizes, rates, strict=True)
    return tuple(Served(f"{n}-{size}", size, rate, lengths) for n, (size, rate) in enumerate(pairs, 1))


def falling(sizes: Sequence[str], alpha: float, top: float) -> tuple[Served, ...]:
    """Returns models whose rates fall by a power law from `top` on, in the order of the sizes (section
    4.2)."""
    return served(sizes, (top * (i + 1) ** -alpha for i in range(len(sizes))))


def cluster(gpus: int) -> list[Nodes]:
    """Returns nodes of eight GPUs, or one that is smaller."""
    each = min(gpus, 8)
    return [Nodes(DEVICE, find_device(DEVICE).memory, each, gpus // each, abilities=multiplexed)]


def multiplexed(device: str, ranks: int) -> UnitAbilities:
    """Returns what the paper's units can do: under MPS those of several GPUs share out their compute, too."""
    return structs.replace(unit_abilities(device, ranks), shares=True)


SECONDS: Final[Mapping[Scale, float]] = {"full": 120.0, "small": 6.0}
"""The seconds for which requests come if the paper's time would take too long here."""

AS_LONG: Final[Mapping[Scale, float]] = {"full": 264.0, "small": 6.0}
"""The seconds for which requests come in the paper: until there are as many as its planner expects of 240 s
and a tenth more, by the code that was published."""


@dataclass(frozen=True, slots=True)
class Load:
    """Models and their requests, which come for `seconds`: as a Poisson process, or if `counted` as many as
    are expected, no more and no less. The run ends when all are answered."""

    models: tuple[Served, ...]
    gpus: int
    seconds: float
    counted: bool = False
    seed: int = 0

    def requests(self) -> Iterator[WorkloadRequest]:
        """Yields the requests in their order. A model's requests do not depend on the others."""
        return merge(*(self._of(model) for model in self.models), key=attrgetter("at"))

    def _of(self, model: Served) -> Iterator[WorkloadRequest]:
        if not self.counted:
            return poisson_requests(model.name, model.rate, self.seconds, model.lengths.pairs, self.seed)
        timing, sizing = (np.random.default_rng([self.seed, kind, *model.name.encode()]) for kind in (1, 2))
        times = np.sort(timing.uniform(0.0, self.seconds, max(1, round(model.rate * self.seconds)))).tolist()
        lengths = model.lengths.pairs(sizing)
        return (
            WorkloadRequest(at=at, model=model.name, prompt=prompt, output=output)
            for at, (prompt, output) in zip(times, lengths, strict=False)
        )


class Alone:
    """The time of requests that have `ALONE`'s GPUs for themselves: one prefill and the decode steps."""

    def __init__(self, models: Sequence[Served]) -> None:
        device = find_device(DEVICE)
        self._costs = {
            model.name: Roofline(device, ALONE[model.size], {model.name: find_shape(f"llama-{model.size}")})
            for model in models
        }

    def seconds(self, request: WorkloadRequest) -> float:
        cost = self._costs[request.model]
        prefill = cost.seconds(Work.prefill(request.model, 1.0, [request.prompt]))
        step = cost.seconds(Work.decode(request.model, 1.0, [request.prompt + request.output // 2]))
        return prefill + (request.output - 1) * step

"""What the papers' set-ups share: engines on whole GPUs, a runtime's part of jobs, Poisson requests, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.report import Tell
from kvloom.lab.workload.arrivals import Steps, arrivals, poisson
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.types.job import Phase
from kvloom.types.spec import EngineSpec, ModelSpec

VOCAB: Final = 32_000  # of the prompts
AT_ONCE: Final = 1024  # lengths that are drawn together
_MAX_RUNNING: Final = 256
_MAX_WAITING: Final = 1 << 20  # nobody is turned away

S = TypeVar("S")
L = TypeVar("L")
P = TypeVar("P")


def engine_spec(unit: str, models: Iterable[ModelSpec], *, kv_bytes: int, block_bytes: int) -> EngineSpec:
    """Returns an engine that runs jobs one at a time on the whole of its device, first come first served."""
    return EngineSpec(
        models=tuple(models),
        kv_bytes=kv_bytes,
        block_bytes=block_bytes,
        policy="fcfs",
        max_running=_MAX_RUNNING,
        max_waiting=_MAX_WAITING,
        chunk_tokens=8192,
        threads=1,
        unit=unit,
    )


def in_one_layer(shape: ModelShape) -> ModelShape:
    """Returns a shape whose pages are one block each, with as many bytes: pools count fewer things, and have
    the same room."""
    return structs.replace(
        shape, layers=1, kv_heads=1, head_dim=shape.layers * shape.kv_heads * shape.head_dim
    )


class Hosted:
    """Satisfies `CostModel`: a decode step waits for the host, which prepares it and reads its tokens."""

    def __init__(self, cost: CostModel, host: Callable[[Work], float]) -> None:
        """host: returns the seconds that the host takes for a decode step."""
        self._cost = cost
        self._host = host

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        host = self._host(work) if work.phase is Phase.DECODE else 0.0
        return self._cost.seconds(work, beside) + host


class UnderMPS:
    """Satisfies `CostModel`: each model has a process for its prefills and one for its decodes, whose shares
    of the device are set when they start. So a job has no more of the device if it runs alone."""

    def __init__(self, cost: CostModel, spec: EngineSpec) -> None:
        self._cost = cost
        self._shares = {
            (model.name, phase): share or 1.0
            for model in spec.models
            for phase, share in ((Phase.PREFILL, model.prefill_share), (Phase.DECODE, model.decode_share))
        }

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._cost.seconds(self._fixed(work), [self._fixed(other) for other in beside])

    def _fixed(self, work: Work) -> Work:
        return replace(work, share=self._shares[work.model, work.phase])


def poisson_requests(
    model: str,
    rate: float,
    seconds: float,
    pairs: Callable[[np.random.Generator], Iterator[tuple[int, int]]],
    seed: int = 0,
) -> Iterator[WorkloadRequest]:
    """Yields one model's requests, `rate` a second, until `seconds`. They do not depend on other models.

    pairs: returns the lengths of prompts and answers, without end."""
    timing, sizing = (np.random.default_rng([seed, kind, *model.encode()]) for kind in (1, 2))
    lengths = pairs(sizing)
    for at in arrivals(poisson, Steps(np.array([rate])), timing):
        if at >= seconds:
            return
        prompt, output = next(lengths)
        yield WorkloadRequest(at=at, model=model, prompt=prompt, output=output)


def play_all(
    runs: Sequence[tuple[S, L]],
    play: Callable[[S, L, Callable[[float], None]], P],
    name: Callable[[S, L], str],
    tell: Tell,
) -> list[P]:
    """Plays each system under its load, one after the other, and returns their points.

    play: hears which part of a run is over through its last argument. name: of a run, for the reader."""

    def played(at: int, system: S, load: L) -> P:
        what = f"{name(system, load)}, {at + 1} of {len(runs)}"
        return play(system, load, lambda part: tell(what, (at + part) / len(runs)))

    return [played(at, system, load) for at, (system, load) in enumerate(runs)]

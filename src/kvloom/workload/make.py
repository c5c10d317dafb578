"""A spec's requests, in the order in which they come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

import numpy as np

from kvloom.types.geometry import F64
from kvloom.workload.arrivals import Steps, arrivals, in_pieces
from kvloom.workload.ask import Ask
from kvloom.workload.popularity import power_law
from kvloom.workload.sharing import Sharing
from kvloom.workload.spec import ModelSpec, WorkloadSpec

_AT_ONCE: Final = 1024
_IDS: Final = 1 << 32  # segments of a model; a number of 53 bits is one to every reader of JSON


def make_asks(spec: WorkloadSpec) -> Iterator[Ask]:
    """Of a spec that replays nothing. The same spec, the same requests; what a model is asked does not depend
    on the settings of the others. Bounded memory. Raises ConfigError where its lengths cannot be."""
    rates = _rates(spec)
    streams = [
        _stream(spec, name, model, number, rate)
        for number, ((name, model), rate) in enumerate(zip(spec.models.items(), rates, strict=True))
    ]
    return cut(heapq.merge(*streams, key=attrgetter("at")), spec)


def cut(asks: Iterable[Ask], spec: WorkloadSpec) -> Iterator[Ask]:
    """Those before the spec's end."""
    if spec.seconds is not None:
        end = spec.seconds
        asks = itertools.takewhile(lambda ask: ask.at < end, asks)
    return itertools.islice(asks, spec.requests)


def shares(spec: WorkloadSpec) -> F64:
    """[models] of the requests, sum 1."""
    own = [model.rate for model in spec.models.values() if model.rate is not None]
    weights = np.array(own) if own else power_law(len(spec.models), spec.alpha)
    found: F64 = weights / weights.sum()
    return found


def _rates(spec: WorkloadSpec) -> list[Steps]:
    of_each = shares(spec)
    if spec.top_rate is not None:
        total = spec.top_rate / of_each[0]
    else:
        total = spec.rate or sum(model.rate or 0.0 for model in spec.models.values())
    rates = of_each * total
    if spec.drift is None:
        return [Steps(rates[i : i + 1]) for i in range(len(rates))]
    phases = np.random.default_rng([spec.seed, 0]).random(len(rates))
    return [Steps(steps, spec.drift.period) for steps in spec.drift.rates(rates, phases)]


def _stream(spec: WorkloadSpec, name: str, model: ModelSpec, number: int, rate: Steps) -> Iterator[Ask]:
    """One model's requests, without end. Each kind of draw has a generator of its own."""
    timing, sizing, picking, talking = (
        np.random.default_rng([spec.seed, kind, *name.encode()]) for kind in range(1, 5)
    )
    system, conversation = model.system or spec.system, model.conversation or spec.conversation
    lengths = (model.lengths or spec.lengths).pairs(sizing)
    sharing = Sharing(system, itertools.count(number * _IDS), talking)
    gaps = model.arrivals or spec.arrivals
    if conversation is None:
        turns = sharing.singles(arrivals(gaps, rate, timing), lengths)
    else:
        starts = Steps(rate.rates / conversation.turns, rate.period)
        turns = sharing.conversations(arrivals(gaps, starts, timing), lengths, conversation)
    priorities = draw_priorities(model.priorities or spec.priorities or {0: 1.0}, picking)
    for (at, turn), priority in zip(turns, priorities, strict=False):
        yield Ask(
            at=at, model=name, prompt=turn.prompt, output=turn.output, priority=priority, shared=turn.shared
        )


def draw_priorities(weights: dict[int, float], rng: np.random.Generator) -> Iterator[int]:
    """Each by its share, without end."""
    if len(weights) == 1:
        return itertools.repeat(next(iter(weights)))
    return _picks(list(weights), np.array(list(weights.values())), rng)


def _picks(values: list[int], weights: F64, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from in_pieces(rng.choice(values, _AT_ONCE, p=weights / weights.sum()))

"""A stream of asks at another rate, with other lengths, for other models."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from kvloom.types.errors import ConfigError
from kvloom.workload.ask import Ask, Segment
from kvloom.workload.make import cut, draw_priorities, shares
from kvloom.workload.mixing import mix
from kvloom.workload.spec import WorkloadSpec
from kvloom.workload.traces import NAMELESS


def faster(asks: Iterable[Ask], rate: float) -> Iterator[Ask]:
    """`rate` times as many a second."""
    return (msgspec.structs.replace(ask, at=ask.at / rate) for ask in asks)


def longer(asks: Iterable[Ask], length: float) -> Iterator[Ask]:
    """`length` times as many tokens, at least one of each kind; what was shared still is."""
    for ask in asks:
        shared = tuple(Segment(one.id, _times(one.tokens, length)) for one in ask.shared)
        held = sum(one.tokens for one in ask.shared)
        own = _times(ask.prompt - held, length) if ask.prompt > held else 0
        prompt = sum(one.tokens for one in shared) + own
        yield msgspec.structs.replace(ask, prompt=prompt, output=_times(ask.output, length), shared=shared)


def replay(asks: Iterable[Ask], spec: WorkloadSpec) -> Iterator[Ask]:
    """As the spec has it. Asks of no named model go to the spec's models by their shares; those whose prompts
    begin with the same two segments go to one model. Raises ConfigError for a model that the spec lacks."""
    assert spec.replay is not None
    most = spec.replay.max_total or np.inf
    scaled = longer(faster(asks, spec.replay.rate_scale), spec.replay.length_scale)
    fitting = (ask for ask in scaled if ask.prompt + ask.output <= most)
    return cut(_assigned(fitting, spec), spec)


def _assigned(asks: Iterable[Ask], spec: WorkloadSpec) -> Iterator[Ask]:
    names = list(spec.models)
    picking, ranking = (np.random.default_rng([spec.seed, kind]) for kind in (1, 2))
    bounds = list(accumulate(shares(spec)))
    drawn = {
        name: draw_priorities(weights, ranking)
        for name, model in spec.models.items()
        if (weights := model.priorities or spec.priorities)
    }
    for ask in asks:
        model = _pick(ask, spec.seed, names, bounds, picking) if ask.model == NAMELESS else ask.model
        if model not in spec.models:
            raise ConfigError(f"replay.file: asks for `{model}`; models: names {', '.join(names)}")
        priority = next(drawn[model]) if model in drawn else ask.priority
        yield msgspec.structs.replace(ask, model=model, priority=priority)


def _pick(
    ask: Ask, seed: int, names: Sequence[str], bounds: Sequence[float], rng: np.random.Generator
) -> str:
    if len(ask.shared) < 2:
        draw = float(rng.random())
    else:
        draw = mix(mix(mix(seed) + ask.shared[0].id) + ask.shared[1].id) / 2**64
    return names[min(bisect(bounds, draw), len(names) - 1)]


def _times(tokens: int, length: float) -> int:
    return max(1, round(tokens * length))

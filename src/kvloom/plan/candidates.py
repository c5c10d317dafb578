"""A model on a kind of mesh, by itself: its shares, its times, what it can answer (MuxServe, algorithm 2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

import numpy as np

from kvloom.plan.cluster import Costs, Demand, MeshKind
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.growth import BATCHES
from kvloom.plan.plan import CHUNK_TOKENS, pool_bytes, request_bytes

NEAR: Final = 1.05  # a prefill this close to the fastest is as good; it leads to MuxServe's 80 % for a 7B
_DECODE_MOST: Final = 0.9  # a decode leaves something for the prefill beside it
_CROWD: Final = 8  # jobs that are asked about at once, to learn what part of the device each occupies
_PROBED: Final = 9  # of BATCHES every ninth is asked about so; 27 is the last


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decodes on one share, by batch."""

    share: float
    seconds: tuple[float, ...]
    """For whole requests' outputs."""
    occupied: tuple[float, ...]
    """The part of what the device can do that the decodes take while they run."""


@dataclass(frozen=True, slots=True)
class UnitCandidate:
    """A demand on a kind of mesh."""

    prefill_share: float
    prefill: tuple[float, ...]
    """Seconds of whole batches' prompts."""
    lean: Decoding
    """The decodes on the smallest share that answers the demand alone."""
    full: Decoding
    """The decodes on the best share."""
    start: int
    """The place in BATCHES at which the demand is answered; 0 if it is not, or not surely."""
    throughput: float
    """Requests a second, alone."""
    busy: float
    """The part of the time in which something decodes."""
    request: int
    """Bytes of K and V."""


class CandidateCatalog:
    """Finds candidates; keeps what it has measured with the cost model, which does not depend on rates."""

    def __init__(self, demands: Sequence[Demand], costs: Costs) -> None:
        self._shapes: Mapping[str, ModelShape] = {demand.name: demand.shape for demand in demands}
        self._costs = costs
        self._models: dict[MeshKind, CostModel] = {}
        self._prefills: dict[tuple[MeshKind, str], tuple[float, tuple[float, ...]]] = {}
        self._decodes: dict[tuple[MeshKind, str, float], Decoding] = {}

    def candidate(self, kind: MeshKind, demand: Demand, rate: float) -> UnitCandidate | None:
        """Returns the candidate for `rate` of the demand's requests; None if the mesh is too small for the
        model."""
        request = request_bytes(demand, kind)
        room = pool_bytes(kind, [demand.shape]) // request
        if room < 1 or not kind.splits(demand.shape):
            return None
        cap = bisect_left(BATCHES, room + 1)
        prefill_share, prefill = self._prefill(kind, demand)
        found = None
        shares = [share for share in kind.shares if share <= _DECODE_MOST] or [1.0]
        full = self.decoding(kind, demand, shares[-1])
        start, throughput = alone(prefill, full.seconds, cap, rate)
        if throughput >= rate:  # then faster shares do it too: the smallest that does is found by bisection
            low, high = 0, len(shares) - 1
            while low < high:
                middle = (low + high) // 2
                if alone(prefill, self.decoding(kind, demand, shares[middle]).seconds, cap, rate)[1] >= rate:
                    high = middle
                else:
                    low = middle + 1
            found = shares[low]
        lean = full if found is None else self.decoding(kind, demand, found)
        busy = 1.0 - exp(-rate * lean.seconds[start])
        return UnitCandidate(
            prefill_share, prefill, lean, full, start if found else 0, throughput, busy, request
        )

    def _model(self, kind: MeshKind) -> CostModel:
        if kind not in self._models:
            self._models[kind] = self._costs(kind.device, kind.gpus, self._shapes)
        return self._models[kind]

    def _prefill(self, kind: MeshKind, demand: Demand) -> tuple[float, tuple[float, ...]]:
        """Returns the smallest share on which a full job is near the fastest, and the seconds of batches'
        prompts on it. A batch is not prefilled at once: with each decode step some sequences end, so many
        prompts take their places, and these are one job."""
        found = self._prefills.get((kind, demand.name))
        if found is None:
            cost, prompt = self._model(kind), max(1, round(demand.prompt))
            name, full = demand.name, max(1, CHUNK_TOKENS // prompt)
            times = [cost.seconds(Work.prefill(name, share, [prompt] * full)) for share in kind.shares]
            share = next(s for s, t in zip(kind.shares, times, strict=True) if t <= NEAR * min(times))
            jobs = {n: cost.seconds(Work.prefill(name, share, [prompt] * n)) for n in range(1, full + 1)}
            together = [max(1, min(full, round(batch / demand.output))) for batch in BATCHES]
            found = share, tuple(b / n * jobs[n] for b, n in zip(BATCHES, together, strict=True))
            self._prefills[kind, name] = found
        return found

    def decoding(self, kind: MeshKind, demand: Demand, share: float) -> Decoding:
        """Returns the decodes on that share."""
        found = self._decodes.get((kind, demand.name, share))
        if found is None:
            cost, context = self._model(kind), round(demand.prompt + demand.output / 2)
            works = [Work.decode(demand.name, share, [context] * batch) for batch in BATCHES]
            steps = [cost.seconds(work) for work in works]
            probed = range(0, len(works), _PROBED)
            crowded = [cost.seconds(works[n], [works[n]] * (_CROWD - 1)) / steps[n] / _CROWD for n in probed]
            found = Decoding(
                share,
                tuple(demand.output * step for step in steps),
                tuple(
                    np.interp(range(len(works)), probed, np.maximum.accumulate(crowded))
                    .clip(0.0, 1.0)
                    .tolist()
                ),
            )
            self._decodes[kind, demand.name, share] = found
        return found


def alone(prefill: Sequence[float], decode: Sequence[float], cap: int, rate: float) -> tuple[int, float]:
    """Solves equation 3 for one LLM. Returns the smallest of the first `cap` batches whose throughput reaches
    `rate`, found by binary search, else the largest; and its requests a second."""

    def throughput(at: int) -> float:
        return BATCHES[at] / (prefill[at] + decode[at])

    at = bisect_left(range(cap - 1), rate, key=throughput)
    return at, throughput(at)

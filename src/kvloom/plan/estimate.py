"""Estimates the requests that a unit of models on a mesh answers (MuxServe, equation 3), from what each model
does on such a mesh by itself: its shares, its times, what it can answer (algorithm 2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Final

import numpy as np

from kvloom.plan.cluster import Costs, Demand, MeshKind
from kvloom.plan.cost.loading import load_bandwidth
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.speculation import seconds_per_token
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.growth import AMPLE, BATCHES, BEYOND, Bound, Growth, ModelShare, grow
from kvloom.plan.plan import LEAST_RATE, pool_bytes, request_bytes, usable_bytes
from kvloom.plan.residency import UnitResidency, unit_residency
from kvloom.types.spec import GPU_CHUNK_TOKENS, Slo

NEAR: Final = 1.05  # a prefill this close to the fastest is as good; it leads to MuxServe's 80 % for a 7B
_DECODE_MOST: Final = 0.9  # a decode leaves something for the prefill beside it
_CROWD: Final = 8  # jobs that are asked about at once, to learn what part of the device each occupies
_PROBED: Final = 9  # of BATCHES every ninth is asked about so; 27 is the last


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decodes on one share, by batch."""

    share: float
    seconds: tuple[float, ...]
    """The seconds of whole requests' outputs."""
    occupied: tuple[float, ...]
    """The part of what the device can do that the decodes take while they run."""


@dataclass(frozen=True, slots=True)
class UnitCandidate:
    """A demand on a kind of mesh, with what the models' times and shares allow there."""

    prefill_share: float
    prefill: tuple[float, ...]
    """The seconds of whole batches' prompts."""
    lean: Decoding
    """The decodes on the smallest share that answers the demand alone."""
    full: Decoding
    """The decodes on the best share."""
    start: int
    """The place in BATCHES at which the demand is answered; 0 if it is not, or not surely."""
    throughput: float
    """The requests a second that it answers alone."""
    busy: float
    """The part of the time in which something decodes."""
    request: int
    """The bytes of K and V of a request."""
    counted: int
    """The bytes for which a request of each batch counts: all of them, or if weights sleep, those that it has
    on average, as K and V of models that nobody asks give way."""


class CandidateCatalog:
    """Finds candidates, and keeps what it has measured with the cost model, which does not depend on
    rates."""

    def __init__(self, demands: Sequence[Demand], costs: Costs) -> None:
        self._shapes: Mapping[str, ModelShape] = {demand.name: demand.shape for demand in demands}
        self._costs = costs
        self._models: dict[MeshKind, CostModel] = {}
        self._prefills: dict[tuple[MeshKind, str], tuple[float, tuple[float, ...]]] = {}
        self._decodes: dict[tuple[MeshKind, str, float, str], Decoding] = {}

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
        counted = int(busy * request) + 1 if kind.budget else request
        return UnitCandidate(
            prefill_share, prefill, lean, full, start if found else 0, throughput, busy, request, counted
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
            name, full = demand.name, max(1, GPU_CHUNK_TOKENS // prompt)
            times = [cost.seconds(Work.prefill(name, share, [prompt] * full)) for share in kind.shares]
            share = next(s for s, t in zip(kind.shares, times, strict=True) if t <= NEAR * min(times))
            jobs = {n: cost.seconds(Work.prefill(name, share, [prompt] * n)) for n in range(1, full + 1)}
            together = [max(1, min(full, round(batch / demand.output))) for batch in BATCHES]
            found = share, tuple(b / n * jobs[n] for b, n in zip(BATCHES, together, strict=True))
            self._prefills[kind, name] = found
        return found

    def decoding(self, kind: MeshKind, demand: Demand, share: float) -> Decoding:
        """Returns the decodes on that share."""
        key = kind, demand.name, share, demand.speculation
        found = self._decodes.get(key)
        if found is None:
            cost, context = self._model(kind), round(demand.prompt + demand.output / 2)
            works = [Work.decode(demand.name, share, [context] * batch) for batch in BATCHES]
            steps = tokens = [cost.seconds(work) for work in works]
            if demand.speculation != "none":
                each, rate, draft = demand.name, demand.acceptance, demand.draft
                tokens = [
                    seconds_per_token(cost, each, share, [context] * batch, rate, draft) for batch in BATCHES
                ]
            probed = range(0, len(works), _PROBED)
            if kind.abilities.shares:
                beside = [cost.seconds(works[n], [works[n]] * (_CROWD - 1)) for n in probed]
                crowded = [seconds / steps[n] / _CROWD for n, seconds in zip(probed, beside, strict=True)]
            else:  # Jobs take turns, and each has the whole device.
                crowded = [1.0] * len(probed)
            found = Decoding(
                share,
                tuple(demand.output * token for token in tokens),
                tuple(
                    np.interp(range(len(works)), probed, np.maximum.accumulate(crowded))
                    .clip(0.0, 1.0)
                    .tolist()
                ),
            )
            self._decodes[key] = found
        return found


def alone(prefill: Sequence[float], decode: Sequence[float], cap: int, rate: float) -> tuple[int, float]:
    """Solves equation 3 for one LLM. Returns the smallest of the first `cap` batches whose throughput reaches
    `rate`, found by binary search, else the largest; and its requests a second."""

    def throughput(at: int) -> float:
        return BATCHES[at] / (prefill[at] + decode[at])

    at = bisect_left(range(cap - 1), rate, key=throughput)
    return at, throughput(at)


Item = int
_OFTEN: Final = 256
_ENDLESS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a unit, whose items are in order."""

    items: tuple[Item, ...]
    throughput: tuple[float, ...]
    """The requests a second of each item that could be answered."""
    level: float
    """The smallest of throughput / rate, at most about AMPLE."""
    score: float
    """The value that the search makes large: requests answered, and a little for what could be beyond."""
    answered: float
    bound: Bound
    """The resource that keeps the unit from more, if the demand is not met."""
    residency: UnitResidency | None
    """The residency that is expected of the weights, if they sleep."""


_EMPTY: Final = Estimate((), (), AMPLE, 0.0, 0.0, "", None)


class Estimator:
    """An item is one of so many replicas among which a demand is split. All of them are alike, and no unit
    holds two of the same demand."""

    def __init__(
        self, demands: Sequence[Demand], costs: Costs, watch: Callable[[int], None] | None = None
    ) -> None:
        """`watch` is told now and then how many units were estimated."""
        self._watch = watch
        self.demands = tuple(demands)
        self.evaluations = 0
        self._looks = 0
        self._catalog = CandidateCatalog(demands, costs)
        self._items: list[tuple[int, int]] = []  # (demand, replicas)
        self._numbers: dict[tuple[int, int], Item] = {}
        self._candidates: dict[tuple[MeshKind, Item, str], UnitCandidate | None] = {}
        self._known: dict[tuple[MeshKind, frozenset[Item]], Estimate | None] = {}

    def item(self, demand: int, replicas: int) -> Item:
        """Returns one of so many replicas of a demand; the same number each time."""
        key = demand, replicas
        if key not in self._numbers:
            self._numbers[key] = len(self._items)
            self._items.append(key)
        return self._numbers[key]

    def demand(self, item: Item) -> int:
        return self._items[item][0]

    def rate(self, item: Item) -> float:
        demand, replicas = self._items[item]
        return self.demands[demand].rate / replicas

    def split(self, item: Item, times: int) -> Item:
        """Returns one of so many times as many replicas."""
        demand, replicas = self._items[item]
        return self.item(demand, replicas * times)

    def served(self, kind: MeshKind, item: Item, beside: Sequence[Item] = ()) -> Demand:
        """Returns the demand as a unit of these items meets it: it speculates only on a mesh of a kind that
        does, and with a model that drafts only if that is on the unit."""
        demand = self.demands[self.demand(item)]
        names = [self.demands[self.demand(other)].name for other in beside]
        if kind.abilities.speculates and (demand.draft is None or demand.draft in names):
            return demand
        return replace(demand, speculation="none")

    def candidate(self, kind: MeshKind, item: Item, beside: Sequence[Item] = ()) -> UnitCandidate | None:
        """Returns the candidate for an item on a mesh; None if that is too small. `beside` are the unit's
        items."""
        demand = self.served(kind, item, beside)
        key = kind, item, demand.speculation
        if key not in self._candidates:
            self._candidates[key] = self._catalog.candidate(kind, demand, self.rate(item))
        return self._candidates[key]

    @property
    def spent(self) -> float:
        """Returns the number of evaluations, and of looks at units that were known, which take a hundredth of
        the time."""
        return self.evaluations + 0.01 * self._looks

    def unit(self, kind: MeshKind, items: frozenset[Item]) -> Estimate | None:
        """Returns F of equation 1 for these items on such a mesh; None if they do not fit."""
        if not items:
            return _EMPTY
        key = kind, items
        self._looks += 1
        if key not in self._known:
            self.evaluations += 1
            if self._watch is not None and self.evaluations % _OFTEN == 0:
                self._watch(self.evaluations)
            self._known[key] = self._estimate(kind, tuple(sorted(items)))
        return self._known[key]

    def known(self, kind: MeshKind, items: frozenset[Item]) -> Estimate:
        """Returns the same for items that are known to fit."""
        found = self.unit(kind, items)
        assert found is not None
        return found

    def _estimate(self, kind: MeshKind, items: tuple[Item, ...]) -> Estimate | None:
        candidates = self._held(kind, items)
        if len(candidates) < len(items):
            return None
        growth = self._grow(items, candidates, [c.full for c in candidates], self.pool(kind, items))
        if growth is None:
            return None
        rates = [self.rate(item) for item in items]
        throughput = tuple(ratio * rate for ratio, rate in zip(growth.ratios, rates, strict=True))
        level, missed, residency = growth.level, 0.0, None
        if kind.budget:
            residency = self._residency(kind, items, candidates, growth)
            if residency.busy >= 1.0:
                return None
            if min(residency.awake) < 1.0:
                level = min(level, 1.0)  # fewer or smaller models beside them would be better for some
                missed = self._missed(items, candidates, throughput, residency)
        return Estimate(
            items=items,
            throughput=throughput,
            level=level,
            score=growth.score - missed,
            answered=sum(min(rate, each) for rate, each in zip(rates, throughput, strict=True)),
            bound=growth.bound,
            residency=residency,
        )

    def _residency(
        self, kind: MeshKind, items: Sequence[Item], candidates: Sequence[UnitCandidate], growth: Growth
    ) -> UnitResidency:
        """Returns whose weights are awake in what K and V leave of a budget. Those have what the requests in
        progress hold, by Little's law over the cycles of equation 3, and at least the largest request."""
        held = [
            batch / max(1.0, ratio) * candidate.request if self.rate(item) else 0.0
            for item, candidate, batch, ratio in zip(
                items, candidates, growth.batches, growth.ratios, strict=True
            )
        ]
        needed = max(sum(held), *(candidate.request for candidate in candidates))
        room = usable_bytes(kind) - min(needed, self.pool(kind, items))
        weights = [self.demands[self.demand(item)].shape.weight_bytes for item in items]
        rates = [max(self.rate(item), LEAST_RATE) for item in items]
        return unit_residency(rates, weights, room, load_bandwidth(None))

    def _missed(
        self,
        items: Sequence[Item],
        candidates: Sequence[UnitCandidate],
        throughput: Sequence[float],
        residency: UnitResidency,
    ) -> float:
        """Returns the requests a second that are answered, but get their first token too late because they
        are cold. A cold request that is in time counts a little less than others, which breaks ties."""
        missed = 0.0
        for at, (item, candidate) in enumerate(zip(items, candidates, strict=True)):
            due = (self.demands[self.demand(item)].slo or Slo()).ttft - candidate.prefill[0]
            cold = min(self.rate(item), throughput[at]) * (1.0 - residency.awake[at])
            missed += cold * (residency.late(at, due) + BEYOND)
        return missed

    def pool(self, kind: MeshKind, items: Sequence[Item]) -> int:
        """Returns the bytes that these leave for K and V; if weights sleep, the most that they ever leave."""
        return pool_bytes(kind, [self.demands[self.demand(item)].shape for item in items])

    def expected_pool(self, kind: MeshKind, items: Sequence[Item]) -> int:
        """Returns the bytes that a unit that is known to fit has for K and V, on average if weights sleep."""
        residency = self.known(kind, frozenset(items)).residency
        if residency is None:
            return self.pool(kind, items)
        weights = [self.demands[self.demand(item)].shape.weight_bytes for item in items]
        awake = sum(size * part for size, part in zip(weights, residency.awake, strict=True))
        return usable_bytes(kind) - int(awake)

    def settled(self, kind: MeshKind, items: Sequence[Item]) -> list[Decoding]:
        """Returns how the models of a unit that is known to fit decode beside others: each on the smallest
        share on which it answers its demand alone, or a larger one, the same for all, until they do so
        together; if none will do, on the share that answers most."""
        candidates, pool = self._held(kind, items), self.pool(kind, items)
        best: tuple[float, list[Decoding]] | None = None
        for share in kind.shares:
            decodings = [
                self._catalog.decoding(
                    kind, self.served(kind, item, items), min(max(share, c.lean.share), c.full.share)
                )
                for item, c in zip(items, candidates, strict=True)
            ]
            growth = self._grow(items, candidates, decodings, pool)
            assert growth is not None
            if best is None or growth.score > best[0]:
                best = growth.score, decodings
            if growth.level >= 1.0:
                break
        assert best is not None
        return best[1]

    def unbounded(self, kind: MeshKind, items: Sequence[Item]) -> Growth:
        """Returns what a unit that is known to fit could answer if memory had no end."""
        candidates = self._held(kind, items)
        growth = self._grow(items, candidates, [c.full for c in candidates], _ENDLESS)
        assert growth is not None
        return growth

    def _held(self, kind: MeshKind, items: Sequence[Item]) -> list[UnitCandidate]:
        found = [self.candidate(kind, item, items) for item in items]
        return [candidate for candidate in found if candidate is not None]

    def _grow(
        self,
        items: Sequence[Item],
        candidates: Sequence[UnitCandidate],
        decodings: Sequence[Decoding],
        pool: int,
    ) -> Growth | None:
        sides = [
            ModelShare(
                rate=self.rate(item),
                prefill=candidate.prefill,
                decode=decoding.seconds,
                occupied=decoding.occupied,
                busy=candidate.busy,
                request=candidate.counted,
            )
            for item, candidate, decoding in zip(items, candidates, decodings, strict=True)
        ]
        return grow(sides, pool)

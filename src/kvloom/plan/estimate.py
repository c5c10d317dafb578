"""Estimates the requests that a unit of models on a mesh answers (MuxServe, equation 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.plan.candidates import CandidateCatalog, Decoding, UnitCandidate
from kvloom.plan.cluster import Costs, Demand, MeshKind
from kvloom.plan.growth import AMPLE, Bound, Growth, ModelShare, grow
from kvloom.plan.plan import pool_bytes

Item = int
_OFTEN: Final = 256
_ENDLESS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a unit, whose items are in order."""

    items: tuple[Item, ...]
    throughput: tuple[float, ...]
    """Requests a second that each item could be answered."""
    level: float
    """The smallest of throughput / rate, at most about AMPLE."""
    score: float
    """The value that the search makes large: requests answered, and a little for what could be beyond."""
    answered: float
    bound: Bound
    """The resource that keeps the unit from more, if the demand is not met."""


_EMPTY: Final = Estimate((), (), AMPLE, 0.0, 0.0, "")


class Estimator:
    """An item is a demand split among so many replicas, one of them: all of them are alike, and no unit holds
    two of the same."""

    def __init__(
        self, demands: Sequence[Demand], costs: Costs, watch: Callable[[int], None] | None = None
    ) -> None:
        """watch: is told now and then how many units were estimated."""
        self._watch = watch
        self.demands = tuple(demands)
        self.evaluations = 0
        self._looks = 0
        self._catalog = CandidateCatalog(demands, costs)
        self._items: list[tuple[int, int]] = []  # (demand, replicas)
        self._numbers: dict[tuple[int, int], Item] = {}
        self._candidates: dict[tuple[MeshKind, Item], UnitCandidate | None] = {}
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

    def candidate(self, kind: MeshKind, item: Item) -> UnitCandidate | None:
        key = kind, item
        if key not in self._candidates:
            demand = self.demands[self.demand(item)]
            self._candidates[key] = self._catalog.candidate(kind, demand, self.rate(item))
        return self._candidates[key]

    @property
    def spent(self) -> float:
        """Evaluations, and looks at units that were known, which take a hundredth of the time."""
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
        return Estimate(
            items=items,
            throughput=throughput,
            level=growth.level,
            score=growth.score,
            answered=sum(min(rate, each) for rate, each in zip(rates, throughput, strict=True)),
            bound=growth.bound,
        )

    def pool(self, kind: MeshKind, items: Sequence[Item]) -> int:
        """Bytes that these leave for K and V."""
        return pool_bytes(kind, [self.demands[self.demand(item)].shape for item in items])

    def settled(self, kind: MeshKind, items: Sequence[Item]) -> list[Decoding]:
        """Returns how the models of a unit that is known to fit decode beside others: each on the smallest
        share on which it answers its demand alone, or a larger one, the same for all, until they do so
        together; if none will do, on the share that answers most."""
        candidates, pool = self._held(kind, items), self.pool(kind, items)
        best: tuple[float, list[Decoding]] | None = None
        for share in kind.shares:
            decodings = [
                self._catalog.decoding(
                    kind, self.demands[self.demand(item)], min(max(share, c.lean.share), c.full.share)
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
        found = [self.candidate(kind, item) for item in items]
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
                request=candidate.request,
            )
            for item, candidate, decoding in zip(items, candidates, decodings, strict=True)
        ]
        return grow(sides, pool)

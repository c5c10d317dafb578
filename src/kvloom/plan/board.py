"""A group's meshes and what is on them, while models are placed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvloom.plan.cluster import MeshKind
from kvloom.plan.estimate import Estimate, Estimator, Item

Unit = frozenset[Item]
Change = tuple[tuple[int, Unit], ...]
"""Meshes, by number, and what is on them instead."""


@dataclass(frozen=True, slots=True)
class Placement:
    """units: what is on each mesh. left: items that no mesh had room for. answered: requests a second."""

    kinds: tuple[MeshKind, ...]
    units: tuple[Unit, ...]
    left: tuple[Item, ...]
    score: float
    answered: float

    @property
    def rank(self) -> tuple[int, float]:
        """The larger, the better: first all models have a place, then they answer much."""
        return -len(self.left), self.score


class Board:
    """All units on it fit. width: meshes of a kind that are looked at for an item."""

    def __init__(
        self, estimator: Estimator, kinds: Sequence[MeshKind], width: int, units: Sequence[Unit] = ()
    ) -> None:
        self.kinds = tuple(kinds)
        self.units: list[Unit] = [frozenset()] * len(kinds)
        self.estimates: list[Estimate] = [estimator.known(kind, frozenset()) for kind in kinds]
        self._estimator = estimator
        self._width = width
        self._empty: dict[MeshKind, list[int]] = {}
        self._occupied: dict[MeshKind, list[tuple[float, int]]] = {kind: [] for kind in kinds}
        for at, kind in enumerate(kinds):
            self._empty.setdefault(kind, []).append(at)
        self.do(tuple(enumerate(units)))

    def do(self, change: Change) -> None:
        for at, unit in change:
            kind = self.kinds[at]
            if self.units[at]:
                found = self._occupied[kind]
                del found[bisect_left(found, (-self.estimates[at].level, at))]
            else:
                self._empty[kind].remove(at)
            self.units[at] = unit
            self.estimates[at] = self._estimator.known(kind, unit)
            if unit:
                insort(self._occupied[kind], (-self.estimates[at].level, at))
            else:
                insort(self._empty[kind], at)

    def open(self, item: Item) -> Iterator[int]:
        """Meshes worth a look for an item: of each kind an empty one, as they are all alike, and the occupied
        ones with most to spare."""
        for kind, empty in self._empty.items():
            if empty:
                yield empty[0]
            yield from [at for _, at in self._occupied[kind][: self._width] if item not in self.units[at]]

    def gain(self, change: Change) -> float | None:
        """Of score; None where something does not fit."""
        gain = 0.0
        for at, unit in change:
            estimate = self._estimator.unit(self.kinds[at], unit)
            if estimate is None:
                return None
            gain += estimate.score - self.estimates[at].score
        return gain

    def placement(self, left: Sequence[Item]) -> Placement:
        return Placement(
            self.kinds,
            tuple(self.units),
            tuple(left),
            sum(estimate.score for estimate in self.estimates),
            sum(estimate.answered for estimate in self.estimates),
        )

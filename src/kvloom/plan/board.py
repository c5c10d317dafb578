"""A group's meshes and what is on them, while models are placed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.plan.cluster import MeshKind
from kvloom.plan.estimate import Estimate, Estimator, Item

Unit = frozenset[Item]
Change = tuple[tuple[int, Unit], ...]
"""Meshes, by number, and the items that are on them instead."""


@dataclass(frozen=True, slots=True)
class BoardPlacement:
    """A placement of items on meshes."""

    kinds: tuple[MeshKind, ...]
    units: tuple[Unit, ...]
    """The items on each mesh."""
    left: tuple[Item, ...]
    """Items that no mesh had room for."""
    score: float
    answered: float
    """The requests a second that are answered."""

    @property
    def rank(self) -> tuple[int, float]:
        """Returns a value that is the larger the better: it is better first that all models have a place,
        then that they answer much."""
        return -len(self.left), self.score


class Board:
    """A placement that is being made. All units on it fit."""

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
        """Returns the meshes that are worth a look for an item: of each kind an empty one, as they are all
        alike, and the occupied ones with most to spare."""
        for kind, empty in self._empty.items():
            if empty:
                yield empty[0]
            yield from [at for _, at in self._occupied[kind][: self._width] if item not in self.units[at]]

    def gain(self, change: Change) -> float | None:
        """Returns the gain of score; None if something does not fit."""
        gain = 0.0
        for at, unit in change:
            estimate = self._estimator.unit(self.kinds[at], unit)
            if estimate is None:
                return None
            gain += estimate.score - self.estimates[at].score
        return gain

    def placement(self, left: Sequence[Item]) -> BoardPlacement:
        return BoardPlacement(
            self.kinds,
            tuple(self.units),
            tuple(left),
            sum(estimate.score for estimate in self.estimates),
            sum(estimate.answered for estimate in self.estimates),
        )


_PASSES: Final = 16
_ENOUGH: Final = 1.25  # times the demand: requests come in bursts
_LEAST: Final = 1e-9  # requests a second; a gain below is rounding


def improve(estimator: Estimator, placement: BoardPlacement, *, width: int, budget: int) -> BoardPlacement:
    """Places the items that were left, and moves or swaps items of units that hardly meet their demand, while
    that gains and fewer than `budget` evaluations were made in all. `width` is that of the `Board`."""
    board, left = Board(estimator, placement.kinds, width, placement.units), list(placement.left)
    for item in placement.left:
        change = _room(estimator, board, item)
        if change is not None:
            left.remove(item)
            board.do(change)
    for _ in range(_PASSES):
        gained = False
        for _, item, at in _wishes(estimator, board, budget):
            if estimator.spent > budget:
                return board.placement(left)
            if item not in board.units[at] or board.estimates[at].level >= _ENOUGH:
                continue
            gain, change = _best(board, _changes(board, at, item))
            if gain > _LEAST:
                board.do(change)
                gained = True
        if not gained:
            break
    return board.placement(left)


def _wishes(estimator: Estimator, board: Board, budget: int) -> list[tuple[float, Item, int]]:
    """Returns the items that would gain by a change, and their meshes. The item that gains most goes first,
    or a smaller gain may stand in its way."""
    found = []
    for at, unit in enumerate(board.units):
        for item in sorted(unit):
            if estimator.spent <= budget and board.estimates[at].level < _ENOUGH:
                gain, _ = _best(board, _changes(board, at, item))
                if gain > _LEAST:
                    found.append((-gain, item, at))
    return sorted(found)


def _best(board: Board, changes: Iterator[Change]) -> tuple[float, Change]:
    best: tuple[float, Change] = float("-inf"), ()
    for change in changes:
        gain = board.gain(change)
        if gain is not None and gain > best[0]:
            best = gain, change
    return best


def _changes(board: Board, at: int, item: Item) -> Iterator[Change]:
    """Yields the moves of the item to another mesh, by itself or in exchange for an item there."""
    units = board.units
    for to in board.open(item):
        if to == at:
            continue
        rest = units[at] - {item}
        yield (at, rest), (to, units[to] | {item})
        for other in sorted(units[to] - units[at]):
            yield (at, rest | {other}), (to, (units[to] - {other}) | {item})


def _room(estimator: Estimator, board: Board, item: Item) -> Change | None:
    """Returns the best way to place an item that nothing has room for: the items in its way go elsewhere."""

    def changes() -> Iterator[Change]:
        for at, kind in enumerate(board.kinds):
            unit = board.units[at]
            if item in unit or estimator.candidate(kind, item) is None:
                continue
            yield ((at, unit | {item}),)
            for other in sorted(unit):
                for to in board.open(other):
                    if to != at:
                        yield (at, (unit - {other}) | {item}), (to, board.units[to] | {other})

    return _best(board, changes())[1] or None

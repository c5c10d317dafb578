"""Makes a placement better by moving and swapping single models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvloom.plan.board import Board, Change, Placement
from kvloom.plan.estimate import Estimator, Item

_PASSES: Final = 16
_ENOUGH: Final = 1.25  # times the demand: requests come in bursts
_LEAST: Final = 1e-9  # requests a second; a gain below is rounding


def improve(estimator: Estimator, placement: Placement, *, width: int, budget: int) -> Placement:
    """Places what was left, and moves or swaps what is on units that hardly meet their demand, while that
    gains and fewer than `budget` evaluations were made in all. width: see `Board`."""
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
    """Who would gain by a change, and where it is: who gains most goes first, or a smaller gain may stand in
    its way."""
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
    """The item to another mesh, by itself or for one that is there."""
    units = board.units
    for to in board.open(item):
        if to == at:
            continue
        rest = units[at] - {item}
        yield (at, rest), (to, units[to] | {item})
        for other in sorted(units[to] - units[at]):
            yield (at, rest | {other}), (to, (units[to] - {other}) | {item})


def _room(estimator: Estimator, board: Board, item: Item) -> Change | None:
    """The best way to place an item that nothing has room for: what is in its way goes elsewhere."""

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

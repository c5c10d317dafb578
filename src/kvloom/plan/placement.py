"""Which models go to which mesh of a group (MuxServe, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvloom.plan.board import Board, Placement
from kvloom.plan.cluster import MeshKind
from kvloom.plan.estimate import Estimator, Item

_TIE: Final = 0.01  # of the item's rate: gains that differ by less are alike

Order = Callable[[Item], float]


def place(
    estimator: Estimator,
    kinds: Sequence[MeshKind],
    items: Sequence[Item],
    order: Order,
    *,
    small: bool,
    width: int,
) -> Placement:
    """Algorithm 1 on one group of meshes: items by `order`, the largest first, each to the mesh where it
    gains most. small: of meshes that gain alike, the smallest; else the one with the best score. width: see
    `Board`."""
    board = Board(estimator, kinds, width)
    left = []
    for item in sorted(items, key=lambda item: (-order(item), item)):
        options = []
        for at in board.open(item):
            gain = board.gain(((at, board.units[at] | {item}),))
            if gain is not None:
                options.append((gain, at))
        if not options:
            left.append(item)
            continue
        least = max(options)[0] - (_TIE * estimator.rate(item) if small else 0.0)
        alike = [(kinds[at].bytes if small else 0, -gain, at) for gain, at in options if gain >= least]
        chosen = min(alike)[2]
        board.do(((chosen, board.units[chosen] | {item}),))
    return board.placement(left)

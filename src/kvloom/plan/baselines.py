"""Placements to compare with: spatial partitioning, and placement by free memory alone (MuxServe, sections
4.1 and 4.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kvloom.plan.board import Board, BoardPlacement
from kvloom.plan.cluster import MeshKind, Nodes, mesh_kinds, meshes
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.explain import check_each, check_left
from kvloom.plan.plan import PlacementPlan
from kvloom.plan.planner import write_down
from kvloom.types.errors import ConfigError

Free = dict[int, int]
"""Devices that are free, by the node's number."""


def spatial(
    estimator: Estimator, cluster: Sequence[Nodes], sizes: Mapping[str, int] | None = None
) -> BoardPlacement:
    """Places each model on a mesh of its own. sizes: the devices of each; if they are left out, each model
    begins with the smallest mesh that holds it, and the one that gains the most requests a device gets more
    while there are any. Raises ConfigError."""
    check_each(estimator, cluster)
    items = [estimator.item(demand, 1) for demand in range(len(estimator.demands))]
    options = [_options(estimator, cluster, item, sizes) for item in items]
    free = {n: nodes.gpus for n, nodes in enumerate(_nodes(cluster))}
    chosen: dict[Item, tuple[MeshKind, int]] = {}
    for item in sorted(items, key=lambda item: -options[item][0].gpus):
        home = next((home for kind in options[item] if (home := _home(cluster, free, kind))), None)
        if home is None:
            check_left(estimator, cluster, _placed(estimator, chosen, [item]))
        assert home is not None
        chosen[item] = home
        free[home[1]] -= home[0].gpus
    while grown := _grown(estimator, cluster, chosen, options, free):
        item, kind, node = grown
        free[chosen[item][1]] += chosen[item][0].gpus
        free[node] -= kind.gpus
        chosen[item] = kind, node
    return _placed(estimator, chosen, [])


def _options(
    estimator: Estimator, cluster: Sequence[Nodes], item: Item, sizes: Mapping[str, int] | None
) -> list[MeshKind]:
    """Returns the kinds of meshes that the model may have, smallest first. Raises ConfigError if there is
    none."""
    name = estimator.demands[estimator.demand(item)].name
    kinds = [kind for kind in mesh_kinds(cluster) if estimator.candidate(kind, item) is not None]
    if sizes is not None:
        kinds = [kind for kind in kinds if kind.gpus == sizes[name]]
        if not kinds:
            raise ConfigError(f"model {name!r} does not fit on {sizes[name]} devices of a node")
    return kinds


def _nodes(cluster: Sequence[Nodes]) -> list[Nodes]:
    return [nodes for nodes in cluster for _ in range(nodes.count)]


def _home(cluster: Sequence[Nodes], free: Free, kind: MeshKind) -> tuple[MeshKind, int] | None:
    """Returns the fullest node with room for such a mesh."""
    rooms = [
        (free[n], n)
        for n, nodes in enumerate(_nodes(cluster))
        if nodes.mesh(kind.gpus) == kind and free[n] >= kind.gpus
    ]
    return (kind, min(rooms)[1]) if rooms else None


def _grown(
    estimator: Estimator,
    cluster: Sequence[Nodes],
    chosen: Mapping[Item, tuple[MeshKind, int]],
    options: Sequence[Sequence[MeshKind]],
    free: Free,
) -> tuple[Item, MeshKind, int] | None:
    """Returns the model that gains the most requests a device from a larger mesh, and that mesh."""
    best: tuple[float, tuple[Item, MeshKind, int]] | None = None
    for item, (kind, node) in chosen.items():
        now = estimator.known(kind, frozenset({item})).score
        without = {**free, node: free[node] + kind.gpus}
        for larger in options[item]:
            gain = estimator.known(larger, frozenset({item})).score - now
            home = _home(cluster, without, larger) if larger.gpus > kind.gpus and gain > 0 else None
            if home and (best is None or gain / (larger.gpus - kind.gpus) > best[0]):
                best = gain / (larger.gpus - kind.gpus), (item, *home)
    return best[1] if best else None


def _placed(
    estimator: Estimator, chosen: Mapping[Item, tuple[MeshKind, int]], left: Sequence[Item]
) -> BoardPlacement:
    kinds = [kind for kind, _ in chosen.values()]
    return Board(estimator, kinds, 1, [frozenset({item}) for item in chosen]).placement(left)


def memory_greedy(
    estimator: Estimator, cluster: Sequence[Nodes], kinds: Sequence[MeshKind] | None = None
) -> BoardPlacement:
    """Places the most popular model first, each on the mesh with the least load, and the most free memory
    among equals. kinds: the meshes; if they are left out, nodes are cut into equal ones, the smallest that
    hold each model. Raises ConfigError."""
    check_each(estimator, cluster)
    items = [estimator.item(demand, 1) for demand in range(len(estimator.demands))]
    board = Board(estimator, _equal(estimator, cluster, items) if kinds is None else kinds, 1)
    left = []
    for item in sorted(items, key=lambda item: -estimator.rate(item)):
        rooms = [
            (_load(estimator, board, at), -estimator.pool(kind, sorted(board.units[at])), at)
            for at, kind in enumerate(board.kinds)
            if board.gain(((at, board.units[at] | {item}),)) is not None
        ]
        if rooms:
            at = min(rooms)[2]
            board.do(((at, board.units[at] | {item}),))
        else:
            left.append(item)
    check_left(estimator, cluster, board.placement(left))
    return board.placement(left)


def _load(estimator: Estimator, board: Board, at: int) -> float:
    """Requests a second and device."""
    return sum(map(estimator.rate, board.units[at])) / board.kinds[at].gpus


def _equal(estimator: Estimator, cluster: Sequence[Nodes], items: Sequence[Item]) -> list[MeshKind]:
    found: list[MeshKind] = []
    for nodes in cluster:
        sizes = sorted(nodes.sizes)
        holds = [n for n in sizes if all(estimator.candidate(nodes.mesh(n), item) for item in items)]
        size = holds[0] if holds else nodes.gpus
        found += meshes([nodes], (((size, nodes.count * (nodes.gpus // size)),),))
    return found


def write_spatial(estimator: Estimator, cluster: Sequence[Nodes], placement: BoardPlacement) -> PlacementPlan:
    """Writes the plan. A model that is alone has all of the compute for each job."""
    plan = write_down(estimator, cluster, placement, "kvloom plan --baseline spatial")
    units = [
        replace(unit, models=tuple(replace(m, prefill_share=1.0, decode_share=1.0) for m in unit.models))
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units))

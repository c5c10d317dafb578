"""Makes a plan for a cluster and demands (MuxServe, sections 3.1 to 3.3), and the placements to compare it
with: spatial partitioning, and placement by free memory alone (sections 4.1 and 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from kvloom.plan.board import Board, BoardPlacement
from kvloom.plan.cluster import (
    Costs,
    Demand,
    MeshKind,
    Nodes,
    each_node,
    fullest,
    homes,
    mesh_kinds,
    meshes,
    ranks_of,
)
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.explain import check_each, check_left
from kvloom.plan.fewer import with_fewer_devices
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit, quotas
from kvloom.plan.search import SearchEffort, best_placement
from kvloom.types.errors import ConfigError


def plan_placement(
    estimator: Estimator, cluster: Sequence[Nodes], effort: SearchEffort | None = None
) -> BoardPlacement:
    """Returns the best placement that is found, on the fewest devices that are ample. Raises ConfigError if a
    model has no place."""
    check_each(estimator, cluster)
    placement = best_placement(
        estimator, cluster, effort or SearchEffort.fit(cluster, len(estimator.demands))
    )
    check_left(estimator, cluster, placement)
    return with_fewer_devices(estimator, cluster, placement)


def make_plan(
    cluster: Sequence[Nodes], demands: Sequence[Demand], costs: Costs, effort: SearchEffort | None = None
) -> PlacementPlan:
    """Returns the plan. Raises ConfigError if a model has no place."""
    estimator = Estimator(demands, costs)
    return write_down(estimator, cluster, plan_placement(estimator, cluster, effort), "kvloom plan")


def write_down(
    estimator: Estimator, cluster: Sequence[Nodes], placement: BoardPlacement, made_by: str
) -> PlacementPlan:
    """Returns the placement as a plan. Meshes without models are left out."""
    units: list[PlannedUnit] = []
    places = homes(cluster, placement.kinds)
    for kind, unit, home in zip(placement.kinds, placement.units, places, strict=True):
        if not unit:
            continue
        items = sorted(unit)
        units.append(
            PlannedUnit(
                name=f"unit-{len(units)}",
                node=home.node,
                device=kind.device,
                gpus=kind.gpus,
                index=home.first,
                tensor_parallel=ranks_of(kind.device, kind.gpus),
                kv_bytes=estimator.expected_pool(kind, items),
                memory=kind.gpus * kind.budget,
                models=tuple(_models(estimator, kind, items)),
            )
        )
    return PlacementPlan(units=tuple(units), throughput=placement.answered, made_by=made_by)


def _models(estimator: Estimator, kind: MeshKind, items: Sequence[Item]) -> Iterator[PlannedModel]:
    demands = [estimator.demands[estimator.demand(item)] for item in items]
    rates = [estimator.rate(item) for item in items]
    decodings, estimate = estimator.settled(kind, items), estimator.known(kind, frozenset(items))
    parts, residency = quotas(kind, demands, rates), estimate.residency
    for n, item in enumerate(items):
        candidate = estimator.candidate(kind, item, items)
        assert candidate is not None
        yield PlannedModel(
            name=demands[n].name,
            path=demands[n].path,
            shape=demands[n].shape,
            rate=rates[n],
            prompt=demands[n].prompt,
            output=demands[n].output,
            prefill_share=candidate.prefill_share,
            decode_share=decodings[n].share,
            quota=parts[n],
            throughput=estimate.throughput[n],
            slo=demands[n].slo,
            speculation=estimator.served(kind, item, items).speculation,
            acceptance=demands[n].acceptance,
            awake=residency.awake[n] if residency else 1.0,
            cold_wait=residency.waits[n] if residency and residency.awake[n] < 1.0 else 0.0,
        )


def spatial(
    estimator: Estimator, cluster: Sequence[Nodes], sizes: Mapping[str, int] | None = None
) -> BoardPlacement:
    """Places each model on a mesh of its own. `sizes` are the devices of each; if they are left out, each
    model begins with the smallest mesh that holds it, and the one that gains the most requests a device gets
    more while there are any. Raises ConfigError."""
    check_each(estimator, cluster)
    items = [estimator.item(demand, 1) for demand in range(len(estimator.demands))]
    options = [_options(estimator, cluster, item, sizes) for item in items]
    nodes = each_node(cluster)
    free = [one.gpus for one in nodes]
    chosen: dict[Item, tuple[MeshKind, int]] = {}
    for item in sorted(items, key=lambda item: -options[item][0].gpus):
        homes = ((kind, fullest(nodes, free, kind)) for kind in options[item])
        kind, home = next(((kind, home) for kind, home in homes if home is not None), (None, None))
        if kind is None or home is None:
            check_left(estimator, cluster, _placed(estimator, chosen, [item]))
        assert kind is not None
        assert home is not None
        chosen[item] = kind, home
        free[home] -= kind.gpus
    while grown := _grown(estimator, nodes, chosen, options, free):
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


def _grown(
    estimator: Estimator,
    nodes: Sequence[Nodes],
    chosen: Mapping[Item, tuple[MeshKind, int]],
    options: Sequence[Sequence[MeshKind]],
    free: Sequence[int],
) -> tuple[Item, MeshKind, int] | None:
    """Returns the model that gains the most requests a device from a larger mesh, and that mesh."""
    best: tuple[float, tuple[Item, MeshKind, int]] | None = None
    for item, (kind, node) in chosen.items():
        now = estimator.known(kind, frozenset({item})).score
        without = list(free)
        without[node] += kind.gpus
        for larger in options[item]:
            gain = estimator.known(larger, frozenset({item})).score - now
            more = larger.gpus - kind.gpus
            home = fullest(nodes, without, larger) if more > 0 and gain > 0 else None
            if home is not None and (best is None or gain / more > best[0]):
                best = gain / more, (item, larger, home)
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
    among equals. `kinds` are the meshes; if they are left out, nodes are cut into equal ones, the smallest
    that hold each model. Raises ConfigError."""
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
    """Returns the load of a mesh, in requests a second and device."""
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

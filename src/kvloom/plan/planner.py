"""Makes a plan for a cluster and demands (MuxServe, sections 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from kvloom.plan.board import Board, BoardPlacement, Unit
from kvloom.plan.cluster import Costs, Demand, MeshKind, Nodes, groups, homes, mesh_kinds, meshes
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.explain import check_each, check_left
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit, quotas
from kvloom.plan.replicas import best_placement
from kvloom.plan.search import SearchEffort


def plan_placement(
    estimator: Estimator, cluster: Sequence[Nodes], effort: SearchEffort | None = None
) -> BoardPlacement:
    """Returns the best placement that is found. Raises ConfigError if a model has no place."""
    check_each(estimator, cluster)
    placement = best_placement(
        estimator, cluster, effort or SearchEffort.fit(cluster, len(estimator.demands))
    )
    check_left(estimator, cluster, placement)
    return placement


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
    names = homes(cluster, placement.kinds)
    for kind, unit, node in zip(placement.kinds, placement.units, names, strict=True):
        if not unit:
            continue
        items = sorted(unit)
        units.append(
            PlannedUnit(
                name=f"unit-{len(units)}",
                node=node,
                device=kind.device,
                gpus=kind.gpus,
                kv_bytes=estimator.pool(kind, items),
                models=tuple(_models(estimator, kind, items)),
            )
        )
    return PlacementPlan(units=tuple(units), throughput=placement.answered, made_by=made_by)


def _models(estimator: Estimator, kind: MeshKind, items: Sequence[Item]) -> Iterator[PlannedModel]:
    demands = [estimator.demands[estimator.demand(item)] for item in items]
    rates = [estimator.rate(item) for item in items]
    decodings, estimate = estimator.settled(kind, items), estimator.known(kind, frozenset(items))
    parts = quotas(kind, demands, rates)
    for n, item in enumerate(items):
        candidate = estimator.candidate(kind, item)
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
        )


_MOST = 1 << 12


def exhaustive(estimator: Estimator, cluster: Sequence[Nodes], replicas: int = 1) -> BoardPlacement | None:
    """Returns the best of all groups of meshes, all placements on them, and all numbers of replicas up to
    `replicas`; None if some model fits nowhere. Its cost grows exponentially."""
    found = groups(cluster, set(mesh_kinds(cluster)), _MOST)
    if found is None:
        raise ValueError("the cluster is too large for exhaustive search")
    best: BoardPlacement | None = None
    for counts in product(range(1, replicas + 1), repeat=len(estimator.demands)):
        items = [estimator.item(demand, n) for demand, n in enumerate(counts) for _ in range(n)]
        for group in found:
            kinds = meshes(cluster, group)
            for units in _assign(estimator, kinds, items, [frozenset()] * len(kinds)):
                placement = Board(estimator, kinds, 1, units).placement(())
                if best is None or placement.rank > best.rank:
                    best = placement
    return best


def _assign(
    estimator: Estimator, kinds: Sequence[MeshKind], items: Sequence[Item], units: list[Unit]
) -> Iterator[list[Unit]]:
    if not items:
        yield list(units)
        return
    seen: set[tuple[MeshKind, Unit]] = set()
    for at, kind in enumerate(kinds):
        unit = units[at]
        if items[0] in unit or (kind, unit) in seen or estimator.unit(kind, unit | {items[0]}) is None:
            continue
        seen.add((kind, unit))  # another mesh like it leads to the same
        units[at] = unit | {items[0]}
        yield from _assign(estimator, kinds, items[1:], units)
        units[at] = unit

"""Explains why a demand cannot be met, what is missing, and what would be enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import CPU, Demand, MeshKind, Nodes, mesh_kinds
from kvloom.plan.cost.devices import FITTED_TO, UNSEEN_ERROR
from kvloom.plan.cost.measured import cross_validate
from kvloom.plan.cost.profile import Profile
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.plan import fixed_bytes, request_bytes, usable_bytes
from kvloom.plan.search import MOST
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_number, show_size
from kvloom.types.spec import RESERVE

_LARGEST: Final = 64  # devices of a mesh that are thought of
_MORE: Final = 1.05  # times as much must be answered with endless memory, for memory to be what is short
_CLOSE: Final = 1e-6  # of a rate; less is not missing


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A model of which a unit cannot answer all requests."""

    model: str
    unit: int
    """The unit's number among the units with models."""
    kind: MeshKind
    rate: float
    answered: float
    bound: Literal["memory", "compute"]
    """The resource that is used up."""
    pool: int
    """The bytes of K and V that the unit has."""
    wanted: int
    """The bytes of K and V that would be enough if memory alone is short, else the same as `pool`."""
    meshes: int
    """The number of meshes like the unit's that would be enough instead of one; 0 if no number is."""

    @property
    def text(self) -> str:
        """Returns the shortfall as one line."""
        what = f"the compute of {self.kind} is used up"
        if self.bound == "memory":
            what = f"its KV pool of {show_size(self.pool)} is full"
            if self.wanted > self.pool:
                what += f", {_shown_up(self.wanted)} would be enough"
        enough = f"; {self.meshes} such meshes instead of one would be enough" if self.meshes else ""
        return (
            f"{self.model} on unit-{self.unit}: {show_number(self.answered)} of {show_number(self.rate)} "
            f"requests/s, {show_number(self.rate - self.answered)} missing: {what}{enough}"
        )


def shortfalls(estimator: Estimator, placement: BoardPlacement) -> list[Shortfall]:
    """Returns the shortfalls of a placement without anything left, worst first."""
    found = []
    units = [(kind, unit) for kind, unit in zip(placement.kinds, placement.units, strict=True) if unit]
    for number, (kind, unit) in enumerate(units):
        estimate = estimator.known(kind, unit)
        if estimate.bound == "":
            continue
        endless = estimator.unbounded(kind, estimate.items)
        pool = estimator.pool(kind, estimate.items)
        bound = estimate.bound if endless.score > _MORE * estimate.score else "compute"
        found += [
            Shortfall(
                model=estimator.demands[estimator.demand(item)].name,
                unit=number,
                kind=kind,
                rate=estimator.rate(item),
                answered=throughput,
                bound=bound,
                pool=pool,
                wanted=max(pool, endless.used) if endless.level >= 1.0 else pool,
                meshes=_meshes(estimator, kind, estimate.items),
            )
            for item, throughput in zip(estimate.items, estimate.throughput, strict=True)
            if throughput < estimator.rate(item) * (1.0 - _CLOSE)
        ]
    return sorted(found, key=lambda shortfall: shortfall.answered - shortfall.rate)


def more_devices(found: Sequence[Shortfall]) -> dict[str, int]:
    """Returns the devices of each name with which all demands would be met; {} if no number would do."""
    more: Counter[str] = Counter()
    for kind, meshes in {one.unit: (one.kind, one.meshes) for one in found}.values():
        if not meshes:
            return {}
        more[kind.device] += (meshes - 1) * kind.gpus
    return dict(more)


def _meshes(estimator: Estimator, kind: MeshKind, items: Sequence[Item]) -> int:
    """Returns the smallest number of meshes that answer what this one is asked, each an equal part; 0 if
    there is none."""
    for times in range(2, MOST + 1):
        parts = frozenset(estimator.split(item, times) for item in items)
        if estimator.known(kind, parts).level >= 1.0:
            return times
    return 0


def check_each(estimator: Estimator, cluster: Sequence[Nodes]) -> None:
    """Raises ConfigError for a model that no mesh can hold."""
    kinds = mesh_kinds(cluster)
    for number, demand in enumerate(estimator.demands):
        item = estimator.item(number, 1)
        if all(estimator.candidate(kind, item) is None for kind in kinds):
            raise ConfigError(_too_large(demand, kinds))


def _too_large(demand: Demand, kinds: Sequence[MeshKind]) -> str:
    split = [kind for kind in kinds if kind.splits(demand.shape)] or list(kinds)
    largest = max(split, key=usable_bytes)
    needed = fixed_bytes(demand.shape, largest) + request_bytes(demand, largest)
    what = "weights and one request" if largest.budget else "weights, activations and one request"
    line = (
        f"model {demand.name!r} needs {show_size(needed)} for {what}; "
        f"the largest mesh that it can be split over, {largest}, has {show_size(usable_bytes(largest))}"
    )
    if largest.budget:
        return f"{line}; a --memory of {_shown_up(budget_of(needed))} would be enough"
    for gpus in range(1, _LARGEST + 1):
        kind = largest._replace(gpus=gpus)
        needed = fixed_bytes(demand.shape, kind) + request_bytes(demand, kind)
        if kind.splits(demand.shape) and needed <= usable_bytes(kind):
            return f"{line}; {kind} in a node would be enough"
    return line


def check_left(estimator: Estimator, cluster: Sequence[Nodes], placement: BoardPlacement) -> None:
    """Raises ConfigError if models have no room beside the others."""
    if not placement.left:
        return
    names, more = [], Counter[str]()
    for item in placement.left:
        names.append(estimator.demands[estimator.demand(item)].name)
        kinds = [kind for kind in mesh_kinds(cluster) if estimator.candidate(kind, item) is not None]
        more[kinds[0].device] += kinds[0].gpus
    needed = sum(
        fixed_bytes(demand.shape, cluster[0].mesh(1)) + request_bytes(demand, cluster[0].mesh(1))
        for demand in estimator.demands
    )
    there = sum(usable_bytes(nodes.mesh(nodes.gpus)) * nodes.count for nodes in cluster)
    if cluster[0].budget:
        enough = "lower rates, or more machines, are right"
        if needed > there:
            enough = f"a --memory of {_shown_up(budget_of(needed))} would hold all"
        raise ConfigError(
            f"no memory is left for {', '.join(dict.fromkeys(names))}: all models need {show_size(needed)} "
            f"for weights and one request each, and in {show_size(there)} weights would be loaded all of the "
            f"time, or leave no K and V; {enough}"
        )
    pieces = "" if needed > there else " in pieces that are too small"
    raise ConfigError(
        f"no memory is left for {', '.join(dict.fromkeys(names))}: all models need {show_size(needed)} for "
        f"weights, activations and one request each, the cluster has {show_size(there)}{pieces}; "
        f"{' and '.join(f'{n} more {device}' for device, n in more.items())} would be enough"
    )


def cost_errors(devices: Collection[str], profile: Profile | None) -> Iterator[str]:
    """Says how far the times of jobs that a plan on these devices rests on are from measured ones."""
    if CPU in devices and profile is not None:
        spread = cross_validate(profile)["all"]
        yield (
            f"times of jobs are those of the profile; {spread.rows} that a fit had not seen were "
            f"{spread.median:.1%} off in the median, {spread.p90:.1%} at the 90th percentile"
        )
    if any(device != CPU for device in devices):
        median, p90 = UNSEEN_ERROR
        yield (
            f"times of jobs on GPUs are those of data sheets; on {FITTED_TO}, to which they were fitted, "
            f"times not seen were {median:.1%} off in the median, {p90:.1%} at the 90th percentile"
        )


def budget_of(size: int) -> int:
    """Returns the least budget of which weights and pool have so many bytes."""
    return size * RESERVE // (RESERVE - 1) + 1


def _shown_up(size: int) -> str:
    """Returns a size that is enough, a thousandth larger, because four digits of it are shown."""
    return show_size(size + size // 1000)

"""What MuxServe compares: each is a placement and a configuration of kvloom's own engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvloom.core.job import Phase
from kvloom.core.spec import EngineSpec, Policy, Quotas
from kvloom.cost.work import CostModel, Work
from kvloom.plan.baselines import memory_greedy, spatial, write_spatial
from kvloom.plan.board import Board
from kvloom.plan.cluster import Nodes
from kvloom.plan.estimate import Estimator
from kvloom.plan.plan import Plan
from kvloom.plan.planner import plan_placement, write_down
from kvloom.plan.search import Effort
from kvloom.planning.inputs import DeviceCosts
from kvloom.reproduce.muxserve.setup import ALONE, Served, cluster
from kvloom.sim.fleet import SimulatedUnit
from kvloom.sim.units import OVERLOAD, planned_units

Placer = Callable[[Sequence[Served], Estimator, Sequence[Nodes]], Plan]


def planned(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> Plan:
    """Algorithm 1, which gives each model one place."""
    placement = plan_placement(estimator, nodes, Effort(replicas=1))
    return write_down(estimator, nodes, placement, "planned")


def apart(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> Plan:
    """A mesh for each model, as large as in the paper where there are GPUs enough for that."""
    sizes = {model.name: ALONE[model.size] for model in models}
    enough = sum(sizes.values()) <= sum(one.total for one in nodes)
    return write_spatial(estimator, nodes, spatial(estimator, nodes, sizes if enough else None))


def naive(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> Plan:
    """The most popular first, by load and free memory (section 4.4)."""
    return write_down(estimator, nodes, memory_greedy(estimator, nodes), "naive")


def together(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> Plan:
    """All on one mesh of a whole node."""
    items = frozenset(estimator.item(n, 1) for n in range(len(models)))
    board = Board(estimator, [nodes[0].mesh(nodes[0].gpus)], 1, [items])
    return write_down(estimator, nodes, board.placement([]), "together")


@dataclass(frozen=True, slots=True)
class System:
    """parts: models have equal shares of the compute, instead of planned ones. mps: see `UnderMPS`."""

    name: str
    place: Placer
    policy: Policy = "adbs"
    quotas: Quotas = "adaptive"
    parts: bool = False
    mps: bool = False


MUXSERVE: Final = System("MuxServe", planned)
SPATIAL: Final = System("spatial", apart)
TEMPORAL: Final = System("temporal", planned, policy="fcfs")


def make_units(system: System, models: Sequence[Served], gpus: int) -> list[SimulatedUnit]:
    """Raises ConfigError where the models have no place."""
    nodes, demands = cluster(gpus), [model.demand for model in models]
    estimator = Estimator(demands, DeviceCosts(nodes, demands, None))
    plan = system.place(models, estimator, nodes)
    sizes = {model.name: model.size for model in models}
    return [_configured(system, unit, sizes) for unit in planned_units(plan, system.policy)]


def _configured(system: System, unit: SimulatedUnit, sizes: Mapping[str, str]) -> SimulatedUnit:
    spec = msgspec.structs.replace(unit.spec, quotas=system.quotas)
    if system.parts:
        part = min(1.0, (1 + OVERLOAD) / len(spec.models))
        equal = (
            msgspec.structs.replace(model, prefill_share=part, decode_share=part) for model in spec.models
        )
        spec = msgspec.structs.replace(spec, models=tuple(equal))
    cost = UnderMPS(unit.cost, spec, sizes) if system.mps else unit.cost
    return replace(unit, spec=spec, cost=cost)


class UnderMPS:
    """Satisfies `CostModel`: devices under MuxServe's own runtime. Each model has a process for its prefills
    and one for its decodes, whose shares are set when they start, so a job has no more of the device where it
    runs alone; and a decode step waits for the host, the longer the larger its batch: by what the paper's
    estimator adds to it."""

    _HOST: Final[Mapping[str, float]] = {"7b": 0.10e-3, "13b": 0.08e-3, "30b": 0.07e-3, "65b": 0.07e-3}

    def __init__(self, cost: CostModel, spec: EngineSpec, sizes: Mapping[str, str]) -> None:
        self._cost = cost
        self._host = {model.name: self._HOST[sizes[model.name]] for model in spec.models}
        self._shares = {
            (model.name, phase): share or 1.0
            for model in spec.models
            for phase, share in ((Phase.PREFILL, model.prefill_share), (Phase.DECODE, model.decode_share))
        }

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        device = self._cost.seconds(self._fixed(work), [self._fixed(other) for other in beside])
        return device + (work.batch * self._host[work.model] if work.phase is Phase.DECODE else 0.0)

    def _fixed(self, work: Work) -> Work:
        return replace(work, share=self._shares[work.model, work.phase])

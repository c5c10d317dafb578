"""What MuxServe compares: each is a placement and a configuration of kvloom's own engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from msgspec import structs

from kvloom.lab.sim.unit import OVERLOAD, SimulatedUnit, planned_units
from kvloom.plan.baselines import memory_greedy, spatial, write_spatial
from kvloom.plan.board import Board
from kvloom.plan.cluster import Costs, DeviceCosts, Nodes
from kvloom.plan.estimate import Estimator
from kvloom.plan.plan import Plan
from kvloom.plan.planner import plan_placement, write_down
from kvloom.plan.search import Effort
from kvloom.reproduce.muxserve.runtime import Hosted, UnderMPS, hosted
from kvloom.reproduce.muxserve.setup import ALONE, Served, cluster
from kvloom.types.spec import Policy, Quotas

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


Runtime = Literal["MuxServe", "kvloom"]
Shares = Literal["planned", "whole", "equal"]


@dataclass(frozen=True, slots=True)
class System:
    """runtime: how long jobs take: `MuxServe`'s has fixed shares and waits for the host; in `kvloom`'s a job
    that runs alone has the whole device. shares: of the compute, for each job: planned ones, all of it, or a
    part as large as the other models'. quotas: where they are fixed, each model has room for as many tokens
    as the others, as in the code that was published with the paper."""

    name: str
    place: Placer
    policy: Policy = "adbs"
    quotas: Quotas = "adaptive"
    runtime: Runtime = "MuxServe"
    shares: Shares = "planned"


MUXSERVE: Final = System("MuxServe", planned)
SPATIAL: Final = System("spatial", apart, policy="fcfs", shares="whole")
TEMPORAL: Final = System("temporal", planned, policy="fcfs", shares="whole")


def make_units(system: System, models: Sequence[Served], gpus: int) -> list[SimulatedUnit]:
    """Raises ConfigError where the models have no place."""
    nodes, demands = cluster(gpus), [model.demand for model in models]
    sizes = {model.name: model.size for model in models}
    costs: Costs = DeviceCosts(nodes, demands, None)
    if system.runtime == "MuxServe":
        costs = hosted(costs, sizes)
    plan = system.place(models, Estimator(demands, costs), nodes)
    return [_configured(system, unit, sizes) for unit in planned_units(plan, system.policy)]


def _configured(system: System, unit: SimulatedUnit, sizes: Mapping[str, str]) -> SimulatedUnit:
    spec = structs.replace(unit.spec, quotas=system.quotas)
    if system.shares != "planned":
        part = 1.0 if system.shares == "whole" else min(1.0, (1 + OVERLOAD) / len(spec.models))
        models = (structs.replace(model, prefill_share=part, decode_share=part) for model in spec.models)
        spec = structs.replace(spec, models=tuple(models))
    if system.quotas == "fixed":
        whole = sum(shape.kv_bytes for shape in unit.shapes.values())
        models = (structs.replace(m, quota=unit.shapes[m.name].kv_bytes / whole) for m in spec.models)
        spec = structs.replace(spec, models=tuple(models))
    cost = unit.cost
    if system.runtime == "MuxServe":
        cost = Hosted(UnderMPS(cost, spec), sizes)
    return replace(unit, spec=spec, cost=cost)

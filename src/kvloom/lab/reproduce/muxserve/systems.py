"""The systems that MuxServe's experiments compare: as published, and kvloom as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from msgspec import structs

from kvloom.kv.quota import SEQUENCE_TOKENS
from kvloom.lab.reproduce.muxserve.setup import ALONE, DEVICE, Served, cluster, multiplexed
from kvloom.lab.reproduce.setup import Hosted, UnderMPS
from kvloom.lab.sim.unit import MAX_RUNNING, SimulatedUnit, planned_units
from kvloom.plan.board import Board
from kvloom.plan.cluster import Costs, DeviceCosts, MeshKind, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.estimate import Decoding, Estimator, Item
from kvloom.plan.plan import PlacementPlan
from kvloom.plan.planner import memory_greedy, plan_placement, spatial, write_down, write_spatial
from kvloom.plan.search import SearchEffort
from kvloom.types.spec import DEFAULT_POLICY, EngineSpec, ModelSpec, Policy, Quotas

HOST: Final[Mapping[str, float]] = {"7b": 0.10e-3, "13b": 0.08e-3, "30b": 0.07e-3, "65b": 0.07e-3}
"""The seconds by which a decode step takes longer for each of its sequences, by the model's size: the paper's
own estimator adds as much to the times of its profile."""

PROCESSES: Final = 9.6e9
"""The bytes that each GPU of a unit leaves free for each of its models, by the `gpu_memory_utilization` of
the configurations that were published with the paper, which is 80 GB less 2 bytes a parameter and this."""

HALF: Final[Mapping[str, float]] = dict.fromkeys(ALONE, 0.5)
"""The part of a spatial partition's memory that is its pool, by its model's size, as configured for figure
5."""

CHAT_PARTS: Final[Mapping[str, float]] = {"7b": 0.65, "13b": 0.5, "30b": 0.375, "65b": 0.375}
"""The same, as configured for figure 7."""

Placer = Callable[[Sequence[Served], Estimator, Sequence[Nodes]], PlacementPlan]


PREFILLS: Final[Mapping[str, float]] = {"7b": 0.8, "13b": 0.9, "30b": 1.0, "65b": 1.0}
"""A prefill's share of the compute, by the model's size, as the published configurations launch them."""


class AsPublished(Estimator):
    """Estimates units as the configurations that were published with the paper have them: pools are smaller,
    and a model decodes on the smallest share on which it answers its demand alone (algorithm 2)."""

    def settled(self, kind: MeshKind, items: Sequence[Item]) -> list[Decoding]:
        """Returns how each model decodes beside others, which is as it does alone."""
        candidates = (self.candidate(kind, item) for item in items)
        return [candidate.lean for candidate in candidates if candidate is not None]

    def pool(self, kind: MeshKind, items: Sequence[Item]) -> int:
        """Returns the bytes of the pool; below 0 if these do not fit."""
        names = (self.demands[self.demand(item)].shape for item in items)
        return int(kind.bytes - sum(_billions(shape) * 2e9 + PROCESSES * kind.gpus for shape in names))


def _billions(shape: ModelShape) -> int:
    """Returns how many parameters a LLaMA is said to have."""
    return min((7, 13, 30, 65), key=lambda size: abs(size - shape.parameters / 1e9))


def planned(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Returns the plan of algorithm 1, which gives each model one place."""
    placement = plan_placement(estimator, nodes, SearchEffort(replicas=1))
    return write_down(estimator, nodes, placement, "planned")


def replicated(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Returns the plan of `kvloom plan`, in which models may have several places."""
    placement = plan_placement(estimator, nodes, SearchEffort.fit(nodes, len(models)))
    return write_down(estimator, nodes, placement, "kvloom plan")


@dataclass(frozen=True, slots=True)
class Apart:
    """Satisfies `Placer`: a mesh for each model. `gpus` are by its size, and `names` those of models that
    have others."""

    gpus: Mapping[str, int] = field(default_factory=lambda: ALONE)
    names: Mapping[str, int] = field(default_factory=dict)

    def __call__(
        self, models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]
    ) -> PlacementPlan:
        sizes = {model.name: self.names.get(model.name, self.gpus[model.size]) for model in models}
        return write_spatial(estimator, nodes, spatial(estimator, nodes, sizes))


def naive(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Places the most popular model first, by load and free memory (section 4.4)."""
    return write_down(estimator, nodes, memory_greedy(estimator, nodes), "naive")


def together(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Puts all models on one mesh of a whole node."""
    items = frozenset(estimator.item(n, 1) for n in range(len(models)))
    board = Board(estimator, [nodes[0].mesh(nodes[0].gpus)], 1, [items])
    return write_down(estimator, nodes, board.placement([]), "together")


Runtime = Literal["MuxServe", "kvloom"]
Shares = Literal["planned", "whole"]
Rooms = Literal["planned", "by rate", "by rate and length", "equal"]
UNBOUNDED: Final = 4096  # sequences of a model: the pool alone bounds them


@dataclass(frozen=True, slots=True)
class System:
    """One of the systems that are compared."""

    name: str
    place: Placer
    policy: Policy = DEFAULT_POLICY
    quotas: Quotas = "adaptive"
    rooms: Rooms = "planned"
    """The quotas at first: as planned; by rate and the bytes of a token (MuxServe), for sequences of
    `SEQUENCE_TOKENS` or of each model's own length; or room for as many tokens of each model."""
    runtime: Runtime = "MuxServe"
    """The runtime, which decides how long jobs take: `MuxServe`'s has fixed shares and waits for the host; in
    `kvloom`'s a job that runs alone has the whole device."""
    shares: Shares = "planned"
    """The shares of the compute for each job: planned ones, or all of it."""
    prefills: Mapping[str, float] = field(default_factory=dict)
    """A prefill's share of the compute, by the model's size; if it is left out, the share is as planned."""
    estimator: type[Estimator] = Estimator
    """The estimator of units, which also says how large pools are."""
    pools: Mapping[str, float] = field(default_factory=dict)
    """The part of a unit's memory that is its pool, by its only model's size; if it is left out, the part is
    as estimated."""
    max_running: int = MAX_RUNNING


MUXSERVE: Final = System(
    "MuxServe",
    planned,
    policy="adbs-2024",
    quotas="sequences",
    rooms="by rate",
    estimator=AsPublished,
    prefills=PREFILLS,
    max_running=UNBOUNDED,
)
TEMPORAL: Final = replace(
    MUXSERVE, name="temporal", policy="vllm-2023", quotas="fixed-sequences", shares="whole"
)
SPATIAL: Final = System("spatial", Apart(), policy="vllm-2023", shares="whole", pools=HALF)
KVLOOM: Final = System("kvloom", replicated)
KVLOOM_PLACED: Final = System("kvloom, one place", planned)
"""kvloom's engine with one place a model, as MuxServe has it."""


def host_seconds(sizes: Mapping[str, str]) -> Callable[[Work], float]:
    """Returns what the paper's runtime takes for a decode step, in seconds: the longer the larger its batch.

    `sizes` are by model."""
    seconds = {name: HOST[size] for name, size in sizes.items()}
    return lambda work: work.batch * seconds[work.model]


def _hosted(costs: Costs, sizes: Mapping[str, str]) -> Costs:
    """Returns the costs in the paper's runtime, for a planner."""

    def cost(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        return Hosted(costs(device, gpus, shapes), host_seconds(sizes))

    return cost


def in_runtime(cost: CostModel, spec: EngineSpec, sizes: Mapping[str, str]) -> CostModel:
    """Returns the cost in the paper's runtime, as far as jobs take longer in it than on the bare device.

    `sizes` are by model."""
    return Hosted(UnderMPS(cost, spec), host_seconds(sizes))


def make_plan(system: System, models: Sequence[Served], gpus: int) -> PlacementPlan:
    """Returns the system's plan. Raises ConfigError if the models have no place."""
    nodes, demands = cluster(gpus), [model.demand for model in models]
    costs: Costs = DeviceCosts(nodes, demands, None)
    if system.runtime == "MuxServe":
        costs = _hosted(costs, {model.name: model.size for model in models})
    return system.place(models, system.estimator(demands, costs), nodes)


def make_units(system: System, models: Sequence[Served], gpus: int) -> list[SimulatedUnit]:
    """Raises ConfigError if the models have no place."""
    return units_of(system, models, make_plan(system, models, gpus))


def units_of(system: System, models: Sequence[Served], plan: PlacementPlan) -> list[SimulatedUnit]:
    """Returns the plan's units as the system runs them."""
    by_name = {model.name: model for model in models}
    units = planned_units(plan, system.policy, abilities=multiplexed)
    return [_configured(system, unit, by_name) for unit in units]


def _configured(system: System, unit: SimulatedUnit, models: Mapping[str, Served]) -> SimulatedUnit:
    here = [models[model.name] for model in unit.spec.models]
    specs: Sequence[ModelSpec] = unit.spec.models
    if system.prefills:
        specs = [
            structs.replace(model, prefill_share=system.prefills[models[model.name].size]) for model in specs
        ]
    if system.shares == "whole":
        specs = [structs.replace(model, prefill_share=1.0, decode_share=1.0) for model in specs]
    rooms = _rooms(system.rooms, unit, here)
    specs = [
        model if rooms is None else structs.replace(model, quota=room)
        for model, room in zip(specs, rooms or [0.0] * len(specs), strict=True)
    ]
    spec = structs.replace(
        unit.spec, models=tuple(specs), quotas=system.quotas, max_running=system.max_running
    )
    if system.pools:
        gpus, (model,) = spec.tensor_parallel, here
        pool = int(system.pools[model.size] * gpus * find_device(DEVICE).memory)
        spec = structs.replace(spec, kv_bytes=pool)
    spec = structs.replace(spec, block_bytes=COARSER**2 * spec.block_bytes)
    shapes = {name: in_coarser_blocks(shape) for name, shape in unit.shapes.items()}
    cost = unit.cost
    if system.runtime == "MuxServe":
        cost = in_runtime(cost, spec, {model.name: model.size for model in here})
    return replace(unit, spec=spec, shapes=shapes, cost=cost)


COARSER: Final = 4


def in_coarser_blocks(shape: ModelShape) -> ModelShape:
    """Returns a LLaMA with a fourth of the layers and heads, and as many bytes: pages take a 16th of the
    blocks, each 16 times as large. Pools count fewer things, and have the same pages."""
    return structs.replace(
        shape,
        layers=shape.layers // COARSER,
        kv_heads=shape.kv_heads // COARSER,
        head_dim=shape.head_dim * COARSER**2,
    )


def _rooms(rooms: Rooms, unit: SimulatedUnit, models: Sequence[Served]) -> list[float] | None:
    """Returns the parts of the pool that the models' quotas are at first; None for those of the plan."""
    if rooms == "planned":
        return None
    rated, sized = rooms.startswith("by rate"), rooms.endswith("length")
    weights = [unit.shapes[model.name].kv_bytes * (model.rate if rated else 1.0) for model in models]
    lengths = [model.lengths.mean_prompt + model.lengths.mean_output for model in models]
    return [
        weight / sum(weights) * (SEQUENCE_TOKENS / length if sized else 1.0)
        for weight, length in zip(weights, lengths, strict=True)
    ]

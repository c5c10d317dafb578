"""MuxServe's set-up (section 4): LLaMAs on nodes of A100-80, the systems, and what one has of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from operator import attrgetter
from typing import Final, Literal

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.report import Scale, Tell
from kvloom.lab.reproduce.setup import (
    AT_ONCE,
    Hosted,
    TellPart,
    UnderMPS,
    play_all,
    play_watched,
    poisson_requests,
)
from kvloom.lab.sim.fleet import SimulatedFleet
from kvloom.lab.sim.unit import OVERLOAD, SimulatedUnit, planned_units
from kvloom.lab.workload.lengths import STAND_INS, Tokens
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.board import Board
from kvloom.plan.cluster import Costs, Demand, DeviceCosts, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.estimate import Estimator
from kvloom.plan.plan import PlacementPlan
from kvloom.plan.planner import memory_greedy, plan_placement, spatial, write_down, write_spatial
from kvloom.plan.search import SearchEffort
from kvloom.types.geometry import I64
from kvloom.types.spec import EngineSpec, Policy, Quotas, UnitAbilities, unit_abilities

DEVICE: Final = "A100-80"
HOST: Final[Mapping[str, float]] = {"7b": 0.10e-3, "13b": 0.08e-3, "30b": 0.07e-3, "65b": 0.07e-3}
"""Seconds that a decode step takes longer for each of its sequences, by the model's size: what the paper's
own estimator adds to the times of its profile."""

ALONE: Final[Mapping[str, int]] = {"7b": 1, "13b": 1, "30b": 4, "65b": 8}
"""GPUs that a model of a size has for itself: in spatial partitioning, and where an SLO asks how long a
request takes alone."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and of answers, with their means in tokens."""

    prompt: Tokens
    output: Tokens
    mean_prompt: float
    mean_output: float

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yields the lengths of prompts and answers, without end."""
        while True:
            prompts, outputs = self.prompt.draw(rng, AT_ONCE), self.output.draw(rng, AT_ONCE)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class _Times:
    """Satisfies `Tokens`: others, `factor` times as many."""

    tokens: Tokens
    factor: float

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn: I64 = np.rint(self.tokens.draw(rng, count) * self.factor).astype(np.int64)
        return np.maximum(drawn, 1)


SHAREGPT: Final = Lengths(*STAND_INS["sharegpt"], 161, 338)
CHATLMSYS: Final = Lengths(*STAND_INS["chatlmsys"], 100, 261)


def like_sharegpt(prompt: float, output: float) -> Lengths:
    """ShareGPT's lengths with other means."""
    sides = (
        _Times(SHAREGPT.prompt, prompt / SHAREGPT.mean_prompt),
        _Times(SHAREGPT.output, output / SHAREGPT.mean_output),
    )
    return Lengths(*sides, prompt, output)


@dataclass(frozen=True, slots=True)
class Served:
    """A LLaMA of a size, as `7b`, and what it is asked, in requests a second."""

    name: str
    size: str
    rate: float
    lengths: Lengths = SHAREGPT

    @property
    def demand(self) -> Demand:
        lengths = self.lengths
        shape = find_shape(f"llama-{self.size}")
        return Demand(self.name, shape, self.rate, lengths.mean_prompt, lengths.mean_output)


def served(sizes: Sequence[str], rates: Iterable[float], lengths: Lengths = SHAREGPT) -> tuple[Served, ...]:
    """Models of these sizes, numbered from 1."""
    pairs = zip(sizes, rates, strict=True)
    return tuple(Served(f"{n}-{size}", size, rate, lengths) for n, (size, rate) in enumerate(pairs, 1))


def falling(sizes: Sequence[str], alpha: float, top: float) -> tuple[Served, ...]:
    """Rates that fall by a power law from `top` on, in the order of the sizes (section 4.2)."""
    return served(sizes, (top * (i + 1) ** -alpha for i in range(len(sizes))))


def cluster(gpus: int) -> list[Nodes]:
    """Nodes of eight, or a smaller one."""
    each = min(gpus, 8)
    return [Nodes(DEVICE, find_device(DEVICE).memory, each, gpus // each, abilities=multiplexed)]


def multiplexed(device: str, ranks: int) -> UnitAbilities:
    """Returns what the paper's units can do: under MPS those of several GPUs share out their compute, too."""
    return structs.replace(unit_abilities(device, ranks), shares=True)


def requests(models: Sequence[Served], seconds: float, seed: int = 0) -> Iterator[WorkloadRequest]:
    """Yields Poisson requests. A model's requests do not depend on the others."""
    each = (poisson_requests(one.name, one.rate, seconds, one.lengths.pairs, seed) for one in models)
    return merge(*each, key=attrgetter("at"))


class Alone:
    """How long requests take that have `ALONE`'s GPUs for themselves: one prefill and the decode steps."""

    def __init__(self, models: Sequence[Served]) -> None:
        device = find_device(DEVICE)
        self._costs = {
            model.name: Roofline(device, ALONE[model.size], {model.name: find_shape(f"llama-{model.size}")})
            for model in models
        }

    def seconds(self, request: WorkloadRequest) -> float:
        cost = self._costs[request.model]
        prefill = cost.seconds(Work.prefill(request.model, 1.0, [request.prompt]))
        step = cost.seconds(Work.decode(request.model, 1.0, [request.prompt + request.output // 2]))
        return prefill + (request.output - 1) * step


Placer = Callable[[Sequence[Served], Estimator, Sequence[Nodes]], PlacementPlan]


def planned(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Algorithm 1, which gives each model one place."""
    placement = plan_placement(estimator, nodes, SearchEffort(replicas=1))
    return write_down(estimator, nodes, placement, "planned")


def apart(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """A mesh for each model, as large as in the paper where there are GPUs enough for that."""
    sizes = {model.name: ALONE[model.size] for model in models}
    enough = sum(sizes.values()) <= sum(one.total for one in nodes)
    return write_spatial(estimator, nodes, spatial(estimator, nodes, sizes if enough else None))


def naive(_: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """The most popular first, by load and free memory (section 4.4)."""
    return write_down(estimator, nodes, memory_greedy(estimator, nodes), "naive")


def together(models: Sequence[Served], estimator: Estimator, nodes: Sequence[Nodes]) -> PlacementPlan:
    """Puts all models on one mesh of a whole node."""
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


def host_seconds(sizes: Mapping[str, str]) -> Callable[[Work], float]:
    """Returns what the paper's runtime takes for a decode step, in seconds: the longer the larger its batch.

    sizes: by model."""
    seconds = {name: HOST[size] for name, size in sizes.items()}
    return lambda work: work.batch * seconds[work.model]


def _hosted(costs: Costs, sizes: Mapping[str, str]) -> Costs:
    """Returns the costs in the paper's runtime, for a planner."""

    def cost(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        return Hosted(costs(device, gpus, shapes), host_seconds(sizes))

    return cost


def in_runtime(cost: CostModel, spec: EngineSpec, sizes: Mapping[str, str]) -> CostModel:
    """Returns the cost in the paper's runtime, as far as jobs take longer in it than on the bare device.

    sizes: by model."""
    return Hosted(UnderMPS(cost, spec), host_seconds(sizes))


def make_units(system: System, models: Sequence[Served], gpus: int) -> list[SimulatedUnit]:
    """Raises ConfigError if the models have no place."""
    nodes, demands = cluster(gpus), [model.demand for model in models]
    sizes = {model.name: model.size for model in models}
    costs: Costs = DeviceCosts(nodes, demands, None)
    if system.runtime == "MuxServe":
        costs = _hosted(costs, sizes)
    plan = system.place(models, Estimator(demands, costs), nodes)
    return [
        _configured(system, unit, sizes) for unit in planned_units(plan, system.policy, abilities=multiplexed)
    ]


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
        cost = in_runtime(cost, spec, sizes)
    return replace(unit, spec=spec, cost=cost)


SECONDS: Final[Mapping[Scale, float]] = {"full": 60.0, "small": 10.0}  # for which requests come
SCALES: Final = (5, 8, 10, 20)  # of the SLO
WARM: Final = 0.5  # the part of the time that is not counted as throughput
_LOOK: Final = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Requests come for `seconds`; the run ends `after` seconds later. Judged by the SLO are those whose time
    is over then."""

    models: tuple[Served, ...]
    gpus: int
    seconds: float
    after: float = 0.0

    @property
    def end(self) -> float:
        return self.seconds + self.after


@dataclass(frozen=True, slots=True)
class Point:
    """throughput: answers a second by model. attained: the part of the requests that were answered within
    each scale of the SLO. blocks: the part of all used blocks that each model has, in the mean."""

    throughput: Mapping[str, float]
    attained: Mapping[int, float]
    blocks: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.throughput.values())

    def weighted(self, models: Sequence[Served]) -> float:
        """Throughput, weighted with the rates."""
        whole = sum(model.rate for model in models)
        return sum(model.rate * self.throughput[model.name] for model in models) / whole


def play_points(runs: Sequence[tuple[System, Load]], tell: Tell) -> list[Point]:
    """Plays each system under its load. Raises ConfigError if models have no place."""

    def name(run: tuple[System, Load]) -> str:
        system, load = run
        return f"{system.name}, {len(load.models)} models on {load.gpus} GPUs"

    return play_all(runs, lambda run, part: play_point(*run, part), name, tell)


def play_point(system: System, load: Load, tell: TellPart) -> Point:
    """tell: hears which part of the load has come. Raises ConfigError if the models have no place."""
    return _Play(load, tell).run(make_units(system, load.models, load.gpus))


class _Play:
    def __init__(self, load: Load, tell: TellPart) -> None:
        self._load, self._tell = load, tell
        self._alone = Alone(load.models)
        self._answered: Counter[str] = Counter()
        self._judged: Counter[int] = Counter()
        self._met: Counter[int] = Counter()
        self._used: Counter[str] = Counter()

    def run(self, units: Sequence[SimulatedUnit]) -> Point:
        load = self._load
        play_watched(
            units,
            self._requests(),
            self._end,
            self._look,
            seconds=load.end,
            first=_LOOK,
            every=_LOOK,
            last=load.seconds,
        )
        used, seconds = sum(self._used.values()) or 1, load.seconds * (1 - WARM)
        return Point(
            throughput={model.name: self._answered[model.name] / seconds for model in load.models},
            attained={
                scale: self._met[scale] / self._judged[scale] for scale in SCALES if self._judged[scale]
            },
            blocks={model.name: self._used[model.name] / used for model in load.models},
        )

    async def _look(self, fleet: SimulatedFleet) -> None:
        """Adds up who has how many blocks."""
        for engine in fleet.engines.values():
            load = await engine.load()
            self._used.update({name: model.used_blocks for name, model in load.models.items()})

    def _requests(self) -> Iterator[WorkloadRequest]:
        for request in requests(self._load.models, self._load.seconds):
            alone = self._alone.seconds(request)
            self._judged.update(scale for scale in SCALES if self._is_judged(request, alone, scale))
            self._tell(request.at / self._load.seconds)
            yield request

    def _is_judged(self, request: WorkloadRequest, alone: float, scale: int) -> bool:
        return request.at + scale * alone <= self._load.end

    def _end(self, result: RequestResult) -> None:
        request, end = result.request, result.end
        if result.error or end is None:
            return
        if WARM * self._load.seconds <= request.at + end <= self._load.seconds:
            self._answered[request.model] += 1
        alone = self._alone.seconds(request)
        self._met.update(
            scale for scale in SCALES if end <= scale * alone and self._is_judged(request, alone, scale)
        )

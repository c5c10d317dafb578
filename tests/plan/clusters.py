"""Clusters and demands of tests, and costs that are formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import Demand, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.estimate import Estimator
from kvloom.plan.plan import PlacementPlan
from kvloom.types.job import Phase

SHAPES = ("llama-7b", "llama-13b", "llama-30b", "llama-65b", "llama3-8b")


def nodes(device: str, gpus: int, count: int = 1) -> Nodes:
    sheet = find_device(device)
    return Nodes(sheet.name, sheet.memory, gpus, count)


def roofline(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
    return Roofline(find_device(device), gpus, shapes)


def demand(name: str, shape: str, rate: float, prompt: float = 161.0, output: float = 338.0) -> Demand:
    return Demand(name, find_shape(shape), rate, prompt, output)


def muxserve(alpha: float, most: float) -> list[Demand]:
    """The 19 LLMs of MuxServe's figure 5, the smallest being the most popular."""
    shapes = ["llama-7b"] * 12 + ["llama-13b"] * 4 + ["llama-30b"] * 2 + ["llama-65b"]
    return [demand(f"m{i}", shape, most * (i + 1) ** -alpha) for i, shape in enumerate(shapes)]


class Formula:
    """A device that computes `speed` tokens a second on its whole compute, after 10 ms of each job. Jobs do
    not mind each other."""

    def __init__(self, speed: float = 10_000.0) -> None:
        self._speed = speed

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return 0.01 + work.tokens / (self._speed * work.share)


class Crowded(Formula):
    """Decodes take turns."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        turns = 1 + len(beside) if work.phase is Phase.DECODE else 1
        return turns * super().seconds(work)


def formula(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
    return Formula(10_000.0 * gpus)


def check(estimator: Estimator, cluster: Sequence[Nodes], placement: BoardPlacement) -> None:
    """Every item has its place, fits there, and the cluster has the meshes."""
    there = {one.device: one.total for one in cluster}
    for kind, unit in zip(placement.kinds, placement.units, strict=True):
        there[kind.device] -= kind.gpus
        assert estimator.unit(kind, unit) is not None
    assert min(there.values()) >= 0
    placed = {estimator.demand(item) for unit in placement.units for item in unit}
    placed |= {estimator.demand(item) for item in placement.left}
    assert placed == set(range(len(estimator.demands)))
    rate = [0.0] * len(estimator.demands)
    for item in [item for unit in placement.units for item in unit] + list(placement.left):
        rate[estimator.demand(item)] += estimator.rate(item)
    for one, total in zip(estimator.demands, rate, strict=True):
        assert abs(total - one.rate) <= 1e-9 * max(1.0, one.rate)


_rates = st.floats(0.05, 30.0)
_demands = st.builds(
    lambda shape, rate, prompt, output: (shape, rate, prompt, output),
    st.sampled_from(("llama-7b", "llama-7b", "llama-13b", "llama3-8b", "llama-30b")),
    _rates,
    st.sampled_from((100, 161, 800)),
    st.sampled_from((50, 250, 338)),
)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[Nodes], list[Demand]]:
    """Up to eight devices of one or two kinds, and four models."""
    kinds = draw(st.sampled_from((("A100-80",), ("A100-40",), ("H100",), ("A10",), ("A100-80", "A10"))))
    sizes = (1, 2, 4) if len(kinds) == 1 else (1, 2)
    counts = st.integers(1, 2 if len(kinds) == 1 else 1)
    cluster = [nodes(kind, draw(st.sampled_from(sizes)), draw(counts)) for kind in kinds]
    wanted = draw(st.lists(_demands, min_size=1, max_size=4))
    return cluster, [demand(f"m{i}", *one) for i, one in enumerate(wanted)]


def check_plan(plan: PlacementPlan) -> None:
    """What holds of every plan."""
    names = [unit.name for unit in plan.units]
    assert len(set(names)) == len(names)
    answered = 0.0
    for unit in plan.units:
        assert unit.kv_bytes > 0
        assert abs(sum(model.quota for model in unit.models) - 1.0) < 1e-9
        assert len({model.name for model in unit.models}) == len(unit.models) > 0
        answered += sum(min(model.rate, model.throughput) for model in unit.models)
    assert abs(plan.throughput - answered) <= 1e-6 * max(1.0, answered)

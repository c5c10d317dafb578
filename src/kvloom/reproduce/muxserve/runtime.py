"""The paper's runtime, as far as jobs take longer in it than on the bare devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvloom.plan.cluster import Costs
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.types.job import Phase
from kvloom.types.spec import EngineSpec

HOST: Final[Mapping[str, float]] = {"7b": 0.10e-3, "13b": 0.08e-3, "30b": 0.07e-3, "65b": 0.07e-3}
"""Seconds that a decode step takes longer for each of its sequences, by the model's size: what the paper's
own estimator adds to the times of its profile."""


class Hosted:
    """Satisfies `CostModel`: a decode step waits for the host, which prepares it and looks at what it drew,
    the longer the larger its batch. sizes: by model."""

    def __init__(self, cost: CostModel, sizes: Mapping[str, str]) -> None:
        self._cost = cost
        self._host = {name: HOST[size] for name, size in sizes.items()}

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        host = work.batch * self._host[work.model] if work.phase is Phase.DECODE else 0.0
        return self._cost.seconds(work, beside) + host


def hosted(costs: Costs, sizes: Mapping[str, str]) -> Costs:
    """For a planner."""

    def cost(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        return Hosted(costs(device, gpus, shapes), sizes)

    return cost


class UnderMPS:
    """Satisfies `CostModel`: each model has a process for its prefills and one for its decodes, whose shares
    of the device are set when they start. So a job has no more of it where it runs alone."""

    def __init__(self, cost: CostModel, spec: EngineSpec) -> None:
        self._cost = cost
        self._shares = {
            (model.name, phase): share or 1.0
            for model in spec.models
            for phase, share in ((Phase.PREFILL, model.prefill_share), (Phase.DECODE, model.decode_share))
        }

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._cost.seconds(self._fixed(work), [self._fixed(other) for other in beside])

    def _fixed(self, work: Work) -> Work:
        return replace(work, share=self._shares[work.model, work.phase])

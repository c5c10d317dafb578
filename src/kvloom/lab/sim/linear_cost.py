"""Cost models whose jobs take so many seconds a token, for simulations that need no real device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Operator, Work
from kvloom.types.job import Phase


class LinearCost:
    """Satisfies `CostModel`: so many seconds a job and a token, more with less of the device or beside
    others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def pace(self) -> float:
        """Returns the seconds of a token."""
        return self._seconds

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        tokens = work.batch if work.phase is Phase.DECODE else work.tokens
        return self._seconds * (10 + tokens / work.share + work.context / 50) * (1 + len(beside) / 4)


class LinearOperatorCost(LinearCost):
    """Satisfies `OperatorCostModel`: ten operators a job, each with as many parts as it likes."""

    start = 0.0
    poll = 0.0

    def __init__(self, seconds: float, shapes: Mapping[str, ModelShape]) -> None:
        """shapes: of the models that run on the device, or attend there."""
        super().__init__(seconds)
        self.shapes = shapes

    def shape(self, model: str) -> ModelShape:
        return self.shapes[model]

    def operators(self, work: Work) -> tuple[Operator, ...]:
        return (Operator("ten", self.seconds(work) / 10, 10, 8),)

    def queued(self, work: Work) -> float:
        return self.seconds(work)

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        return self._seconds * context / 500 / shape.layers

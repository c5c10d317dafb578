"""What jobs take in small fleets whose laws are tested."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.core.job import Phase
from kvloom.cost.work import Work


class Evenly:
    """Satisfies `CostModel`: so many seconds a job and a token, more with less of the device or beside
    others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        tokens = work.tokens if work.phase is Phase.PREFILL else work.batch
        return self._seconds * (10 + tokens / work.share + work.context / 50) * (1 + len(beside) / 4)

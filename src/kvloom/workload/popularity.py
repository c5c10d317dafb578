"""How requests divide among models: a power law, and its drift over a day."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
from pydantic import Field

from kvloom.types.geometry import F64
from kvloom.workload.fields import Seconds, Section

DAY: Final = 86400.0
STEPS: Final = 288  # of a period; every five minutes of a day


def power_law(models: int, alpha: float) -> F64:
    """[models] shares of sum 1, that of number i in proportion to (i + 1)^-alpha (MuxServe, section 4.2)."""
    weights = np.arange(1, models + 1, dtype=np.float64) ** -alpha
    shares: F64 = weights / weights.sum()
    return shares


class Drift(Section):
    """Each model's weight goes up and down once in `period` seconds, each at a time of its own: by a factor
    of e^swing at most. The rate of all models together stays as it is."""

    swing: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
    period: Seconds = DAY

    def rates(self, rates: F64, phases: F64) -> F64:
        """[models, STEPS] requests a second. rates: [models] without drift. phases: [models] in [0, 1)."""
        turns = np.arange(STEPS) / STEPS
        weights = rates[:, None] * np.exp(self.swing * np.sin(2 * np.pi * (turns + phases[:, None])))
        drifted: F64 = weights * (rates.sum() / weights.sum(axis=0))
        return drifted

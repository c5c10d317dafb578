"""CPU time under calibrating loads, parted into what a request, a token and a turn cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.plan.cost.fit import fit_positive
from kvloom.plan.cost.profile import Hosted, Role

LEAST: Final = 1e-9  # seconds; a fit by ratios wants more than 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that was asked, and answered. turns: times that tokens came, about. cpu: seconds by role; the
    client's from its start to its end."""

    requests: int
    tokens: int
    turns: float
    cpu: dict[Role, float]


def parts(loads: Sequence[Loaded]) -> tuple[Hosted, ...]:
    """By least squares. The client has a part for its start, which is nobody's cost."""
    return tuple(_part(role, loads) for role in ("client", "gateway", "engine"))


def _part(role: Role, loads: Sequence[Loaded]) -> Hosted:
    features = np.array([[load.requests, load.tokens, load.turns] for load in loads], float)
    if role == "client":
        features = np.column_stack([features, np.ones(len(loads))])
    seconds = np.array([max(load.cpu[role], LEAST) for load in loads])
    request, token, turn, *_ = fit_positive(features, seconds).tolist()
    return Hosted(role=role, request=request, token=token, turn=turn)

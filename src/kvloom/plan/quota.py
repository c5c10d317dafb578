"""KV quotas of a unit's models (MuxServe, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.plan.cluster import MeshKind
from kvloom.plan.demand import Demand
from kvloom.plan.memory import token_bytes

_LEAST: Final = 1e-3  # a model that nobody asks for today may be asked tomorrow


def quotas(kind: MeshKind, demands: Sequence[Demand], rates: Sequence[float]) -> list[float]:
    """Shares of the pool in proportion to rate × KV bytes of a token; they sum to 1. rates: what comes to
    each model here."""
    weights = [rate * token_bytes(demand.shape, kind) for demand, rate in zip(demands, rates, strict=True)]
    whole = sum(weights)
    shares = [weight / whole if whole else 1.0 / len(weights) for weight in weights]
    shares = [max(share, _LEAST) for share in shares]
    return [share / sum(shares) for share in shares]

"""Room that a request has at a replica."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.router.replica import Replica
from kvloom.types.address import Endpoint, KVAddress


@dataclass(frozen=True, slots=True)
class Spot:
    """Room at `replica` for prompt[matched:end]; what lies before is there already. lease: seconds."""

    replica: Replica
    matched: int
    end: int
    address: KVAddress
    peer: Endpoint
    lease: float

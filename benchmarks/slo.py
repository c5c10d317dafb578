"""Service-level objectives: which requests of a trace came in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load import Outcome

# (shape, prompt tokens, output tokens) → seconds of such a request alone on a server
Lone = Mapping[tuple[str, int, int], float]


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is in time if it ends within `scale` times the latency it has alone, counted from when it
    was due. The same for every system compared."""

    lone: Lone
    scale: float

    def met(self, shape: str, outcome: Outcome) -> bool:
        return outcome.error is None and outcome.latency <= self.scale * self.lone[shape, *outcome.ask.kind]


def slower(one: Lone, other: Lone) -> Lone:
    return {kind: max(seconds, other[kind]) for kind, seconds in one.items()}


def attained(objective: Objective, shapes: Mapping[str, str], outcomes: Sequence[Outcome]) -> int:
    """Requests in time. shapes: of each model."""
    return sum(objective.met(shapes[outcome.ask.model], outcome) for outcome in outcomes)

"""Service-level objectives: which answers came in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvloom.workload.ask import Ask, Outcome

Objective = Callable[[Outcome], bool]  # of an outcome without error


@dataclass(frozen=True, slots=True)
class Within:
    """Seconds: to the first token, mean between tokens, to the last token. None is no bound."""

    first: float | None = None
    per_token: float | None = None
    end: float | None = None

    def __call__(self, outcome: Outcome) -> bool:
        return (
            _kept(outcome.first, self.first)
            and _kept(outcome.per_token, self.per_token)
            and _kept(outcome.end, self.end)
        )


def _kept(seconds: float | None, bound: float | None) -> bool:
    return bound is None or seconds is None or seconds <= bound


@dataclass(frozen=True, slots=True)
class Scaled:
    """The last token within `scale` times the latency that the request has alone (MuxServe, section 4.2).
    alone: that latency, in seconds."""

    scale: float
    alone: Callable[[Ask], float]

    def __call__(self, outcome: Outcome) -> bool:
        return outcome.end is not None and outcome.end <= self.scale * self.alone(outcome.ask)


@dataclass(frozen=True, slots=True)
class Alone:
    """A model's latency without other requests, in seconds: start + prompt · per_prompt + (output − 1) ·
    per_token, as MuxServe adds up one prefill and the decode steps."""

    start: float
    per_prompt: float
    per_token: float

    def seconds(self, ask: Ask) -> float:
        return self.start + ask.prompt * self.per_prompt + (ask.output - 1) * self.per_token

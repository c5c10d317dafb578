"""Prompts that begin alike: system prompts, and conversations, whose turns repeat what was said before."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from kvloom.workload.ask import Segment
from kvloom.workload.fields import LONGEST, Seconds, Section, Share, TokenCount


class SystemPrompts(Section):
    """A `share` of a model's requests begins with one of its `kinds` system prompts, `tokens` tokens each."""

    tokens: TokenCount
    kinds: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    share: Share = 1.0


class Conversations(Section):
    """turns: their mean number, geometrically distributed. pause: mean seconds from one turn's arrival to the
    next one's, exponentially distributed: open loop, whether or not the answer has come. A conversation ends
    before the turn that would need more than max_context tokens, but not before its first."""

    turns: Annotated[float, Field(ge=1, le=1e4, allow_inf_nan=False)]
    pause: Seconds
    max_context: TokenCount = LONGEST


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of `prompt` tokens that begins with `shared`, to be answered with `output` tokens."""

    prompt: int
    output: int
    shared: tuple[Segment, ...]


@dataclass(order=True, slots=True)
class _Due:
    at: float
    order: int
    first: bool = field(compare=False)
    spoken: tuple[Segment, ...] = field(compare=False)


class Sharing:
    """Prompts of one model. ids: its own, for segments; those of its system prompts are the first of them."""

    def __init__(self, system: SystemPrompts | None, ids: Iterator[int], rng: np.random.Generator) -> None:
        self._rng = rng
        self._ids = ids
        self._system = system
        self._openings = [Segment(next(ids), system.tokens) for _ in range(system.kinds)] if system else []

    def singles(
        self, arrivals: Iterator[float], lengths: Iterator[tuple[int, int]]
    ) -> Iterator[tuple[float, Turn]]:
        """Requests that have nothing in common but the system prompt, which comes before the drawn prompt."""
        for at in arrivals:
            prompt, output = next(lengths)
            shared = self._opening()
            yield at, Turn(_tokens(shared) + prompt, output, shared)

    def conversations(
        self, arrivals: Iterator[float], lengths: Iterator[tuple[int, int]], kind: Conversations
    ) -> Iterator[tuple[float, Turn]]:
        """arrivals: of the first turns. The drawn prompt is what the user says in a turn; in the next turn it
        and the answer (made-up tokens, as many as it had) come before what is said then."""
        order = itertools.count()
        due: list[_Due] = []
        for start in arrivals:
            heapq.heappush(due, _Due(start, next(order), True, self._opening()))
            while due and due[0].at <= start:
                now = heapq.heappop(due)
                said, output = next(lengths)
                spoken = (*now.spoken, Segment(next(self._ids), said))
                if not now.first and _tokens(spoken) + output > kind.max_context:
                    continue
                yield now.at, Turn(_tokens(spoken), output, spoken)
                if self._rng.random() < 1 - 1 / kind.turns:
                    after = now.at + float(self._rng.exponential(kind.pause))
                    spoken = (*spoken, Segment(next(self._ids), output))
                    heapq.heappush(due, _Due(after, next(order), False, spoken))

    def _opening(self) -> tuple[Segment, ...]:
        if self._system is None or self._rng.random() >= self._system.share:
            return ()
        return (self._openings[int(self._rng.integers(self._system.kinds))],)


def _tokens(segments: tuple[Segment, ...]) -> int:
    return sum(segment.tokens for segment in segments)

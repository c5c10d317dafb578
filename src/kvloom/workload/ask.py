"""One request of a workload, and what became of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]


class Segment(Struct, frozen=True, array_like=True):
    """A run of the prompt's tokens that all requests with this id share: the same id, the same tokens."""

    id: int
    tokens: Count


class Ask(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request that comes `at` seconds after the start, with a prompt of `prompt` tokens, and is answered
    with exactly `output` tokens. The prompt begins with `shared` segments; the rest is its own."""

    at: Seconds
    model: str
    prompt: Count
    output: Count
    priority: int = 0
    shared: tuple[Segment, ...] = ()


class Outcome(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What became of an ask. Times are in seconds from its arrival: `first` to the first token, `end` to the
    last; None where there was none. tokens: that came. cached: of the prompt, not computed anew. error: one
    line, empty where all came."""

    ask: Ask
    first: float | None
    end: float | None
    tokens: int
    cached: int = 0
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Mean seconds between tokens; None where there were not two."""
        if self.first is None or self.end is None or self.tokens < 2:
            return None
        return (self.end - self.first) / (self.tokens - 1)

"""One request of a workload, the tokens of its prompt, its result, and whether that came in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

U64 = npt.NDArray[np.uint64]
Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]

LOWEST: Final = 16  # the least token id of a prompt; special tokens mostly lie below
_OWN, _SHARED = 1, 2
_TEXT: Final = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been"
)
_WORDS: Final = tuple(_TEXT.split())
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Segment(Struct, frozen=True, array_like=True):
    """A run of a prompt's tokens. All segments with the same id have the same tokens."""

    id: int
    tokens: Count


class WorkloadRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request as a workload describes it."""

    at: Seconds
    """The arrival, in seconds since the workload's start."""
    model: str
    prompt: Count
    """The tokens of the prompt."""
    output: Count
    """The tokens of the answer, which has exactly as many."""
    priority: int = 0
    shared: tuple[Segment, ...] = ()
    """The segments that the prompt begins with. The rest of the prompt belongs to this request alone."""


class RequestResult(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of one request. Times are in seconds since its arrival, or None if nothing came."""

    request: WorkloadRequest
    first: float | None
    """The first token's time."""
    end: float | None
    """The last token's time."""
    tokens: int
    """The number of tokens that came."""
    cached: int = 0
    """The tokens of the prompt that were not computed anew."""
    error: str = ""
    """The error in one line; empty if the whole answer came."""

    @property
    def per_token(self) -> float | None:
        """The mean time between two tokens, in seconds; None if there were fewer than two tokens."""
        if self.first is None or self.end is None or self.tokens < 2:
            return None
        return (self.end - self.first) / (self.tokens - 1)


def mix(value: int) -> int:
    """Returns 64 bits, one step of SplitMix64 from `value` (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (value + _GOLDEN) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _mixed(z: U64) -> U64:
    """Returns `mix` of each number."""
    z = z + np.uint64(_GOLDEN)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The token ids of prompts, from LOWEST to `vocab` - 1: a function of the request and its number alone,
    so that they are the same in simulation and on the wire."""

    vocab: int
    seed: int = 0

    def __call__(self, number: int, request: WorkloadRequest) -> list[int]:
        """Returns the `request.prompt` tokens of the workload's request `number`. Equal segments give equal
        tokens in every prompt; the tokens after them differ from request to request."""
        runs = [(mix(self._key(_SHARED) + segment.id), segment.tokens) for segment in request.shared]
        own = request.prompt - sum(tokens for _, tokens in runs)
        runs.append((mix(self._key(_OWN) + number), own))
        counts = np.array([tokens for _, tokens in runs])
        keys = np.repeat(np.array([key for key, _ in runs], dtype=np.uint64), counts)
        places = np.arange(request.prompt) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = _mixed(keys + places.astype(np.uint64) * np.uint64(_GOLDEN))
        tokens: list[int] = (drawn % np.uint64(self.vocab - LOWEST) + np.uint64(LOWEST)).tolist()
        return tokens

    def text(self, number: int, request: WorkloadRequest) -> str:
        """Returns as many common English words, for servers that take no token ids: about as many tokens."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self(number, request))

    def _key(self, kind: int) -> int:
        return mix(self.seed * 4 + kind)


Objective = Callable[[RequestResult], bool]
"""A service-level objective: tells whether an answer without error came in time."""


@dataclass(frozen=True, slots=True)
class Within:
    """An objective of bounds in seconds; None stands for no bound."""

    first: float | None = None
    """The bound of the time to the first token."""
    per_token: float | None = None
    """The bound of the mean time between tokens."""
    end: float | None = None
    """The bound of the time to the last token."""

    def __call__(self, result: RequestResult) -> bool:
        return (
            _kept(result.first, self.first)
            and _kept(result.per_token, self.per_token)
            and _kept(result.end, self.end)
        )


def _kept(seconds: float | None, bound: float | None) -> bool:
    return bound is None or seconds is None or seconds <= bound


@dataclass(frozen=True, slots=True)
class Scaled:
    """An objective: the last token comes within `scale` times the latency that the request has alone
    (MuxServe, section 4.2)."""

    scale: float
    alone: Callable[[WorkloadRequest], float]
    """Returns the latency of a request that has the server to itself, in seconds."""

    def __call__(self, result: RequestResult) -> bool:
        return result.end is not None and result.end <= self.scale * self.alone(result.request)


@dataclass(frozen=True, slots=True)
class Alone:
    """A model's latency without other requests: start + prompt · per_prompt + (output − 1) · per_token, in
    seconds, as MuxServe adds up one prefill and the decode steps."""

    start: float
    per_prompt: float
    per_token: float

    def seconds(self, request: WorkloadRequest) -> float:
        return self.start + request.prompt * self.per_prompt + (request.output - 1) * self.per_token

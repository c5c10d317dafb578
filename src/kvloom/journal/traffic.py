"""The traffic of a fleet, counted by model and hour: how many requests, how long, at which minutes. Nothing
of a request's content is in it, and nothing of who has asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

HOUR: Final = 3600  # seconds
MINUTE: Final = 60
MINUTES: Final = 60
"""The number of minutes of an hour."""
_BITS: Final = 64
_ROUNDING: Final = 1e-9  # by which a whole rank may be missed: 0.07 · 100 is 7.000000000000001

_Count = Annotated[int, Meta(ge=0)]
_Bucket = Annotated[int, Meta(ge=0, le=_BITS)]
_Minute = Annotated[int, Meta(ge=0, lt=MINUTES)]
Lengths = dict[_Bucket, _Count]
"""A histogram of lengths in tokens. Bucket b counts lengths of b bits, 2^(b-1) to 2^b - 1; bucket 0 counts
those of 0."""


class TrafficHour(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kvloom_traffic", tag=1):
    """The requests for one model that arrived in one hour, or a part of them: parts add up."""

    hour: _Count
    """The time at which the hour began, in seconds since the epoch: a multiple of 3600."""
    model: Annotated[str, Meta(min_length=1)]
    base: str = ""
    """The model whose adapter it is; empty if it is none."""
    requests: _Count = 0
    """The number of prompts that were answered, or whose caller went while they were."""
    unanswered: _Count = 0
    """The number of requests that came too many, or that the fleet failed to answer."""
    prompt_tokens: _Count = 0
    output_tokens: _Count = 0
    cached_tokens: _Count = 0
    """The prompt tokens whose K and V were in a cache."""
    prompts: Lengths = {}
    """The lengths of prompts."""
    outputs: Lengths = {}
    """The lengths of answers."""
    minutes: dict[_Minute, _Count] = {}
    """The number of requests, unanswered ones too, by the minute in which they arrived. Minutes with none are
    left out."""

    @property
    def asked(self) -> int:
        return self.requests + self.unanswered

    @property
    def peak(self) -> int:
        """Returns the requests of the busiest minute."""
        return max(self.minutes.values(), default=0)

    @property
    def burstiness(self) -> float:
        """Returns the variance of the requests a minute over their mean: about 1 if they arrive at random,
        more if they come in bursts, 0 if there are none. Minutes before the first and after the last request
        do not count."""
        if not self.minutes:
            return 0.0
        span = max(self.minutes) - min(self.minutes) + 1
        mean = sum(self.minutes.values()) / span
        return sum(count * count for count in self.minutes.values()) / span / mean - mean


def bucket(length: int) -> int:
    """Returns the bucket of `Lengths` in which a length is counted."""
    return min(length.bit_length(), _BITS)


def rebuild(lengths: Mapping[int, int], total: int) -> list[tuple[float, int]]:
    """Returns lengths and how often each occurs, ascending, whose sum is `total` again.

    Each is in its bucket, all at the same part of the way from the bucket's least length to its largest, so
    that a quantile is less than a factor of two from the true one. Returns nothing if nothing was counted."""
    borders = [(*_borders(at), count) for at, count in sorted(lengths.items()) if count]
    least = sum(low * count for low, _, count in borders)
    room = sum((high - low) * count for low, high, count in borders)
    part = min(1.0, max(0.0, (total - least) / room)) if room else 0.0
    return [(low + part * (high - low), count) for low, high, count in borders]


def quantile(found: Sequence[tuple[float, int]], q: float) -> float:
    """Returns the q-quantile of what `rebuild` has returned, by its nearest rank; 0 if that is nothing."""
    rank, seen = nearest_rank(q, sum(count for _, count in found)), 0
    for length, count in found:
        seen += count
        if seen >= rank:
            return length
    return 0.0


def nearest_rank(q: float, count: int) -> int:
    """Returns the rank ⌈q · count⌉, from 1 on, of the q-quantile of so many values: the least value that is
    no less than a share q of all. The 99th percentile of fewer than a hundred is the largest."""
    return max(1, math.ceil(q * count - _ROUNDING))


def _borders(at: int) -> tuple[int, int]:
    return (1 << at - 1, (1 << at) - 1) if at else (0, 0)


@dataclass(slots=True)
class _Sums:
    """A `TrafficHour` while it grows."""

    base: str = ""
    requests: int = 0
    unanswered: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prompts: Lengths = field(default_factory=dict)
    outputs: Lengths = field(default_factory=dict)
    minutes: dict[int, int] = field(default_factory=dict)

    def add(self, one: TrafficHour) -> None:
        self.base = one.base or self.base
        self.requests += one.requests
        self.unanswered += one.unanswered
        self.prompt_tokens += one.prompt_tokens
        self.output_tokens += one.output_tokens
        self.cached_tokens += one.cached_tokens
        for own, other in (
            (self.prompts, one.prompts),
            (self.outputs, one.outputs),
            (self.minutes, one.minutes),
        ):
            for key, count in other.items():
                own[key] = own.get(key, 0) + count

    def hour(self, hour: int, model: str) -> TrafficHour:
        return TrafficHour(
            hour=hour,
            model=model,
            base=self.base,
            requests=self.requests,
            unanswered=self.unanswered,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            prompts=dict(sorted(self.prompts.items())),
            outputs=dict(sorted(self.outputs.items())),
            minutes=dict(sorted(self.minutes.items())),
        )


def _hour_and_minute(at: float) -> tuple[int, int]:
    """Returns when the hour of a time began, in seconds since the epoch, and which of its minutes it is."""
    hour, inside = divmod(int(at), HOUR)
    return hour * HOUR, inside // MINUTE


def add_up(parts: Iterable[TrafficHour]) -> list[TrafficHour]:
    """Returns one `TrafficHour` for each hour and model, in this order."""
    counts = TrafficCounts()
    for part in parts:
        counts.put(part)
    return counts.take()


class TrafficCounts:
    """Counts what one gateway was asked, until somebody takes it. It holds one part for each model and hour,
    however many requests there are."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], _Sums] = {}

    def answered(
        self, model: str, at: float, prompts: int, prompt: int, output: int, cached: int, base: str = ""
    ) -> None:
        """Counts a request that was answered.

        `at` is the time when it arrived, in seconds since the epoch; `prompts` is the number of its prompts,
        which count as so many requests; `prompt`, `output` and `cached` are the tokens of all of them; `base`
        is the model whose adapter this is."""
        if prompts < 1:
            return
        hour, minute = _hour_and_minute(at)
        self.put(
            TrafficHour(
                hour=hour,
                model=model,
                base=base,
                requests=prompts,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=cached,
                prompts={bucket(prompt // prompts): prompts},
                outputs={bucket(output // prompts): prompts},
                minutes={minute: prompts},
            )
        )

    def unanswered(self, model: str, at: float, base: str = "") -> None:
        """Counts a request for which there was no room, or which failed by the fleet's fault."""
        hour, minute = _hour_and_minute(at)
        self.put(TrafficHour(hour=hour, model=model, base=base, unanswered=1, minutes={minute: 1}))

    def put(self, part: TrafficHour) -> None:
        self._sums.setdefault((part.hour, part.model), _Sums()).add(part)

    def take(self) -> list[TrafficHour]:
        """Returns what was counted since this was last called."""
        sums, self._sums = self._sums, {}
        return [found.hour(*key) for key, found in sorted(sums.items())]


def encode_hours(hours: Iterable[TrafficHour]) -> bytes:
    """Returns a line of JSON for each hour."""
    return b"".join(msgspec.json.encode(hour) + b"\n" for hour in hours)


def decode_hours(lines: bytes) -> tuple[list[TrafficHour], int]:
    """Returns what lines of JSON tell, and how many lines are damaged, which are left out."""
    decoder, found, damaged = msgspec.json.Decoder(TrafficHour), [], 0
    for line in lines.splitlines():
        if not line:
            continue
        try:
            one = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += 1
            continue
        if one.hour % HOUR:
            damaged += 1
        else:
            found.append(one)
    return found, damaged

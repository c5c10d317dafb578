"""The results of a benchmark or of a simulation, as they are written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_count, show_number

VERSION: Final = 2
CURVE: Final = (*(i / 50 for i in range(50)), 0.99, 0.995, 0.999, 1.0)  # quantiles


class Latency(Struct, frozen=True, kw_only=True):
    """A distribution, in seconds."""

    mean: float
    p50: float
    p80: float
    p95: float
    p99: float
    most: float
    curve: list[float]
    """The quantiles of CURVE."""


class Tally(Struct, frozen=True, kw_only=True):
    """Sums of one model's requests or of all. Latencies and tokens are those of the requests that were
    answered without error."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    first: Latency | None
    """The time to the first token."""
    per_token: Latency | None
    """The mean time between a request's tokens."""
    end: Latency | None
    """The time to the last token."""
    attained: dict[str, float]
    """The share of all requests that met each objective; a request with an error met none."""


class Course(Struct, frozen=True, kw_only=True):
    """Sums over stretches of time of equal width."""

    asked: list[float]
    """The number of requests that came."""
    answered: list[float]
    """The number of requests that were answered."""
    tokens: list[float]
    """The number of tokens that came."""


class Slept(Struct, frozen=True, kw_only=True):
    """The wakings of weights that share one budget with the pool."""

    wakes: int
    sleeps: int
    waited: int
    """The number of requests that came while their model slept."""
    wait: Latency | None
    """The time from the arrival of these until their model was awake."""


class FleetEvents(Struct, frozen=True, kw_only=True):
    """The moves of requests and the starts of units on the way."""

    preempted: int
    """The times that a choice was put back because blocks were short."""
    moved: int | None
    """The number of requests that went over to another unit; None if there was no fleet scheduler."""
    stayed: int | None
    """The number of requests that were to go over and could not; None if there was no fleet scheduler."""
    units: float
    """The mean number of units that had a process, or were about to, over the run."""
    least: int
    most: int
    slept: Slept | None = None
    """The wakings of weights; None if no weights could sleep."""


def show_fleet_events(found: FleetEvents) -> str:
    """Returns `3 preemptions; 12 requests moved, 1 could not; 2.40 units in the mean, 1 to 4`, and what was
    waited for weights."""
    parts = [show_count(found.preempted, "preemption")]
    if found.moved is not None:
        parts.append(f"{show_count(found.moved, 'request')} moved, {found.stayed or 0:,} could not")
    if found.least != found.most:
        parts.append(f"{found.units:.2f} units in the mean, {found.least} to {found.most}")
    if found.slept is not None:
        parts.append(_show_slept(found.slept))
    return "; ".join(parts)


def _show_slept(found: Slept) -> str:
    """Returns `weights woke 9 times and fell asleep 5 times; 7 requests waited for them, 0.31 s in the mean,
    0.9 s at most`."""
    woke, slept = show_count(found.wakes, "time"), show_count(found.sleeps, "time")
    told = f"weights woke {woke} and fell asleep {slept}"
    if found.wait is None:
        return f"{told}; no request waited for them"
    mean, most = show_number(found.wait.mean), show_number(found.wait.most)
    waited = show_count(found.waited, "request")
    return f"{told}; {waited} waited for them, {mean} s in the mean, {most} s at most"


class Results(Struct, frozen=True, kw_only=True):
    """The file of results."""

    kvloom_results: Annotated[int, Meta(ge=1)] = VERSION
    source: Literal["benchmark", "simulation"]
    title: str
    seconds: float
    """The time from the start to the last answer."""
    total: Tally
    models: dict[str, Tally]
    width: float
    """The seconds of a stretch of the courses."""
    courses: dict[str, Course]
    """The results by model."""
    errors: dict[str, int]
    """The number of errors of each kind, by the first one's text. Errors that differ only in counts are one
    kind."""
    lateness: Latency | None = None
    """The time by which the client sent its requests too late; None if there was no client."""
    client_cpu: float | None = None
    """The CPU seconds of the client while it asked; None if there was no client."""
    fleet_events: FleetEvents | None = None
    """The moves and starts of the run; None if they are not known."""

    @property
    def client_cores(self) -> float | None:
        """The cores that the client used in the mean; None if there was no client, or it did not tell."""
        return None if self.client_cpu is None else self.client_cpu / self.seconds

    def save(self, path: Path) -> None:
        """Raises ConfigError."""
        write_text(path, msgspec.json.encode(self).decode() + "\n")


def read_results(path: Path) -> Results:
    """Raises ConfigError."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the path of a results file is right") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no results file: {error}; what `--json` wrote is right") from error
    if results.kvloom_results != VERSION:
        raise ConfigError(f"{path}: version {results.kvloom_results}; this kvloom reads version {VERSION}")
    return results


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a path that can be written is right") from error

"""What a run came to, as it is written and read: of a benchmark or of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvloom.types.errors import ConfigError

VERSION: Final = 1
CURVE: Final = (*(i / 50 for i in range(50)), 0.99, 0.995, 0.999, 1.0)  # quantiles


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds. curve: the quantiles CURVE."""

    mean: float
    p50: float
    p80: float
    p95: float
    p99: float
    most: float
    curve: list[float]


class Tally(Struct, frozen=True, kw_only=True):
    """Of one model or of all. Latencies and tokens are those of requests that were answered without error;
    per_token: the mean time between a request's tokens. attained: the share of all requests that met each
    objective; one with an error met none."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    first: Latency | None
    per_token: Latency | None
    end: Latency | None
    attained: dict[str, float]


class Course(Struct, frozen=True, kw_only=True):
    """Over time, in stretches of equal width: requests that came, requests answered, tokens that came."""

    asked: list[float]
    answered: list[float]
    tokens: list[float]


class Upheaval(Struct, frozen=True, kw_only=True):
    """What became of requests and units on the way. preempted: choices that were put back for want of blocks,
    each time. moved, stayed: requests that went over to another unit, and that could not; None where
    there was no fleet scheduler. units: that had a process, or were about to, in the mean over the run; least
    and most of them."""

    preempted: int
    moved: int | None
    stayed: int | None
    units: float
    least: int
    most: int


class Results(Struct, frozen=True, kw_only=True):
    """seconds: from the start to the last answer. width: seconds of a course's stretches. errors: how many of
    each kind. lateness: by how many seconds a client sent its requests too late; None where there is none.
    upheaval: None where it is not known."""

    kvloom_results: Annotated[int, Meta(ge=1)] = VERSION
    source: Literal["benchmark", "simulation"]
    title: str
    seconds: float
    total: Tally
    models: dict[str, Tally]
    width: float
    courses: dict[str, Course]
    errors: dict[str, int]
    lateness: Latency | None = None
    upheaval: Upheaval | None = None

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

"""A profile: the times of a machine's jobs, alone and beside other work, and the CPU time that its server
spends besides. It is a JSON file that `kvloom profile` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Work
from kvloom.types.errors import ConfigError
from kvloom.types.files import replacing
from kvloom.types.job import Phase

PROFILE_VERSION: Final = 8

_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Some = Annotated[int, Meta(ge=1, lt=2**31)]
_Seconds = Annotated[float, Meta(gt=0.0)]
_ZeroOrMore = Annotated[float, Meta(ge=0.0)]

Role = Literal["client", "gateway", "engine"]


class MeasuredJob(Struct, frozen=True, kw_only=True):
    """A job as `Work` describes it, on so many cores."""

    model: str
    phase: Phase
    cores: _Some
    batch: _Some
    tokens: _Some
    drawn: _Count
    pairs: _Count
    context: _Count

    @staticmethod
    def of(work: Work, cores: int) -> MeasuredJob:
        return MeasuredJob(
            model=work.model,
            phase=work.phase,
            cores=cores,
            batch=work.batch,
            tokens=work.tokens,
            drawn=work.drawn,
            pairs=work.pairs,
            context=work.context,
        )

    def work(self, cores: int) -> Work:
        """Returns the job as work on its cores, of so many."""
        share = self.cores / cores
        return Work(
            self.model, self.phase, share, self.batch, self.tokens, self.drawn, self.pairs, self.context
        )


class Timed(Struct, frozen=True, kw_only=True):
    """The times of a job alone, from launch to result, as often as it was measured."""

    job: MeasuredJob
    seconds: Annotated[tuple[_Seconds, ...], Meta(min_length=1)]


class TimedMixed(Struct, frozen=True, kw_only=True):
    """The times of a mixed job alone, likewise, and the two jobs that are in it."""

    prompts: MeasuredJob
    step: MeasuredJob
    seconds: Annotated[tuple[_Seconds, ...], Meta(min_length=1)]


class Colocated(Struct, frozen=True, kw_only=True):
    """The median times of a job alone, and with `beside` running all the while."""

    job: MeasuredJob
    beside: MeasuredJob
    alone: _Seconds
    seconds: _Seconds


class EngineStep(Struct, frozen=True, kw_only=True):
    """The medians of decode steps under the real engine."""

    model: str
    sequences: _Some
    gap: _Seconds
    """The seconds from a step's result to the next one's launch."""
    step: _Seconds
    """The seconds from launch to result. The engine hands out no tokens meanwhile."""
    context: _Count
    """The tokens that all sequences had before such a step."""


class PrefillGap(Struct, frozen=True, kw_only=True):
    """The engine's own work for a job with prompts, in the median."""

    model: str
    gap: _ZeroOrMore
    """The seconds before the job's launch and after its result, less those of a decode step."""


class Oversubscribed(Struct, frozen=True, kw_only=True):
    """The time of a job beside busy processes."""

    job: MeasuredJob
    excess: _Some
    """How many threads more want to run than there are cores."""
    alone: _Seconds
    """The median time of the job alone."""
    seconds: _Seconds
    """The same, and what the job loses in the mean beside so many threads, scaled from what it lost beside
    processes that work for a part of the time."""


class BesideLoop(Struct, frozen=True, kw_only=True):
    """The median times of a job alone, and while the loop's thread of its own process worked for `busy`
    seconds."""

    job: MeasuredJob
    busy: _Seconds
    alone: _Seconds
    seconds: _Seconds


class CpuOverhead(Struct, frozen=True, kw_only=True):
    """CPU seconds of a role's work besides jobs. The role `engine` is that of its loop's thread, without what
    `EngineStep` and `PrefillGap` have as `gap`."""

    role: Role
    request: _ZeroOrMore
    """The seconds for each request."""
    prompt: _ZeroOrMore
    """The seconds for each token of a prompt."""
    token: _ZeroOrMore
    """The seconds for each token of an answer."""
    turn: _ZeroOrMore
    """The seconds for each time that tokens of answers come, however many."""


class Computer(Struct, frozen=True, kw_only=True):
    """The machine that was measured."""

    cpu: str
    cores: _Some
    memory: _Count
    """The bytes that were free."""
    load: Annotated[float, Meta(ge=0.0)]
    """The average load of other processes before."""
    system: str
    versions: dict[str, str]


class Profile(Struct, frozen=True, kw_only=True):
    """A profile. `cores` is the number that the executor had, and `temperature` that of what was drawn.
    `shapes` are by model. `overheads` is empty if only jobs were measured."""

    version: int = PROFILE_VERSION
    computer: Computer
    cores: _Some
    block_bytes: _Some
    temperature: float
    shapes: Annotated[dict[str, ModelShape], Meta(min_length=1)]
    jobs: tuple[Timed, ...]
    colocated: tuple[Colocated, ...]
    steps: tuple[EngineStep, ...]
    prefill_gaps: tuple[PrefillGap, ...] = ()
    mixed: tuple[TimedMixed, ...] = ()
    oversubscribed: tuple[Oversubscribed, ...] = ()
    beside_loop: tuple[BesideLoop, ...] = ()
    overheads: tuple[CpuOverhead, ...] = ()


class _Versioned(Struct):
    """The keys of a profile of any version."""

    version: int
    computer: msgspec.Raw


def read_profile(file: Path) -> Profile:
    """Returns the profile in a file. Raises ConfigError for a file that is cut off, of another version, or no
    profile."""
    again = "`kvloom profile` writes a right one"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; {again}") from error
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != PROFILE_VERSION:
            raise ConfigError(f"{file}: version {version}, and this kvloom reads {PROFILE_VERSION}; {again}")
        profile = msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no profile ({' '.join(str(error).split())}); {again}") from error
    strange = {timed.job.model for timed in profile.jobs} ^ set(profile.shapes)
    if strange:
        raise ConfigError(f"{file}: {', '.join(sorted(strange))}: not both a shape and jobs; {again}")
    return profile


def write_profile(profile: Profile, file: Path) -> None:
    """Writes the profile whole or not at all. Raises ConfigError if it cannot be written."""
    try:
        with replacing(file, 0o666) as made:
            made.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a file in a folder of yours is right") from error

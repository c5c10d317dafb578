"""A profile: how long a machine's real executor took for jobs. A JSON file, written by `kvloom profile`."""

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

PROFILE_VERSION: Final = 7

_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Some = Annotated[int, Meta(ge=1, lt=2**31)]
_Seconds = Annotated[float, Meta(gt=0.0)]
_ZeroOrMore = Annotated[float, Meta(ge=0.0)]

Role = Literal["client", "gateway", "engine"]


class JobMeasured(Struct, frozen=True, kw_only=True):
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
    def of(work: Work, cores: int) -> JobMeasured:
        return JobMeasured(
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

    doing: JobMeasured
    seconds: Annotated[tuple[_Seconds, ...], Meta(min_length=1)]


class TimedMixed(Struct, frozen=True, kw_only=True):
    """The times of a mixed job alone, likewise, and the two jobs that are in it."""

    prompts: JobMeasured
    step: JobMeasured
    seconds: Annotated[tuple[_Seconds, ...], Meta(min_length=1)]


class Colocated(Struct, frozen=True, kw_only=True):
    """The median times of a job alone, and with `beside` running all the while."""

    doing: JobMeasured
    beside: JobMeasured
    alone: _Seconds
    seconds: _Seconds


class Stepped(Struct, frozen=True, kw_only=True):
    """The medians of decode steps under the real engine."""

    model: str
    sequences: _Some
    between: _Seconds
    """The seconds from a step's result to the next one's launch."""
    step: _Seconds
    """The seconds from launch to result. The engine hands out no tokens meanwhile."""
    context: _Count
    """The tokens that all sequences had before such a step."""


class PromptedSeconds(Struct, frozen=True, kw_only=True):
    """The engine's own work around a job with prompts, in the median: the seconds before its launch and after
    its result, over those of a decode step."""

    model: str
    between: _ZeroOrMore


class Oversubscribed(Struct, frozen=True, kw_only=True):
    """The median time of a job alone, and with what it loses in the mean while `over` more threads of other
    processes want to run than there are cores, scaled from processes that work for a part of the time."""

    doing: JobMeasured
    over: _Some
    alone: _Seconds
    seconds: _Seconds


class BesideLoop(Struct, frozen=True, kw_only=True):
    """The median times of a job alone, and while the loop's thread of its own process worked for `busy`
    seconds."""

    doing: JobMeasured
    busy: _Seconds
    alone: _Seconds
    seconds: _Seconds


class CpuOverhead(Struct, frozen=True, kw_only=True):
    """CPU seconds of a role's work besides jobs: for each request, for each token of its prompt, for each
    token of the answer, and for each time that such tokens come, however many. The role `engine` is that of
    its loop's thread, without what `Stepped` and `PromptedSeconds` have as `between`."""

    role: Role
    request: _ZeroOrMore
    prompt: _ZeroOrMore
    token: _ZeroOrMore
    turn: _ZeroOrMore


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
    steps: tuple[Stepped, ...]
    prompted: tuple[PromptedSeconds, ...] = ()
    mixed: tuple[TimedMixed, ...] = ()
    oversubscribed: tuple[Oversubscribed, ...] = ()
    beside_loop: tuple[BesideLoop, ...] = ()
    overheads: tuple[CpuOverhead, ...] = ()


class _Versioned(Struct):
    """The keys of a profile of any version."""

    version: int
    computer: msgspec.Raw


def read_profile(file: Path) -> Profile:
    """Raises ConfigError for a file that is cut off, of another version, or no profile."""
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
    strange = {timed.doing.model for timed in profile.jobs} ^ set(profile.shapes)
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

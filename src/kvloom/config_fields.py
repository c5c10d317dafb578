"""What a config's keys may hold, and how a value becomes one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
)

from kvloom.machine import Machine
from kvloom.sizes import parse_seconds, parse_size, show_size
from kvloom.types.request import Level
from kvloom.types.spec import ProgramSpec

Listed = TypeVar("Listed", bound=tuple[object, ...])
Auto = Literal["auto"]
LONGEST_LEASE: Final = 3600.0
SHORTEST_PERIOD, LONGEST_PERIOD = 0.05, 60.0
MOST_LEVELS: Final = 16  # of priority: each report of a load tells them
_PROGRAM: Final = re.compile(r"[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a value is checked against. folder: where relative paths start."""

    folder: Path
    machine: Machine

    @staticmethod
    def of(info: ValidationInfo) -> Surroundings:
        assert isinstance(info.context, Surroundings)
        return info.context


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True
    )


def no_bool(value: Any) -> Any:
    """`yes` is a bool to YAML and 1 to Python."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()!r}; a number is right")
    return value


def _some(value: Listed) -> Listed:
    if not value:
        raise ValueError("[]; at least one is right")
    return value


def _no_null(value: Any) -> Any:
    """A key without a value is not a key left out."""
    if value is None:
        raise ValueError("nothing; a list is right")
    return value


def _memory(value: Any, info: ValidationInfo) -> int | Auto:
    if value == "auto":
        return "auto"
    size, free = parse_size(value), Surroundings.of(info).machine.memory
    if size > free and not Surroundings.of(info).machine.gpus:  # whose memory is seen to by those who use it
        raise ValueError(
            f"{show_size(size)} is more than the {show_size(free)} available here; less, or `auto`, is right"
        )
    return size


def _power_of_two(size: int) -> int:
    if size < 64 or size & (size - 1):
        raise ValueError(f"{size} bytes; a power of two and at least 64 is right, as `16KiB`")
    return size


def _threads(value: Any, info: ValidationInfo) -> int | Auto:
    if value == "auto":
        return "auto"
    cores = Surroundings.of(info).machine.cores
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= cores:
        raise ValueError(f"{str(value)[:40]} of {cores} cores; 1 to {cores}, or `auto`, is right")
    return value


def _lease(value: Any) -> float:
    seconds = parse_seconds(value)
    if not 1 <= seconds <= LONGEST_LEASE:
        raise ValueError(f"{seconds:g} s; 1 s to {LONGEST_LEASE:g} s is right")
    return seconds


def _period(value: Any) -> float:
    seconds = parse_seconds(value)
    if not SHORTEST_PERIOD <= seconds <= LONGEST_PERIOD:
        raise ValueError(f"{seconds:g} s; {SHORTEST_PERIOD:g} s to {LONGEST_PERIOD:g} s is right")
    return seconds


def parse_program(value: Any) -> ProgramSpec:
    """`balanced`, `my_module:my_program`, or a mapping with such a `name` and the program's options. Raises
    ValueError."""
    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or "name" not in settings:
        raise ValueError(f"{_short(value)}; a program's name, or a mapping with `name` and options, is right")
    name, options = settings["name"], {key: settings[key] for key in settings if key != "name"}
    if not isinstance(name, str) or not _PROGRAM.fullmatch(name):
        raise ValueError(f"{_short(name)}; a program's name, or `module:function`, is right")
    for key, option in options.items():
        if not (isinstance(key, str) and key.isidentifier()):
            raise ValueError(f"{_short(key)} is no option's name; letters, digits and _ are right")
        try:
            msgspec.convert({"name": name, "options": {key: option}}, ProgramSpec)
        except msgspec.ValidationError:
            raise ValueError(
                f"{key}: {_short(option)}; a number, a text, a bool or a list of texts is right"
            ) from None
    return ProgramSpec(name, options)


def _priorities(value: Any) -> tuple[Level, ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)}; a mapping of priorities to tokens of headroom is right")
    if len(value) > MOST_LEVELS:
        raise ValueError(f"{len(value)} levels; {MOST_LEVELS} at most are right")
    for priority, headroom in value.items():
        if not _whole(priority, -(1 << 31)):
            raise ValueError(f"{_short(priority)} is no priority; a whole number is right, as `-1`")
        if not _whole(headroom, 1):
            raise ValueError(f"{priority}: {_short(headroom)}; tokens of headroom, at least 1, are right")
    return tuple(Level(priority, headroom) for priority, headroom in sorted(value.items()))


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Size = Annotated[int, BeforeValidator(parse_size)]
BlockSize = Annotated[Size, AfterValidator(_power_of_two)]
Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=1 << 20)]
Part = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)]
Memory = Annotated[int | Auto, PlainValidator(_memory)]
Threads = Annotated[int | Auto, PlainValidator(_threads)]
Seconds = Annotated[float, PlainValidator(_lease)]
Period = Annotated[float, PlainValidator(_period)]
Steps = Annotated[float, BeforeValidator(no_bool), Field(ge=-1e9, le=1e9)]
Program = Annotated[ProgramSpec, PlainValidator(parse_program)]
Priorities = Annotated[tuple[Level, ...], PlainValidator(_priorities)]
Some = AfterValidator(_some)
NoNull = BeforeValidator(_no_null)

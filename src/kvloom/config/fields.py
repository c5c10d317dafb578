"""The values that a config's keys may hold, files of API keys among them, how they are read, and how a wrong
one is told."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from pwd import getpwuid
from typing import Annotated, Any, Final, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails

from kvloom.config.machine import Machine
from kvloom.types.errors import nearest
from kvloom.types.numbers import show_count, show_size
from kvloom.types.request import Level
from kvloom.types.spec import ProgramSpec

_FORM: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)", re.IGNORECASE)
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Returns the bytes that `512MiB`, `2GB`, `0.5g` or `4096` stand for: KiB and its like count in 1024s, KB
    in 1000s. Raises ValueError."""
    found = _FORM.fullmatch(str(text).strip()) if type(text) in (str, int) else None
    if found is None or len(str(text)) > 30:
        raise ValueError(f"{str(text)[:40]!r} is no size; `512MiB`, `2GB` or a number of bytes is right")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def check_collector(url: str) -> str:
    """Returns the address of an OpenTelemetry collector. Raises ValueError if it is none, or if nothing here
    can send to it."""
    right = "http://HOST:4318 is right"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{url[:80]!r}; {right}")
    try:
        there = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        there = None
    if there is None:
        raise ValueError(
            "OpenTelemetry is not installed; `pip install '.[otlp]'` in kvloom's checkout is right"
        )
    return url


def parse_seconds(text: str | int | float) -> float:
    """Returns the seconds that `30s`, `1.5min`, `200ms` or a plain number stand for. Raises ValueError."""
    found = None if isinstance(text, bool) else _SPAN.fullmatch(str(text).strip())
    if found is None or len(str(text)) > 30:
        raise ValueError(f"{str(text)[:40]!r} is no time; `30s`, `2min` or a number of seconds is right")
    number, unit = found.groups()
    return float(number) * _SECONDS[unit.lower()]


_WANTED: Final = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
    "dict_type": "a mapping of keys to values",
    "too_short": "at least one",
    "string_too_short": "a text",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "tuple_type": "a list",
}
_TINY: Final = 1e-6  # a bound so low stands for 0 to people
_SECTIONS: Final = {
    "ModelConfig": "a path, a hub id or a mapping with `path`",
    "UnitConfig": "a mapping with `models`",
    "ReplicasConfig": "a number, or a mapping with `least` and `most`,",
    "ReschedulingConfig": "a mapping with `period`, `out` or `into`, or `none`,",
    "SloConfig": "a mapping with `ttft` or `tpot`",
    "SharesConfig": "a mapping with `prefill`, `decode` or `quota`",
    "NodesConfig": "a mapping with `device` and `gpus`",
    "NodeTlsConfig": "a mapping with `certificate` and `key`",
    "TlsConfig": "a mapping with `certificate` and `key`",
    "DemandConfig": "a mapping with `shape` or `path`",
}
_NEEDED: Final = {
    ("models", "models"): "; at least one `NAME: PATH_OR_HUB_ID` is needed",
    ("units", "models"): "; a list of models' names is needed",
}


def explain(error: ValidationError, root: type[BaseModel], origin: Mapping[str, str]) -> str:
    """Returns what pydantic found wrong as one line: the first error, and how many more there are. A key that
    nobody knows comes before all others, because it may be the reason for them."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    where = [str(part) for part in found[0]["loc"]]
    if where and where[0] in origin:
        where[0] = origin[where[0]]
    key = ".".join(where)
    line = f"{key}: {_reason(found[0], root)}" if key else _reason(found[0], root)
    more = f" (and {show_count(len(found) - 1, 'more error')})" if len(found) > 1 else ""
    return " ".join((line + more).split())


def _reason(error: ErrorDetails, root: type[BaseModel]) -> str:
    kind, where, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(where[-1]), _keys(root, where))}"
    if kind == "missing":
        return "is missing" + _NEEDED.get((str(where[0]), str(where[-1])), "")
    if kind == "model_type":
        return f"{_short(error.get('input'))}; {_SECTIONS.get(context['class_name'], 'a mapping')} is right"
    if kind == "value_error":
        return str(context["error"])
    wanted = _WANTED.get(kind)
    if kind == "greater_than_equal" and 0 < context["ge"] <= _TINY:
        wanted = "more than 0" if float(error["input"]) <= 0 else wanted
    said = f"{wanted.format(**context)} is right" if wanted else error["msg"][0].lower() + error["msg"][1:]
    return f"{_short(error.get('input'))}; {said}"


def _keys(root: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """Returns the keys of the innermost section on the way to the unknown key at `where`."""
    sections = [root]
    for part in where[:-1]:
        fields = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        sections = [inner for field in fields for inner in _sections(field.annotation)] or sections
    return [key for section in sections for key in section.model_fields]


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the sections that an annotation names, at whatever depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


Listed = TypeVar("Listed", bound=tuple[object, ...])
Auto = Literal["auto"]
LONGEST_TIMEOUT: Final = 24 * 3600
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?/?"
)
MOST_LEVELS: Final = 16  # of priority; each report of a load has a figure for each
_REVISION: Final = re.compile(r"[\w][\w./-]{0,199}", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_PROGRAM: Final = re.compile(r"[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The folder and the machine that a value is checked against."""

    folder: Path
    """Relative paths start here."""
    machine: Machine

    @staticmethod
    def of(info: ValidationInfo) -> Surroundings:
        assert isinstance(info.context, Surroundings)
        return info.context


class ConfigSection(BaseModel):
    """One mapping of a config file. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True
    )


def no_bool(value: Any) -> Any:
    """Refuses a bool for a number: `yes` is a bool to YAML and 1 to Python."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()!r}; a number is right")
    return value


def _some(value: Listed) -> Listed:
    if not value:
        raise ValueError("[]; at least one is right")
    return value


def _no_null(value: Any) -> Any:
    """Refuses a key without a value, which is not a key left out."""
    if value is None:
        raise ValueError("nothing; a list is right")
    return value


def _memory(value: Any, info: ValidationInfo) -> int | Auto:
    if value == "auto":
        return "auto"
    size, free = parse_size(value), Surroundings.of(info).machine.memory
    on_gpus = Surroundings.of(info).machine.gpus or str(info.data.get("device")).startswith("cuda")
    if size > free and not on_gpus:  # a GPU's memory is checked by its engine
        raise ValueError(
            f"{show_size(size)} is more than the {show_size(free)} available here; less, or `auto`, is right"
        )
    return size


def _budget(value: Any, info: ValidationInfo) -> int:
    size = _memory(value, info)
    if size == "auto":
        raise ValueError("'auto'; a size for weights and pool together, as `8GiB`, is right")
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


def _seconds(least: float, most: float) -> PlainValidator:
    """Reads a time within bounds."""

    def read(value: Any) -> float:
        seconds = parse_seconds(value)
        if not least <= seconds <= most:
            raise ValueError(f"{seconds:g} s; {least:g} s to {most:g} s is right")
        return seconds

    return PlainValidator(read)


def check_revision(value: Any, path: str) -> str | None:
    """Returns the revision of what lies at `path`. Raises ValueError for what is none, and for a folder's."""
    if value is None:
        return None
    if not isinstance(value, str) or not _REVISION.fullmatch(value) or ".." in value:
        raise ValueError(f"{_short(value)}; a commit, a tag or a branch of the hub is right")
    if path.startswith("/"):
        raise ValueError(
            f"{_short(value)}, but the path is a folder, which has no revisions; a hub id is right"
        )
    return value


def check_sha256(value: Any) -> str | None:
    """Returns the digest in small letters. Raises ValueError for what is none."""
    if value is None:
        return None
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(
            f"{_short(value)}; 64 hexadecimal digits, as `kvloom model digest` prints, are right"
        )
    return value.lower()


def _timeout(value: Any) -> float | None:
    if value is None or value == "none":
        return None
    seconds = parse_seconds(value)
    if not 1 <= seconds <= LONGEST_TIMEOUT:
        raise ValueError(f"{seconds:g} s; 1 s to {LONGEST_TIMEOUT // 3600} h, or `none`, is right")
    return seconds


def _proxies(value: Any) -> tuple[str, ...]:
    """Reads addresses and networks, in the form in which each is compared."""
    return tuple(_network(text) for text in _texts(value, "addresses and networks, as `[10.0.0.0/8]`,"))


def _network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError as error:
        try:
            said = f"{ip_network(text, strict=False)}"
        except ValueError:
            said = "an address or a network, as `10.0.0.0/8`,"
        raise ValueError(f"{_short(text)} is no network; {said} is right") from error


def _origins(value: Any) -> tuple[str, ...]:
    """Reads origins, in the form in which browsers send them (RFC 6454, section 6.2)."""
    return tuple(_origin(text) for text in _texts(value, "origins, as `[https://chat.example.org]`,"))


def _origin(text: str) -> str:
    parts = _ORIGIN.fullmatch(text.strip().lower())
    if text.strip() == "*":
        return "*"
    if parts is None:
        raise ValueError(f"{_short(text)} is no origin; `https://HOST`, `http://HOST:PORT` or `*` is right")
    plain = {"http": "80", "https": "443"}.get(parts["scheme"])
    port = parts["port"]
    return f"{parts['scheme']}://{parts['host']}" + ("" if port in (None, plain) else f":{port}")


def _texts(value: Any, right: str) -> list[str]:
    """Reads a list of texts, or one alone."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f"{_short(value)}; a list of {right} is right")
    return list(texts)


def parse_program(value: Any) -> ProgramSpec:
    """Returns the program that a config names by `balanced`, `my_module:my_program`, or a mapping with such a
    `name` and the program's options. Raises ValueError."""
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
Budget = Annotated[int, PlainValidator(_budget)]
Threads = Annotated[int | Auto, PlainValidator(_threads)]
Seconds = Annotated[float, _seconds(1, 3600)]
LoadSeconds = Annotated[float, _seconds(1, 86400)]  # a download of the weights may be in it
Watchdog = Annotated[float, _seconds(3, 3600)]
NodeLease = Annotated[float, _seconds(5, 3600)]
Period = Annotated[float, _seconds(0.05, 60)]
Steps = Annotated[float, BeforeValidator(no_bool), Field(ge=-1e9, le=1e9)]
ObjectiveSeconds = Annotated[float, _seconds(0.001, 3600)]
Timeout = Annotated[float | None, PlainValidator(_timeout)]
Proxies = Annotated[tuple[str, ...], PlainValidator(_proxies)]
Origins = Annotated[tuple[str, ...], PlainValidator(_origins)]
Program = Annotated[ProgramSpec, PlainValidator(parse_program)]
Revision = Annotated[
    str | None, PlainValidator(lambda value, info: check_revision(value, str(info.data.get("path", ""))))
]
Sha256 = Annotated[str | None, PlainValidator(check_sha256)]
Priorities = Annotated[tuple[Level, ...], PlainValidator(_priorities)]
Some = AfterValidator(_some)
NoNull = BeforeValidator(_no_null)


def told_unread(path: Path | str, error: OSError, right: str) -> str:
    """Returns in one line why a file cannot be read. right: what file would be, if this one is no file."""
    if not isinstance(error, PermissionError):
        return f"{path}: {error.strerror}; {right} is right"
    user = f"the user with uid {(number := os.geteuid())}"
    with suppress(KeyError):  # a user without an entry
        user = f"user {getpwuid(number).pw_name} (uid {number})"
    return f"{path}: {error.strerror}; readable by {user} is right"


_PRIORITY: Final = re.compile(r"priority=([+-]?\d{1,10})")


def read_keys(path: Path) -> frozenset[str]:
    """Returns the keys in the file, without empty lines and lines that start with #. Raises ValueError."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except OSError as error:
        raise ValueError(told_unread(path, error, "a text file with one key a line")) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; one key a line is right") from error
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} holds no key; one key a line is right")
    return keys


def read_api_keys(path: Path) -> dict[str, int | None]:
    """Returns each key with the most urgent priority that its requests may have, which a line tells as
    `KEY priority=-1`; None stands for any priority. Raises ValueError."""
    found: dict[str, int | None] = {}
    for line in sorted(read_keys(path)):
        key, *rest = line.split()
        if key in found:
            raise ValueError(f"{path}: {_shown(key)} stands there twice; one line for each key is right")
        found[key] = _priority(path, key, rest)
    return found


def _shown(key: str) -> str:
    """Names the key by enough of it to find it, and by no more than a quarter."""
    return f"the key {key[: min(4, len(key) // 4)]}…"


def _priority(path: Path, key: str, rest: list[str]) -> int | None:
    if not rest:
        return None
    said = _PRIORITY.fullmatch(" ".join(rest))
    if said is None or not _whole(int(said[1]), -(1 << 31)):
        raise ValueError(f"{path}: {_shown(key)} has more behind it; nothing, or `priority=-1`, is right")
    return int(said[1])

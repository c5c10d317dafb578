"""Workloads in files: our own form, one JSON value a line after a header, and published traces."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvloom.lab.workload.request import Count, Prompts, Segment, WorkloadRequest
from kvloom.lab.workload.spec import VOCAB
from kvloom.types.errors import ConfigError
from kvloom.types.files import replacing

T = TypeVar("T")
Lines = Iterable[tuple[int, bytes]]
Numbered = Iterator[tuple[int, WorkloadRequest]]

VERSION: Final = 1
NAMELESS: Final = "default"  # the model of a trace's requests, which name none
AZURE_HEAD: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens"
BLOCK: Final = 512  # tokens that one of Mooncake's hash ids stands for
LONGEST_LINE: Final = 16 << 20  # bytes
_WIDEST: Final = 1 << 53
RIGHT: Final = "the path of a workload or of a trace"
_FORMS: Final = "a kvloom workload, an Azure CSV or a Mooncake JSONL is right"


class Header(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The first line of our own form."""

    kvloom_workload: Annotated[int, Meta(ge=1)] = msgspec.field()
    name: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    """The seed that the prompts' tokens are drawn with."""
    vocab: Annotated[int, Meta(ge=32, lt=2**31)] = VOCAB
    models: tuple[str, ...] = ()
    """The models that are asked."""
    requests: Annotated[int, Meta(ge=1)] | None = None
    """The number of lines that follow, if it is known."""

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.vocab, self.seed)


@dataclass(frozen=True, slots=True)
class Workload:
    header: Header
    requests: Callable[[], Iterator[WorkloadRequest]]
    """Returns a new stream of the requests, in the order of their times. Reading it raises ConfigError at the
    first bad line."""


def read_workload(path: Path) -> Workload:
    """Reads a file of any of the three forms. Raises ConfigError."""
    first = next(_read_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: is empty; {_FORMS}")
    number, text = first
    if text.removeprefix(b"\xef\xbb\xbf").startswith(AZURE_HEAD):
        return Workload(_nameless(path), lambda: _checked(path, _azure(path, _after(path, number))))
    if text.startswith(b"{") and b'"kvloom_workload"' in text:
        header = _header(path, number, text)
        return Workload(header, lambda: _checked(path, _own(path, _after(path, number), header)))
    if text.startswith(b"{") and b'"hash_ids"' in text:
        return Workload(_nameless(path), lambda: _checked(path, _mooncake(path, _read_lines(path))))
    raise _bad_line(path, number, f"{text[:40].decode('utf-8', 'replace')!r}; {_FORMS}")


def write_workload(path: Path, header: Header, requests: Iterable[WorkloadRequest]) -> int:
    """Writes our own form and returns the number of requests. The file appears when it is complete. Raises
    ConfigError if it cannot be written."""
    encode, count = msgspec.json.Encoder().encode, 0
    try:
        with replacing(path, 0o666) as file:
            space = len(_line(header, _WIDEST))
            file.write(b" " * space)
            for request in requests:
                file.write(encode(request) + b"\n")
                count += 1
            file.seek(0)
            file.write(_line(header, count).rstrip().ljust(space - 1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a path that can be written is right") from error
    return count


def some(path: Path, values: Iterator[T]) -> Iterator[T]:
    """Yields the values. Raises ConfigError if there are none."""
    first = next(values, None)
    if first is None:
        raise ConfigError(f"{path}: asks for nothing; one request at least is right")
    yield first
    yield from values


def _line(header: Header, requests: int) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(header, requests=requests)) + b"\n"


def _nameless(path: Path) -> Header:
    return Header(kvloom_workload=VERSION, name=path.stem, models=(NAMELESS,))


def _header(path: Path, number: int, text: bytes) -> Header:
    header = _decode_line(path, number, text, msgspec.json.Decoder(Header).decode)
    if header.kvloom_workload != VERSION:
        said = f"is a workload of version {header.kvloom_workload}; this kvloom reads version {VERSION}"
        raise _bad_line(path, number, said)
    if len(set(header.models)) < len(header.models):
        raise _bad_line(path, number, "a model stands twice among `models`; each once is right")
    return header


def _own(path: Path, lines: Lines, header: Header) -> Numbered:
    decode, count = msgspec.json.Decoder(WorkloadRequest).decode, 0
    for number, text in lines:
        request = _decode_line(path, number, text, decode)
        if request.model not in header.models:
            raise _bad_line(path, number, f"model `{request.model}` is not among the header's `models`")
        if sum(segment.tokens for segment in request.shared) > request.prompt:
            raise _bad_line(path, number, f"more shared tokens than the prompt's {request.prompt}")
        count += 1
        yield number, request
    if header.requests is not None and count != header.requests:
        raise ConfigError(f"{path}: {count} requests, but its header says {header.requests}; it was cut off")


class MooncakeLine(Struct, frozen=True):
    """A line of Mooncake's release (FAST'25)."""

    timestamp: Annotated[float, Meta(ge=0)]
    """The arrival in milliseconds."""
    input_length: Count
    output_length: Count
    hash_ids: list[int]
    """The ids of the prompt's blocks, one for each BLOCK tokens, of which the last may be cut."""

    @property
    def shared(self) -> tuple[Segment, ...]:
        """The prompt's segments. Raises ValueError if there are more or fewer ids than the prompt has
        blocks."""
        blocks = -(-self.input_length // BLOCK)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids for {self.input_length} tokens; {blocks} are right"
            )
        last = self.input_length - (blocks - 1) * BLOCK
        whole = tuple(Segment(one, BLOCK) for one in self.hash_ids[:-1])
        return (*whole, Segment(self.hash_ids[-1], last))


def _mooncake(path: Path, lines: Lines) -> Numbered:
    decode = msgspec.json.Decoder(MooncakeLine).decode
    for number, text in lines:
        line = _decode_line(path, number, text, decode)
        try:
            shared = line.shared
        except ValueError as error:
            raise _bad_line(path, number, str(error)) from error
        request = WorkloadRequest(
            at=line.timestamp / 1000,
            model=NAMELESS,
            prompt=line.input_length,
            output=line.output_length,
            shared=shared,
        )
        yield number, request


def _azure(path: Path, lines: Lines) -> Numbered:
    """Yields the requests of the Azure Public Dataset's LLM traces; the first one comes at 0. `lines` begins
    after the head."""
    start: datetime.datetime | None = None
    for number, text in lines:
        try:
            stamp, prompt, output = text.decode("ascii").split(",")
            at = datetime.datetime.fromisoformat(stamp)
            start = start or at
            row = {"at": (at - start).total_seconds(), "model": NAMELESS}
            row |= {"prompt": int(prompt), "output": int(output)}
            yield number, msgspec.convert(row, WorkloadRequest)
        except (ValueError, TypeError) as error:  # a time with a zone after one without is a TypeError
            said = f"{text[:60].decode('ascii', 'replace')!r}; {_azure_form(error)}"
            raise _bad_line(path, number, said) from error


def _azure_form(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return "a time, prompt tokens and output tokens are right, as `2023-11-16 18:15:46.68,374,44`"


def _checked(path: Path, requests: Numbered) -> Iterator[WorkloadRequest]:
    """Yields the requests. Raises ConfigError if there are none, or if one comes before the one before it."""
    before = 0.0
    for number, request in some(path, requests):
        if not before <= request.at < float("inf"):
            said = f"comes at {request.at:g} s, after one at {before:g} s; in order is right"
            raise _bad_line(path, number, said)
        before = request.at
        yield request


def _after(path: Path, number: int) -> Iterator[tuple[int, bytes]]:
    return (line for line in _read_lines(path) if line[0] > number)


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields numbered lines without their ends, one at a time. Empty lines are left out. Raises
    ConfigError."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise _bad_line(path, number, f"is longer than {LONGEST_LINE >> 20} MiB")
                if text := line.strip():
                    yield number, text
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {RIGHT} is right") from error


def _decode_line(path: Path, number: int, text: bytes, decode: Callable[[bytes], T]) -> T:
    """Raises ConfigError."""
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise _bad_line(path, number, str(error)) from error


def _bad_line(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(f"{path}: line {number}: {' '.join(problem.split())}")

"""Workloads in files: ours, one JSON value a line, a header first; and traces of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvloom.types.errors import ConfigError
from kvloom.workload.ask import Ask
from kvloom.workload.lines import bad_line, decode_line, read_lines
from kvloom.workload.prompts import Prompts
from kvloom.workload.spec import VOCAB
from kvloom.workload.traces import AZURE_HEAD, NAMELESS, azure_asks, mooncake_asks

T = TypeVar("T")

VERSION: Final = 1
_WIDEST: Final = 1 << 53
_FORMS: Final = "a kvloom workload, an Azure CSV or a Mooncake JSONL is right"


class Header(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The first line. vocab, seed: what the prompts' tokens are drawn with. models: all that are asked.
    requests: how many lines follow, where that is known."""

    kvloom_workload: Annotated[int, Meta(ge=1)] = msgspec.field()
    name: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    vocab: Annotated[int, Meta(ge=32, lt=2**31)] = VOCAB
    models: tuple[str, ...] = ()
    requests: Annotated[int, Meta(ge=1)] | None = None

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.vocab, self.seed)


@dataclass(frozen=True, slots=True)
class Workload:
    """asks: a new stream of them, from the first, in the order of their times. Reading it raises ConfigError
    at the line that cannot be."""

    header: Header
    asks: Callable[[], Iterator[Ask]]


def read_workload(path: Path) -> Workload:
    """Of whichever form. Raises ConfigError."""
    first = next(read_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: is empty; {_FORMS}")
    number, text = first
    if text.removeprefix(b"\xef\xbb\xbf").startswith(AZURE_HEAD):
        return Workload(_nameless(path), lambda: _checked(path, azure_asks(path, _after(path, number))))
    if text.startswith(b"{") and b'"kvloom_workload"' in text:
        header = _header(path, number, text)
        return Workload(header, lambda: _checked(path, _own_asks(path, _after(path, number), header)))
    if text.startswith(b"{") and b'"hash_ids"' in text:
        return Workload(_nameless(path), lambda: _checked(path, mooncake_asks(path, read_lines(path))))
    raise bad_line(path, number, f"{text[:40].decode('utf-8', 'replace')!r}; {_FORMS}")


def write_workload(path: Path, header: Header, asks: Iterable[Ask]) -> int:
    """How many there were. The file appears when it is complete. Raises ConfigError where it cannot be
    written."""
    part = path.with_name(path.name + ".part")
    encode, count = msgspec.json.Encoder().encode, 0
    try:
        with part.open("wb") as file:
            space = len(_line(header, _WIDEST))
            file.write(b" " * space)
            for ask in asks:
                file.write(encode(ask) + b"\n")
                count += 1
            file.seek(0)
            file.write(_line(header, count).rstrip().ljust(space - 1) + b"\n")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a path that can be written is right") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return count


def some(path: Path, asks: Iterator[T]) -> Iterator[T]:
    """The same. Raises ConfigError where there are none."""
    first = next(asks, None)
    if first is None:
        raise ConfigError(f"{path}: asks for nothing; one request at least is right")
    yield first
    yield from asks


def _line(header: Header, requests: int) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(header, requests=requests)) + b"\n"


def _nameless(path: Path) -> Header:
    return Header(kvloom_workload=VERSION, name=path.stem, models=(NAMELESS,))


def _header(path: Path, number: int, text: bytes) -> Header:
    header = decode_line(path, number, text, msgspec.json.Decoder(Header).decode)
    if header.kvloom_workload != VERSION:
        said = f"is a workload of version {header.kvloom_workload}; this kvloom reads version {VERSION}"
        raise bad_line(path, number, said)
    if len(set(header.models)) < len(header.models):
        raise bad_line(path, number, "a model stands twice among `models`; each once is right")
    return header


def _after(path: Path, number: int) -> Iterator[tuple[int, bytes]]:
    return (line for line in read_lines(path) if line[0] > number)


def _own_asks(path: Path, lines: Iterable[tuple[int, bytes]], header: Header) -> Iterator[tuple[int, Ask]]:
    decode, count = msgspec.json.Decoder(Ask).decode, 0
    for number, text in lines:
        ask = decode_line(path, number, text, decode)
        if ask.model not in header.models:
            raise bad_line(path, number, f"model `{ask.model}` is not among the header's `models`")
        if sum(segment.tokens for segment in ask.shared) > ask.prompt:
            raise bad_line(path, number, f"more shared tokens than the prompt's {ask.prompt}")
        count += 1
        yield number, ask
    if header.requests is not None and count != header.requests:
        raise ConfigError(f"{path}: {count} requests, but its header says {header.requests}; it was cut off")


def _checked(path: Path, asks: Iterator[tuple[int, Ask]]) -> Iterator[Ask]:
    """In order, and some."""
    before = 0.0
    for number, ask in some(path, asks):
        if not before <= ask.at < float("inf"):
            said = f"comes at {ask.at:g} s, after one at {before:g} s; in order is right"
            raise bad_line(path, number, said)
        before = ask.at
        yield ask

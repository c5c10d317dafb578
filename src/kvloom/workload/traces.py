"""Published traces as asks. They name no models."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvloom.workload.ask import Ask, Count, Segment
from kvloom.workload.lines import bad_line, decode_line

NAMELESS: Final = "default"  # the model of a trace's asks
AZURE_HEAD: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens"
BLOCK: Final = 512  # tokens that one of Mooncake's hash ids stands for

Lines = Iterable[tuple[int, bytes]]


class MooncakeLine(Struct, frozen=True):
    """timestamp: milliseconds. hash_ids: one for each BLOCK tokens of the prompt, the last one cut."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    @property
    def shared(self) -> tuple[Segment, ...]:
        """Raises ValueError where there are more or fewer ids than the prompt has blocks."""
        blocks = -(-self.input_length // BLOCK)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids for {self.input_length} tokens; {blocks} are right"
            )
        last = self.input_length - (blocks - 1) * BLOCK
        whole = tuple(Segment(one, BLOCK) for one in self.hash_ids[:-1])
        return (*whole, Segment(self.hash_ids[-1], last))


def mooncake_asks(path: Path, lines: Lines) -> Iterator[tuple[int, Ask]]:
    """Of the form of Mooncake's release (FAST'25). Raises ConfigError."""
    decode = msgspec.json.Decoder(MooncakeLine).decode
    for number, text in lines:
        line = decode_line(path, number, text, decode)
        try:
            shared = line.shared
        except ValueError as error:
            raise bad_line(path, number, str(error)) from error
        yield (
            number,
            Ask(
                at=line.timestamp / 1000,
                model=NAMELESS,
                prompt=line.input_length,
                output=line.output_length,
                shared=shared,
            ),
        )


def azure_asks(path: Path, lines: Lines) -> Iterator[tuple[int, Ask]]:
    """Of the form of the Azure Public Dataset's LLM traces; `lines` begins after the head. The first request
    comes at 0. Raises ConfigError."""
    start: datetime.datetime | None = None
    for number, text in lines:
        try:
            stamp, prompt, output = text.decode("ascii").split(",")
            at = datetime.datetime.fromisoformat(stamp)
            start = start or at
            row = {"at": (at - start).total_seconds(), "model": NAMELESS}
            yield number, msgspec.convert({**row, "prompt": int(prompt), "output": int(output)}, Ask)
        except (ValueError, TypeError) as error:  # a time with a zone after one without is a TypeError
            said = f"{text[:60].decode('ascii', 'replace')!r}; {_form(error)}"
            raise bad_line(path, number, said) from error


def _form(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return "a time, prompt tokens and output tokens are right, as `2023-11-16 18:15:46.68,374,44`"

"""Streams that clients resume: the ids of events, and what an id says that its client has.

A stream can be made again exactly, because its tokens follow from its request and its seed. So an id holds
what the request's body does not (the seed that was drawn, the answer's own id and its time), a digest of the
body, and for each choice how much of it the client has. Frames are cut differently at every run, but a
choice's characters, log-probabilities and tool calls are the same, so an id counts these. Any gateway can
answer an id, and nothing is kept for it. The ids are those of server-sent events (WHATWG HTML, section 9.2,
`id` and `Last-Event-ID`).
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from secrets import randbits
from struct import Struct
from time import time
from typing import Final
from zlib import crc32

from kvloom.types.errors import BadRequest

HEADER: Final = "Last-Event-ID"
MAX_CHOICES: Final = 128
"""The choices, over all prompts, of a stream whose events have ids: each id tells of all of them."""
MAX_LENGTH: Final = 8 << 10
_FORM: Final = b"kvloom.1"  # of ids; an id of another form has another digest
_HEAD: Final = Struct(">16sQI8s")  # the answer's id, the seed, the time in seconds, the digest
_NUMBER: Final = "([0-9a-f]{1,8})"
_CHOICE: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}(z?)", re.ASCII)
_ID: Final = re.compile(r"([A-Za-z0-9_-]{48})\.(done|[0-9a-fz.,]*)", re.ASCII)
_PROMPT_STRIDE: Final = 0x9E3779B97F4A7C15  # odd, and not the stride of a prompt's choices


@dataclass(slots=True)
class Position:
    """How much of a choice there is: characters of its text with their CRC-32, log-probabilities of tokens,
    and tool calls."""

    text: int = 0
    tokens: int = 0
    calls: int = 0
    check: int = 0
    ended: bool = False
    """Whether the reason for its end is told too."""

    @property
    def written(self) -> bytes:
        end = b"z" if self.ended else b""
        return b"%x.%x.%x.%x%b" % (self.text, self.tokens, self.calls, self.check, end)


class ChoiceIds:
    """One choice of a stream whose events have ids: what its client has of it, and what of that has yet to
    come again."""

    def __init__(self, told: Position | None) -> None:
        """told: None if the client has nothing of the choice."""
        self.begun = told is not None
        """Whether the client has an event of the choice."""
        self.ended = told is not None and told.ended
        self.written = b"" if told is None else told.written
        self._told = told or Position()
        self._left = replace(self._told)
        self._check = 0  # of the text that has come again

    def unseen(self, text: str, tokens: int, calls: int, *, ended: bool) -> tuple[str, int, int]:
        """Returns what the client does not have of a piece with this text and so many log-probabilities and
        calls: the rest of the text, and how many of the two others to leave out from the beginning. ended:
        whether it is the choice's last piece. Raises BadRequest if the stream is not the one that the client
        has the beginning of."""
        left = self._left
        known = text[: left.text]
        if known:
            left.text -= len(known)
            self._check = crc32(known.encode(), self._check)
            if not left.text and self._check != self._told.check:
                raise _bad("the model gives another answer now than the one that the id is of")
        known_tokens, known_calls = min(tokens, left.tokens), min(calls, left.calls)
        left.tokens -= known_tokens
        left.calls -= known_calls
        if ended and (left.text or left.tokens or left.calls):
            raise _bad("the answer ends before the event of this id")
        if self.ended and (len(text), tokens, calls) != (len(known), known_tokens, known_calls):
            raise _bad("the answer goes on after the end that the id tells of")
        return text[len(known) :], known_tokens, known_calls

    def tell(self, text: str, tokens: int, calls: int, *, ended: bool) -> None:
        """Notes what an event tells the client."""
        told = self._told
        if text:
            told.text += len(text)
            told.check = crc32(text.encode(), told.check)
        told.tokens += tokens
        told.calls += calls
        told.ended = self.ended = ended
        self.begun = True
        self.written = told.written


class EventIds:
    """The ids of one stream's events."""

    def __init__(self, head: bytes, told: Sequence[Position | None], *, done: bool) -> None:
        """told: what the client has of each choice."""
        self.choices = [ChoiceIds(one) for one in told]
        self.done = done
        """Whether the client has all but the stream's end."""
        self._head = b"id: " + head + b"."

    @property
    def over(self) -> bool:
        """Whether the client has all choices to their ends."""
        return all(choice.ended for choice in self.choices)

    def line(self, index: int, text: str, tokens: int, calls: int, ended: bool) -> bytes:
        """Returns the line with the id of an event that tells the client this of choice `index`."""
        self.choices[index].tell(text, tokens, calls, ended=ended)
        return self._head + b",".join([choice.written for choice in self.choices]) + b"\n"

    @property
    def last_line(self) -> bytes:
        """Returns the line with the id of the event after which nothing but the stream's end comes."""
        return self._head + b"done\n"


@dataclass(frozen=True, slots=True)
class Origin:
    """Holds what of an answer follows from nothing in its request's body: it is drawn when that is first
    asked for, and read from the id when a stream of it is resumed."""

    answer: int = field(default_factory=lambda: randbits(128))
    """The number in the answer's id."""
    seed: int = field(default_factory=lambda: randbits(63))
    """The seed of the first prompt, if the body gives none."""
    created: int = field(default_factory=lambda: int(time()))
    """The time at which the answer was created, in seconds since 1970."""
    digest: bytes | None = None
    """The digest of the request, if its stream's events are to have ids."""
    told: tuple[Position | None, ...] | None = None
    """The part of each choice that the client has; None if the stream begins."""
    done: bool = False
    """Whether the client has all but the stream's end."""

    @classmethod
    def of(cls, path: str, body: bytes, last: str) -> Origin:
        """Returns the origin of a stream whose events have ids. last: the last id that the client has, empty
        for a stream that begins. Raises BadRequest if `last` is no id of this request's stream."""
        digest = blake2b(path.encode() + b"\n" + body, digest_size=8, key=_FORM).digest()
        if not last:
            return cls(digest=digest)
        found = _ID.fullmatch(last) if len(last) <= MAX_LENGTH else None
        if found is None:
            raise _bad("it is no id of an event of this server; send one as it came, or none")
        answer, seed, created, asked = _HEAD.unpack(urlsafe_b64decode(found[1]))
        if asked != digest:
            raise _bad("the id is of another request; send the same path and the same body, byte for byte")
        done = found[2] == "done"
        told = None if done else tuple(_position(one) for one in found[2].split(","))
        return cls(int.from_bytes(answer, "big"), seed % 2**63, created, digest, told, done)

    def seed_of(self, prompt: int) -> int:
        """Returns the seed that is drawn for prompt number `prompt`."""
        return (self.seed + prompt * _PROMPT_STRIDE) % 2**63

    @property
    def number(self) -> str:
        """Returns the number in the answer's id, as it is written."""
        return f"{self.answer:032x}"

    def answer_id(self, prefix: str) -> str:
        return f"{prefix}-{self.number}"

    def request_id(self, prefix: str) -> str:
        """Returns the id by which engines know the request. A stream that is resumed has another than the
        answer's: the first may still run, and a client may write any answer's id."""
        return self.answer_id(prefix) if self.told is None else f"{prefix}-{randbits(128):032x}"

    def ids(self, choices: int) -> EventIds | None:
        """Returns the ids of a stream of so many choices, over all prompts; None if its events have none.
        Raises BadRequest."""
        if self.digest is None:
            return None
        if choices > MAX_CHOICES:
            said = f"events have ids in streams of at most {MAX_CHOICES} choices, and this has {choices}"
            raise BadRequest(said, param="stream_options.include_event_ids")
        if self.told is not None and len(self.told) != choices:
            raise _bad(f"the id tells of {len(self.told)} choices, and the request has {choices}")
        packed = _HEAD.pack(self.answer.to_bytes(16, "big"), self.seed, self.created, self.digest)
        return EventIds(urlsafe_b64encode(packed), self.told or [None] * choices, done=self.done)


def _position(written: str) -> Position | None:
    if not written:
        return None
    found = _CHOICE.fullmatch(written)
    if found is None:
        raise _bad("it is no id of an event of this server; send one as it came, or none")
    text, tokens, calls, check = (int(found[at], 16) for at in range(1, 5))
    return Position(text, tokens, calls, check, bool(found[5]))


def _bad(why: str) -> BadRequest:
    return BadRequest(f"{HEADER}: {why}", param=HEADER)

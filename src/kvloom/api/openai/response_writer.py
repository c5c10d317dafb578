"""Writes answers of /v1/responses: from pieces of text to items, whole or as events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvloom.api.answers.calls import Kind, Part
from kvloom.api.bodies import Account
from kvloom.api.generation.answering import Writer, encode
from kvloom.api.generation.chat import Readers
from kvloom.api.generation.pieces import Piece
from kvloom.api.generation.resume import Origin
from kvloom.api.schemas.chat import ChatBody
from kvloom.types.errors import KvloomError

PREFIX: Final = "resp"
STREAMED_BYTES: Final = 64
"""The bytes of a token in an answer that is streamed: its text is kept, because the last event has all of
it."""


@dataclass(slots=True)
class Hold:
    """Counts what the answer holds of this process's memory beside its generation."""

    account: Account
    first: int
    """Bytes of the request that it keeps, which count from the answer's first piece."""

    def add(self, count: int) -> None:
        """Raises Unavailable."""
        self.account.add(self.first + count)
        self.first = 0


_DELTAS: Final = {
    Kind.TEXT: "output_text",
    Kind.THOUGHT: "reasoning_text",
    Kind.CALL: "function_call_arguments",
}
"""The events that tell of an item's text, by what began the item."""


@dataclass(slots=True)
class _Output:
    """An item of the answer, to which parts are added while they are of its kind."""

    kind: Kind
    at: int
    head: dict[str, Any]
    status: str = "in_progress"
    text: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Returns the item's fields that tell the place of its text in the answer."""
        place = {"item_id": self.head["id"], "output_index": self.at}
        return place if self.kind is Kind.CALL else place | {"content_index": 0}

    @property
    def extra(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind is Kind.TEXT else {}

    @property
    def said(self) -> str:
        return "".join(self.text)

    @property
    def part(self) -> dict[str, Any]:
        part = {"type": _DELTAS[self.kind], "text": self.said} | self.extra
        return part | {"annotations": []} if self.kind is Kind.TEXT else part

    @property
    def whole(self) -> dict[str, Any]:
        if self.kind is Kind.CALL:
            return self.head | {"arguments": self.said, "status": self.status}
        return self.head | {"content": [self.part] if self.text else [], "status": self.status}


_FAILURES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponseWriter(Writer):
    """Writes the one choice of an answer."""

    kind = chunk_kind = "response"

    def __init__(
        self,
        origin: Origin,
        chat: ChatBody,
        echo: dict[str, Any],
        readers: Readers,
        hold: Hold,
        keep: Callable[[str, bytes], None] | None,
    ) -> None:
        """echo: what the answer says of its request; keep: keeps the whole answer under its id."""
        super().__init__(PREFIX, origin, chat, 1)
        self.answer_id = f"{PREFIX}_{self._number}"
        self._echo = {"id": self.answer_id, "object": "response", "created_at": origin.created} | echo
        self._reader, self._hold, self._keep = readers(), hold, keep
        self._output: list[_Output] = []
        self._told = 0  # events
        self._status = "in_progress"
        self._unread = 0  # tokens of which no part has come yet
        self._thought = 0  # tokens

    def chunk(self, at: int, piece: Piece) -> bytes:
        self._hold.add(STREAMED_BYTES * len(piece.tokens))
        events = list[bytes]()
        if not self._told:
            begun = self._response()
            events = [
                self._event(kind, response=begun) for kind in ("response.created", "response.in_progress")
            ]
        for part in self._read(piece):
            if part.begins(self._open):
                events += [self._ended("completed"), self._begun(part)]
            if part.kind is not Kind.CALL:
                item = self._output[-1]
                item.text.append(part.text)
                kind = f"response.{_DELTAS[item.kind]}.delta"
                events.append(self._event(kind, **item.place, delta=part.text, **item.extra))
        return b"".join(events)

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        ended = self._ended(self._status)
        whole = self.answer(usage)
        return ended + self._event(f"response.{self._status}", response=msgspec.Raw(whole))

    def failed(self, error: KvloomError) -> bytes:
        """Returns the event that tells that the answer has failed."""
        self._status = "failed"
        code = _FAILURES.get(error.status, "server_error")
        told = {"code": code, "message": error.message}
        return self._event("response.failed", response=self._response() | {"error": told})

    def add(self, at: int, piece: Piece) -> None:
        self._hold.add(0)
        for part in self._read(piece):
            if part.begins(self._open):
                self._begin(part)
            if part.kind is not Kind.CALL:
                self._output[-1].text.append(part.text)

    def answer(self, usage: dict[str, Any]) -> bytes:
        for item in self._output:
            item.status = "completed" if item is not self._output[-1] else self._status
        whole = encode(self._response(self._usage(usage)))
        if self._keep is not None:
            self._keep(self.answer_id, whole)
        return whole

    def _read(self, piece: Piece) -> list[Part]:
        parts = self._reader.take(piece.text, last=piece.finish is not None)
        if piece.finish is not None:
            self._status = "incomplete" if piece.finish == "length" else "completed"
        self._unread += len(piece.tokens)
        if parts:
            thought = sum(len(part.text) for part in parts if part.kind is Kind.THOUGHT)
            said = sum(len(part.text) for part in parts)
            self._thought += round(self._unread * thought / max(said, 1))
            self._unread = 0
        return parts

    @property
    def _open(self) -> Kind | None:
        """Returns what began the last item, if there is one."""
        return self._output[-1].kind if self._output else None

    def _begin(self, part: Part) -> _Output:
        at = len(self._output)
        number = f"{self._number}_{at}"
        head: dict[str, Any]
        match part.kind:
            case Kind.THOUGHT:
                head = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
            case Kind.TEXT:
                head = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            case _:
                called = {"call_id": f"call_{self._number}_{part.call}", "name": part.text}
                head = {"id": f"fc_{number}", "type": "function_call"} | called
        self._output.append(_Output(part.kind, at, head))
        return self._output[-1]

    def _begun(self, part: Part) -> bytes:
        """Begins an item, and returns the events that say so."""
        item = self._begin(part)
        events = self._event("response.output_item.added", output_index=item.at, item=item.whole)
        if item.kind is not Kind.CALL:
            events += self._event("response.content_part.added", **item.place, part=item.part)
        return events

    def _ended(self, status: str) -> bytes:
        """Ends the last item, if there is one, and returns the events that say so."""
        if not self._output:
            return b""
        item = self._output[-1]
        item.status = status
        kind = f"response.{_DELTAS[item.kind]}.done"
        if item.kind is Kind.CALL:
            events = self._event(kind, **item.place, name=item.head["name"], arguments=item.said)
        else:
            events = self._event(kind, **item.place, text=item.said, **item.extra)
            events += self._event("response.content_part.done", **item.place, part=item.part)
        return events + self._event("response.output_item.done", output_index=item.at, item=item.whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._told = self._told, self._told + 1
        event = {"type": kind, "sequence_number": number} | fields
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))

    def _response(self, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._echo | {
            "status": self._status,
            "error": None,
            "incomplete_details": reason,
            "output": [item.whole for item in self._output],
            "usage": usage,
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": usage["total_tokens"],
        }

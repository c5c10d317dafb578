"""/v1/messages and /v1/messages/count_tokens: from Anthropic's messages to a chat, and from pieces of text to
content blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.access.tenants import access_of
from kvloom.api.answers.calls import Kind, Part
from kvloom.api.answers.values import arguments_object
from kvloom.api.bodies import parse, translated
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import json_answer, messages_error
from kvloom.api.generation.answering import Answering, EndpointContext, Writer, encode
from kvloom.api.generation.chat import Readers, chat_generation, offered, prompt_of, switches
from kvloom.api.generation.pieces import Generation, Piece
from kvloom.api.generation.resume import Origin
from kvloom.api.metrics import Watch
from kvloom.api.schemas.chat import ChatBody
from kvloom.api.schemas.messages import CountBody, MessagesBody, PromptBody
from kvloom.api.stream import EventForm, while_connected
from kvloom.types.errors import KvloomError

PREFIX: Final = "msg"
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind} | fields))


def _error_event(error: KvloomError) -> bytes:
    return b"event: error\ndata: " + encode(messages_error(error)) + b"\n\n"


EVENTS: Final = EventForm(last=b"", error=_error_event)


def _read(form: type[PromptBody], raw: bytes) -> ChatBody:
    """Returns the request as a chat. Raises BadRequest."""
    return translated(parse(form, raw).chat)


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    gateway: EndpointContext

    async def __call__(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(_read, MessagesBody), self._prepare, EVENTS)

    async def count(self, request: Request) -> Response:
        body = await self.gateway.read_form(request, partial(_read, CountBody))
        access = access_of(request.scope)
        model = await self.gateway.catalog.get(body.model, access.may_use)
        prompt = prompt_of(model, body.messages, offered(body), switches(body, model), bounded=False)
        tokens = await while_connected(request.receive, model.tokens(prompt, access.tenant))
        return json_answer({"input_tokens": len(tokens)})

    async def _prepare(
        self, body: ChatBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        generation, readers = await chat_generation(body, model, tenant, origin, PREFIX, capped=True)
        return Answering(self.gateway, MessageWriter(origin, body, generation, readers), [generation], watch)


@dataclass(slots=True)
class _Block:
    """A content block to which parts are added while they are of its kind."""

    kind: Kind
    head: dict[str, Any]
    text: list[str] = field(default_factory=list)

    @property
    def whole(self) -> dict[str, Any]:
        text = "".join(self.text)
        match self.kind:
            case Kind.THOUGHT:
                return self.head | {"thinking": text}
            case Kind.TEXT:
                return self.head | {"text": text}
            case _:
                return self.head | {"input": arguments_object(text)}


_DELTAS: Final = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.THOUGHT: ("thinking_delta", "thinking"),
    Kind.ARGUMENTS: ("input_json_delta", "partial_json"),
}


class MessageWriter(Writer):
    """Writes the one choice of a message."""

    kind = chunk_kind = "message"

    def __init__(self, origin: Origin, body: ChatBody, generation: Generation, readers: Readers) -> None:
        super().__init__(PREFIX, origin, body, 1)
        self._model = body.model
        self._prompt = len(generation.body.prompt)
        asked = body.max_tokens
        self._capped = asked is not None and generation.body.sampling.max_tokens < asked
        self._reader = readers()
        self._blocks: list[_Block] = []
        self._started = False
        self._reason: str | None = None
        self._stop: str | None = None

    def chunk(self, at: int, piece: Piece) -> bytes:
        events = list[bytes]()
        if not self._started:
            self._started = True
            events.append(_event("message_start", message=self._message([], self._usage(self._prompt, 0))))
        for part in self._read(piece):
            if part.begins(self._open):
                events += [self._ended(), self._begun(part)]
            if part.kind in _DELTAS:
                kind, name = _DELTAS[part.kind]
                self._blocks[-1].text.append(part.text)
                delta = {"type": kind, name: part.text}
                events.append(_event("content_block_delta", index=len(self._blocks) - 1, delta=delta))
        return b"".join(events)

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        told = _event("message_delta", delta=delta, usage=self._told(usage))
        return self._ended() + told + _event("message_stop")

    def add(self, at: int, piece: Piece) -> None:
        for part in self._read(piece):
            if part.begins(self._open):
                self._begun(part)
            if part.kind is not Kind.CALL:
                self._blocks[-1].text.append(part.text)

    def answer(self, usage: dict[str, Any]) -> bytes:
        return encode(self._message([block.whole for block in self._blocks], self._told(usage)))

    def _read(self, piece: Piece) -> list[Part]:
        parts = self._reader.take(piece.text, last=piece.finish is not None)
        if piece.finish is not None:
            self._stop = piece.stop
            self._reason = "stop_sequence" if piece.stop else _REASONS[piece.finish]
            if self._reader.calls and piece.finish == "stop" and not piece.stop:
                self._reason = "tool_use"
            if self._capped and piece.finish == "length":
                self._reason = "model_context_window_exceeded"
        return parts

    @property
    def _open(self) -> Kind | None:
        """Returns the last block's kind, if there is one."""
        return self._blocks[-1].kind if self._blocks else None

    def _begun(self, part: Part) -> bytes:
        """Begins a block, and returns the event that says so."""
        head: dict[str, Any]
        empty: dict[str, Any]
        match part.kind:
            case Kind.THOUGHT:
                head, empty = {"type": "thinking", "signature": ""}, {"thinking": ""}
            case Kind.TEXT:
                head, empty = {"type": "text"}, {"text": ""}
            case _:
                head, empty = self._tool_use(part), {"input": {}}
        self._blocks.append(_Block(part.kind, head))
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=head | empty)

    def _ended(self) -> bytes:
        """Returns the event that ends the last block, if there is one."""
        return _event("content_block_stop", index=len(self._blocks) - 1) if self._blocks else b""

    def _tool_use(self, part: Part) -> dict[str, Any]:
        number = f"toolu_{self._number}_{part.call}"
        return {"type": "tool_use", "id": number, "name": part.text}

    def _message(self, blocks: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": usage,
        }

    def _told(self, usage: dict[str, Any]) -> dict[str, int]:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return self._usage(usage["prompt_tokens"] - cached, usage["completion_tokens"], cached)

    def _usage(self, prompt: int, output: int, cached: int = 0) -> dict[str, int]:
        """Returns the counts. As at Anthropic, what was found cached is not among the input."""
        return {
            "input_tokens": prompt,
            "output_tokens": output,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }

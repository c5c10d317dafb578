"""/v1/messages and /v1/messages/count_tokens: from Anthropic's messages to a chat, and from pieces of text to
content blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.access.tenants import access_of
from kvloom.api.bodies import bad_parameter, parse, read_form
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import json_answer, messages_error
from kvloom.api.metrics import Watch
from kvloom.api.openai.chat import chat_generation, offered, prompt_of
from kvloom.api.openai.generation import Answering, EndpointContext, Generation, Piece, Writer, encode
from kvloom.api.openai.resume import Origin
from kvloom.api.schemas.chat import ChatBody
from kvloom.api.schemas.messages import CountBody, MessagesBody, PromptBody
from kvloom.api.stream import EventForm, while_connected
from kvloom.api.tools import Family, ToolCall, ToolParser
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
    body = parse(form, raw)
    try:
        return body.chat()
    except ValidationError as error:
        raise bad_parameter(error) from None


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    gateway: EndpointContext

    async def __call__(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(_read, MessagesBody), self._prepare, EVENTS)

    async def count(self, request: Request) -> Response:
        body, access = await read_form(request, partial(_read, CountBody)), access_of(request.scope)
        model = await self.gateway.catalog.get(body.model, access.may_use)
        prompt = prompt_of(model, body.messages, offered(body), body.chat_template_kwargs or {})
        tokens = await while_connected(request.receive, model.tokens(prompt, access.tenant))
        return json_answer({"input_tokens": len(tokens)})

    async def _prepare(
        self, body: ChatBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        generation, family = await chat_generation(body, model, tenant, origin, PREFIX)
        return Answering(self.gateway, MessageWriter(origin, body, generation, family), [generation], watch)


@dataclass(slots=True)
class _Content:
    """The content blocks up to now. A block of text is open from its first piece until a call comes."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.text)

    def close(self) -> None:
        self.blocks.append({"type": "text", "text": "".join(self.text)})
        self.text = []


class MessageWriter(Writer):
    """Writes the one choice of a message."""

    kind = chunk_kind = "message"

    def __init__(self, origin: Origin, body: ChatBody, generation: Generation, family: Family | None) -> None:
        super().__init__(PREFIX, origin, body, 1)
        self._model = body.model
        self._prompt = len(generation.body.prompt)
        self._parser = ToolParser(family) if family else None
        self._content = _Content()
        self._begun = self._called = False
        self._reason: str | None = None
        self._stop: str | None = None

    def chunk(self, at: int, piece: Piece) -> bytes:
        content, events = self._content, list[bytes]()
        if not self._begun:
            self._begun = True
            events.append(_event("message_start", message=self._message([], self._usage(self._prompt, 0))))
        text, calls = self._read(piece)
        if text:
            if not content.open:
                begun = {"type": "text", "text": ""}
                events.append(_event("content_block_start", index=self._place, content_block=begun))
            content.text.append(text)
            delta = {"type": "text_delta", "text": text}
            events.append(_event("content_block_delta", index=self._place, delta=delta))
        for call in calls:
            events.append(self._closed())
            block, place = self._tool_use(call), self._place
            events.append(_event("content_block_start", index=place, content_block=block | {"input": {}}))
            delta = {"type": "input_json_delta", "partial_json": encode(block["input"]).decode()}
            events.append(_event("content_block_delta", index=place, delta=delta))
            events.append(_event("content_block_stop", index=place))
            content.blocks.append(block)
        return b"".join(events)

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        told = _event("message_delta", delta=delta, usage=self._told(usage))
        return self._closed() + told + _event("message_stop")

    def add(self, at: int, piece: Piece) -> None:
        text, calls = self._read(piece)
        if text:
            self._content.text.append(text)
        for call in calls:
            self._closed()
            self._content.blocks.append(self._tool_use(call))

    def answer(self, usage: dict[str, Any]) -> bytes:
        self._closed()
        return encode(self._message(self._content.blocks, self._told(usage)))

    @property
    def _place(self) -> int:
        return len(self._content.blocks)

    def _closed(self) -> bytes:
        """Closes the block of text, if one is open, and returns the event that says so."""
        if not self._content.open:
            return b""
        event = _event("content_block_stop", index=self._place)
        self._content.close()
        return event

    def _read(self, piece: Piece) -> tuple[str, list[ToolCall]]:
        """Returns the piece's text without the calls in it, and the calls."""
        text, calls = piece.text, list[ToolCall]()
        if self._parser is not None:
            text, calls = self._parser.take(text, last=piece.finish is not None)
        self._called = self._called or bool(calls)
        if piece.finish is not None:
            self._stop = piece.stop
            self._reason = "stop_sequence" if piece.stop else _REASONS[piece.finish]
            if self._called and piece.finish == "stop" and not piece.stop:
                self._reason = "tool_use"
        return text, calls

    def _tool_use(self, call: ToolCall) -> dict[str, Any]:
        number = f"toolu_{self.answer_id.partition('-')[2]}_{self._place}"
        try:
            given = json.loads(call.arguments)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):  # the model's own mistake, which the client is to see
            given = {"arguments": call.arguments}
        return {"type": "tool_use", "id": number, "name": call.name, "input": given}

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

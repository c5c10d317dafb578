"""/v1/chat/completions: from pieces of text to messages, deltas and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvloom.api.catalog import ServedModel
from kvloom.api.generation import Piece
from kvloom.api.openai.sampling import chat_logprobs
from kvloom.api.openai.schemas_chat import ChatBody
from kvloom.api.openai.tools import Family, ToolCall, ToolParser

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Written:
    """One choice of the answer so far."""

    parser: ToolParser | None
    greeted: bool = False
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class ChatWriter:
    """Writes the one generation of a chat request; its choices are the generation's."""

    def __init__(
        self, request_id: str, created: int, model: ServedModel, body: ChatBody, family: Family | None
    ) -> None:
        self._id = request_id
        self._head = {"id": request_id, "created": created, "model": model.card.name}
        self._tokenizer = model.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._wants_usage = body.wants_usage
        self._choices = [_Written(ToolParser(family) if family else None) for _ in range(body.choices)]
        chunk = _encode({**self._head, "object": "chat.completion.chunk"})
        self._open = b"data: " + chunk[:-1] + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if self._wants_usage else b"}]}\n\n"

    def chunk(self, at: int, piece: Piece) -> bytes:
        choice = self._choices[piece.choice]
        text, calls = self._read(choice, piece)
        out = b""
        if not choice.greeted:
            choice.greeted = True
            out = self._event(piece.choice, b'{"role":"assistant","content":""}')
        if self._top is not None and piece.tokens:
            content = {"content": chat_logprobs(piece.tokens, self._tokenizer, self._top), "refusal": None}
            out += self._event(piece.choice, b'{"content":%b}' % _encode(text), logprobs=_encode(content))
        elif text:
            out += self._event(piece.choice, b'{"content":%b}' % _encode(text))
        for number, call in enumerate(calls, len(choice.calls) - len(calls)):
            delta = _encode({"tool_calls": [{"index": number, **call}]})
            out += self._event(piece.choice, delta)
        if choice.finish is not None:
            out += self._event(piece.choice, b"{}", finish=_encode(choice.finish))
        return out

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        if not self._wants_usage:
            return b""
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        return b"data: " + _encode(chunk) + b"\n\n"

    def add(self, at: int, piece: Piece) -> None:
        choice = self._choices[piece.choice]
        choice.text.append(self._read(choice, piece)[0])
        if self._top is not None:
            choice.logprobs += chat_logprobs(piece.tokens, self._tokenizer, self._top)

    def answer(self, usage: dict[str, Any]) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return _encode({**self._head, "object": "chat.completion", "choices": choices, "usage": usage})

    def _read(self, choice: _Written, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """The piece's text without the calls in it, and the calls."""
        text, calls = piece.text, list[ToolCall]()
        if choice.parser is not None:
            text, calls = choice.parser.push(text)
            if piece.finish is not None:
                rest, more = choice.parser.end()
                text, calls = text + rest, calls + more
        written = []
        for call in calls:
            written.append(self._call(call))
            choice.calls.append(written[-1])
        if piece.finish is not None:
            choice.finish = "tool_calls" if choice.calls and piece.finish == "stop" else piece.finish
        return text, written

    def _call(self, call: ToolCall) -> dict[str, Any]:
        number = sum(len(choice.calls) for choice in self._choices)
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self._id.partition('-')[2]}_{number}", "type": "function", "function": function}

    def _event(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._open,
            index,
            delta,
            logprobs,
            finish,
            self._close,
        )

    def _whole(self, index: int, choice: _Written) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = choice.calls
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._top is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": choice.finish,
        }

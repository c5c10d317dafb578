"""/v1/chat/completions: from pieces of text to messages, deltas and calls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.answers.calls import Kind, Part, Said
from kvloom.api.answers.reader import AnswerReader
from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.generation.answering import Answering, EndpointContext, Writer, encode
from kvloom.api.generation.chat import Readers, chat_generation
from kvloom.api.generation.pieces import Piece
from kvloom.api.generation.resume import ChoiceIds, Origin
from kvloom.api.generation.sampling import chat_logprobs
from kvloom.api.metrics import Watch
from kvloom.api.schemas.chat import ChatBody

PREFIX: Final = "chatcmpl"
_Told = tuple[str, int, int, bool]  # text, log-probabilities, calls, and whether it is the end
_NOTHING: Final[_Told] = "", 0, 0, False
_CALL: Final[_Told] = "", 0, 1, False
_END: Final[_Told] = "", 0, 0, True


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    gateway: EndpointContext

    async def __call__(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(parse, ChatBody), self._prepare)

    async def _prepare(
        self, body: ChatBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        generation, readers = await chat_generation(body, model, tenant, origin, PREFIX)
        writer = ChatWriter(origin, model, body, readers)
        return Answering(self.gateway, writer, [generation], watch)


@dataclass(slots=True)
class _WrittenChat:
    """The parts of one choice of the answer that have been written."""

    reader: AnswerReader
    greeted: bool = False
    said: Said = field(default_factory=Said)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    finish: str | None = None


class ChatWriter(Writer):
    """Writes the one generation of a chat request; its choices are the generation's."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, origin: Origin, model: ServedModel, body: ChatBody, readers: Readers) -> None:
        super().__init__(PREFIX, origin, body, body.choices)
        self._tokenizer = model.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        whole = self._ids is not None  # an id tells how many calls there are
        self._choices = [_WrittenChat(readers(whole_calls=whole)) for _ in range(body.choices)]
        self._open = b"data: " + encode(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if self._wants_usage else b"}]}\n\n"

    def chunk(self, at: int, piece: Piece) -> bytes:
        choice, last = self._choices[piece.choice], piece.finish is not None
        # nearly every piece of a stream is text alone, and takes the short way
        plain = choice.reader.plain and self._ids is None and not last
        parts = [] if plain else choice.reader.take(piece.text, last=last)
        finish = reason_of(piece, choice.reader) if last else None
        tokens = [] if self._top is None else piece.tokens
        greeted, choice.greeted = choice.greeted, True
        if self._ids is not None:
            had = self._ids.choices[piece.choice]
            greeted, finish = had.begun, None if had.ended else finish
            parts, skipped = _unseen(had, parts, len(tokens), last=last)
            tokens = tokens[skipped:]
        # of each event its delta, log-probabilities and finish, and what it tells for its id
        events: list[tuple[bytes, bytes, bytes, _Told]] = []
        if not greeted:
            events.append((b'{"role":"assistant","content":""}', b"null", b"null", _NOTHING))
        if not plain:
            deltas = self._deltas(piece.choice, parts)
        else:
            told = piece.text, 0, 0, False
            deltas = [(b'{"content":%b}' % encode(piece.text), told)] if piece.text else []
        if tokens and self._top is not None:
            content = {"content": chat_logprobs(tokens, self._tokenizer, self._top), "refusal": None}
            delta, (text, _, calls, end) = deltas[0] if deltas else (b'{"content":""}', _NOTHING)
            events.append((delta, encode(content), b"null", (text, len(tokens), calls, end)))
            deltas = deltas[1:]
        events += [(delta, b"null", b"null", told) for delta, told in deltas]
        if finish is not None:
            events.append((b"{}", b"null", encode(finish), _END))
        ids, at = self._ids, piece.choice
        form = b'%b%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b'
        return b"".join(
            [
                form
                % (
                    b"" if ids is None else ids.line(at, *told),
                    self._open,
                    at,
                    delta,
                    known,
                    end,
                    self._close,
                )
                for delta, known, end, told in events
            ]
        )

    def add(self, at: int, piece: Piece) -> None:
        choice, last = self._choices[piece.choice], piece.finish is not None
        choice.said.add(choice.reader.take(piece.text, last=last))
        if last:
            choice.finish = reason_of(piece, choice.reader)
        if self._top is not None:
            # As text they take a sixth of the memory.
            entries = chat_logprobs(piece.tokens, self._tokenizer, self._top)
            choice.logprobs += [msgspec.Raw(encode(entry)) for entry in entries]

    def answer(self, usage: dict[str, Any]) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return encode({**self._head, "choices": choices, "usage": usage})

    def _deltas(self, choice: int, parts: list[Part]) -> list[tuple[bytes, _Told]]:
        """Returns what chunks say of the parts, and what each of them tells for its id."""
        deltas: list[tuple[bytes, _Told]] = []
        for before, part in zip([None, *parts], parts, strict=False):
            match part.kind:
                case Kind.TEXT:
                    deltas.append((b'{"content":%b}' % encode(part.text), (part.text, 0, 0, False)))
                case Kind.THOUGHT:
                    delta = b'{"reasoning_content":%b}' % encode(part.text)
                    deltas.append((delta, (part.text, 0, 0, False)))
                case Kind.CALL:
                    deltas.append((self._call_delta(self._call(choice, part, ""), part), _CALL))
                case Kind.ARGUMENTS if before is not None and before.kind is Kind.CALL:
                    deltas[-1] = self._call_delta(self._call(choice, before, part.text), part), _CALL
                case Kind.ARGUMENTS:
                    deltas.append((self._call_delta({"function": {"arguments": part.text}}, part), _NOTHING))
        return deltas

    @staticmethod
    def _call_delta(call: dict[str, Any], part: Part) -> bytes:
        return encode({"tool_calls": [{"index": part.call, **call}]})

    def _call(self, choice: int, part: Part, arguments: str) -> dict[str, Any]:
        return {
            "id": f"call_{self._number}_{choice}_{part.call}",
            "type": "function",
            "function": {"name": part.text, "arguments": arguments},
        }

    def _whole(self, index: int, choice: _WrittenChat) -> dict[str, Any]:
        said, text = choice.said, choice.said.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if said.thoughts:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [self._call(index, *call) for call in said.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._top is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": choice.finish,
        }


def reason_of(piece: Piece, reader: AnswerReader) -> str | None:
    """Returns why a choice ended, in the words of a chat."""
    return "tool_calls" if reader.calls and piece.finish == "stop" else piece.finish


def _unseen(had: ChoiceIds, parts: list[Part], tokens: int, *, last: bool) -> tuple[list[Part], int]:
    """Returns the parts, with whole calls, that a client does not have who has the beginning of the stream,
    and how many of the piece's log-probabilities it has."""
    text = "".join(part.text for part in parts if part.kind in (Kind.TEXT, Kind.THOUGHT))
    calls = sum(part.kind is Kind.CALL for part in parts)
    rest, skipped, known_calls = had.unseen(text, tokens, calls, ended=last)
    known = len(text) - len(rest)
    first = next((part.call for part in parts if part.kind is Kind.CALL), 0) + known_calls
    left: list[Part] = []
    for part in parts:
        if part.kind in (Kind.TEXT, Kind.THOUGHT):
            cut = min(known, len(part.text))
            known -= cut
            left += [replace(part, text=part.text[cut:])] if cut < len(part.text) else []
        elif part.call >= first:
            left.append(part)
    return left, skipped

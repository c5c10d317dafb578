"""/v1/chat/completions: from messages to a prompt, and from pieces of text to messages, deltas and calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.metrics import Watch
from kvloom.api.openai.generation import Answering, EndpointContext, Generation, Piece, Writer, encode
from kvloom.api.openai.resume import Origin
from kvloom.api.openai.sampling import chat_logprobs, check_prompt, room_for, sampling_params, start_of
from kvloom.api.schemas.chat import ChatBody, ChatMessage, NamedTool, Tool
from kvloom.api.schemas.generation import closed
from kvloom.api.texts.prompts import UNRENDERED, ChatPrompt, content_bytes
from kvloom.api.tools import Family, ToolCall, ToolParser, forced_guide, marks_of
from kvloom.types.request import Guide

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
        generation, family = await chat_generation(body, model, tenant, origin, PREFIX)
        writer = ChatWriter(origin, model, body, family)
        return Answering(self.gateway, writer, [generation], watch)


async def chat_generation(
    body: ChatBody, model: ServedModel, tenant: str, origin: Origin, prefix: str
) -> tuple[Generation, Family | None]:
    """Returns what a chat asks of an engine, and how calls are looked for in its answer. prefix: of the
    answer's id. Raises KvloomError."""
    given = prompt_of(model, body.messages, offered(body), body.chat_template_kwargs or {})
    prompt = await model.tokens(given, tenant)
    check_prompt(prompt, model.card)
    family = parsed_family(body, model)
    asked = body.max_completion_tokens or body.max_tokens
    limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    sampling = sampling_params(
        body,
        model,
        max_tokens=room_for(prompt, asked, model.card, "messages", limit),
        drawn=origin.seed_of(0),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=_forced(body, model, family),
    )
    start = start_of(body, origin.request_id(prefix), prompt, sampling)
    keep = marks_of(family, model.tokenizer)
    return Generation(start, model.tokenizer, body.stops, keep), family


def offered(body: ChatBody) -> list[Tool]:
    """Returns the tools of which the model is told."""
    return body.tools or [] if body.tool_choice != "none" else []


def prompt_of(
    model: ServedModel, messages: list[ChatMessage], tools: list[Tool], options: dict[str, Any]
) -> ChatPrompt:
    """Returns what the model's chat template is given. options: the template's own switches. Raises
    PromptTooLong."""
    offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
    knows_developer = "developer" in (model.template.text or "")
    said = [_message(message, knows_developer=knows_developer) for message in messages]
    model.check_size(content_bytes(said), UNRENDERED, "messages")
    return ChatPrompt.of(said, offered, options)


def _message(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """Returns the message as templates expect it: content is text, and a past call's arguments are an
    object."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "refusal", "tool_calls"})
    if message.role == "developer" and not knows_developer:
        plain["role"] = "system"
    content = message.content
    said = "\n".join(part.words for part in content) if isinstance(content, list) else content
    plain["content"] = said or message.refusal or ""
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        plain["tool_calls"] = calls
    return plain


def _arguments(text: str) -> Any:
    """Returns the arguments as an object. What is no JSON is the model's own mistake, and stays as it was."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def parsed_family(body: ChatBody, model: ServedModel) -> Family | None:
    """Returns how calls are looked for in the answer. A forced call in a model of unknown family is plain
    JSON."""
    if not body.tools or body.tool_choice == "none":
        return None
    return model.family or (Family.LLAMA if body.forces_tool else None)


def _forced(body: ChatBody, model: ServedModel, family: Family | None) -> Guide | None:
    if family is None or not body.forces_tool:
        return None
    only = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = [tool.function for tool in body.tools or [] if only in (None, tool.function.name)]
    tools = [
        (one.name, closed(one.parameters or {"type": "object"}, strict=bool(one.strict))) for one in functions
    ]
    several = only is None and body.parallel_tool_calls is not False
    return forced_guide(family, tools, model.tokenizer, several=several)


@dataclass(slots=True)
class _WrittenChat:
    """The text of one choice of the answer that has been written."""

    parser: ToolParser | None
    greeted: bool = False
    text: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class ChatWriter(Writer):
    """Writes the one generation of a chat request; its choices are the generation's."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, origin: Origin, model: ServedModel, body: ChatBody, family: Family | None) -> None:
        super().__init__(PREFIX, origin, body, body.choices)
        self._tokenizer = model.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._choices = [_WrittenChat(ToolParser(family) if family else None) for _ in range(body.choices)]
        self._open = b"data: " + encode(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if self._wants_usage else b"}]}\n\n"

    def chunk(self, at: int, piece: Piece) -> bytes:
        choice = self._choices[piece.choice]
        plain = choice.parser is None and piece.finish is None
        text, calls = (piece.text, []) if plain else self._read(choice, piece)
        tokens = [] if self._top is None else piece.tokens
        greeted, finish = choice.greeted, choice.finish
        choice.greeted = True
        if self._ids is not None:
            had = self._ids.choices[piece.choice]
            greeted, finish = had.begun, None if had.ended else finish
            ended = piece.finish is not None
            text, skipped, first = had.unseen(text, len(tokens), len(calls), ended=ended)
            tokens, calls = tokens[skipped:], calls[first:]
        # of each event its delta, log-probabilities and finish, and what it tells for its id
        events: list[tuple[bytes, bytes, bytes, _Told]] = []
        if not greeted:
            events.append((b'{"role":"assistant","content":""}', b"null", b"null", _NOTHING))
        if self._top is not None and tokens:
            content = {"content": chat_logprobs(tokens, self._tokenizer, self._top), "refusal": None}
            told = text, len(tokens), 0, False
            events.append((b'{"content":%b}' % encode(text), encode(content), b"null", told))
        elif text:
            events.append((b'{"content":%b}' % encode(text), b"null", b"null", (text, 0, 0, False)))
        for number, call in enumerate(calls, len(choice.calls) - len(calls)):
            events.append((encode({"tool_calls": [{"index": number, **call}]}), b"null", b"null", _CALL))
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
        choice = self._choices[piece.choice]
        choice.text.append(self._read(choice, piece)[0])
        if self._top is not None:
            # As text they take a sixth of the memory.
            entries = chat_logprobs(piece.tokens, self._tokenizer, self._top)
            choice.logprobs += [msgspec.Raw(encode(entry)) for entry in entries]

    def answer(self, usage: dict[str, Any]) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return encode({**self._head, "choices": choices, "usage": usage})

    def _read(self, choice: _WrittenChat, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """Returns the piece's text without the calls in it, and the calls."""
        text, calls = piece.text, list[ToolCall]()
        if choice.parser is not None:
            text, calls = choice.parser.take(text, last=piece.finish is not None)
        written = []
        for call in calls:
            written.append(self._call(call, piece.choice, len(choice.calls)))
            choice.calls.append(written[-1])
        if piece.finish is not None:
            choice.finish = "tool_calls" if choice.calls and piece.finish == "stop" else piece.finish
        return text, written

    def _call(self, call: ToolCall, choice: int, number: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "id": f"call_{self._head['id'].partition('-')[2]}_{choice}_{number}",
            "type": "function",
            "function": function,
        }

    def _whole(self, index: int, choice: _WrittenChat) -> dict[str, Any]:
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

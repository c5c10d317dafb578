"""/v1/chat/completions: from messages to a prompt, and from pieces of text to messages, deltas and calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.answers.calls import Kind, Part, Said
from kvloom.api.answers.families import Family
from kvloom.api.answers.forced import forced_guide
from kvloom.api.answers.reader import AnswerForm, AnswerReader, Tools
from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.metrics import Watch
from kvloom.api.openai.generation import Answering, EndpointContext, Writer, encode
from kvloom.api.openai.pieces import Generation, Piece
from kvloom.api.openai.resume import ChoiceIds, Origin
from kvloom.api.openai.sampling import chat_logprobs, check_prompt, room_for, sampling_params, start_of
from kvloom.api.schemas.chat import ChatBody, ChatMessage, NamedTool, Tool
from kvloom.api.schemas.generation import closed
from kvloom.api.texts.prompts import UNRENDERED, ChatPrompt, content_bytes
from kvloom.types.errors import BadRequest
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
        generation, readers = await chat_generation(body, model, tenant, origin, PREFIX)
        writer = ChatWriter(origin, model, body, readers)
        return Answering(self.gateway, writer, [generation], watch)


class Readers(Protocol):
    """Makes what reads a choice of an answer."""

    def __call__(self, *, whole_calls: bool = False) -> AnswerReader: ...


async def chat_generation(
    body: ChatBody, model: ServedModel, tenant: str, origin: Origin, prefix: str, *, capped: bool = False
) -> tuple[Generation, Readers]:
    """Returns what a chat asks of an engine, and what reads its answer. prefix: of the answer's id; capped:
    whether a limit above the context's room is lowered to it, and not refused. Raises KvloomError."""
    given = prompt_of(model, body.messages, offered(body), switches(body, model))
    prompt = await model.tokens(given, tenant)
    check_prompt(prompt, model.card)
    asked = body.max_completion_tokens or body.max_tokens
    if capped and asked is not None:
        asked = min(asked, max(1, model.card.context_length - len(prompt)))
    limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    form = _form(body, model)
    guide = _forced(body, model, form.family)
    sampling = sampling_params(
        body,
        model,
        max_tokens=room_for(prompt, asked, model.card, "messages", limit),
        drawn=origin.seed_of(0),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=guide,
    )
    start = start_of(body, origin.request_id(prefix), prompt, sampling)
    thinks = sampling.guide is None  # a grammar holds from the answer's first token on
    readers = partial(
        form.reader, _parameters(body), thinks=thinks, opened=thinks and form.opened(prompt, model.tokenizer)
    )
    keep = form.marks(model.tokenizer, calls=bool(offered(body)), thinks=thinks)
    return Generation(start, model.tokenizer, body.stops, keep), readers


def switches(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """Returns the template's own switches. Raises BadRequest if thoughts are asked for that it lacks."""
    effort = body.reasoning_effort
    options: dict[str, Any] = {} if body.verbosity is None else {"verbosity": body.verbosity}
    if effort is not None:
        if effort != "none" and not model.form.thinks:
            said = "reasoning_effort: the chat template of this model has no thoughts; leave it out, or none"
            raise BadRequest(said, param="reasoning_effort")
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return options | (body.chat_template_kwargs or {})


def _form(body: ChatBody, model: ServedModel) -> AnswerForm:
    """Returns how the answer is written. A forced call in a model of unknown family is plain JSON."""
    forced = body.forces_tool and model.form.family is None
    return replace(model.form, family=Family.LLAMA) if forced else model.form


def _parameters(body: ChatBody) -> Tools | None:
    """Returns the schemas of the offered tools' parameters, by name; None if there are no tools."""
    functions = [tool.function for tool in offered(body)]
    return {one.name: one.parameters or {} for one in functions} or None


def offered(body: ChatBody) -> list[Tool]:
    """Returns the tools of which the model is told."""
    return body.tools or [] if body.tool_choice != "none" else []


def prompt_of(
    model: ServedModel,
    messages: list[ChatMessage],
    tools: list[Tool],
    options: dict[str, Any],
    *,
    bounded: bool = True,
) -> ChatPrompt:
    """Returns what the model's chat template is given. options: the template's own switches; bounded: whether
    it is to fit the model's context. Raises PromptTooLong."""
    offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
    knows_developer = "developer" in (model.template.text or "")
    said = [_message(message, knows_developer=knows_developer) for message in messages]
    if bounded:
        model.check_size(content_bytes(said), UNRENDERED, "messages")
    return ChatPrompt.of(said, offered, options, bounded=bounded)


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


def _forced(body: ChatBody, model: ServedModel, family: Family | None) -> Guide | None:
    """Returns the grammar of the calls that a request forces; None if it forces none."""
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

"""/api/chat and /api/generate: from Ollama's requests to generations, and from pieces of text to lines of
JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.answers.calls import Part, Said
from kvloom.api.answers.reader import AnswerReader
from kvloom.api.answers.values import arguments_object
from kvloom.api.bodies import parse, translated
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import ollama_error
from kvloom.api.generation.answering import Answering, EndpointContext, Writer, encode
from kvloom.api.generation.chat import chat_generation
from kvloom.api.generation.pieces import Generation, Piece
from kvloom.api.generation.resume import Origin
from kvloom.api.generation.sampling import check_prompt, room_for, sampling_params, start_of
from kvloom.api.metrics import Watch
from kvloom.api.routes import LINES
from kvloom.api.schemas.ollama import (
    ChatOfOllama,
    CompletionOfOllama,
    ContextLimit,
    OllamaChatBody,
    OllamaGenerateBody,
)
from kvloom.api.stream import EventForm
from kvloom.api.texts.prompts import PlainPrompt
from kvloom.types.errors import BadRequest, KvloomError

PREFIX: Final = "ollama"
LATEST: Final = ":latest"
"""The tag that clients add to names without one."""


def _error_line(error: KvloomError) -> bytes:
    return encode(ollama_error(error)) + b"\n"


EVENTS: Final = EventForm(last=b"", error=_error_line, media=LINES)


Told = Callable[[Said, str], dict[str, Any]]


def _as_message(said: Said, number: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    message |= {"thinking": said.thought} if said.thoughts else {}
    calls = [_call(number, *call) for call in said.calls]
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def _call(number: str, call: Part, arguments: str) -> dict[str, Any]:
    function = {"index": call.call, "name": call.text, "arguments": arguments_object(arguments or "{}")}
    return {"id": f"call_{number}_{call.call}", "function": function}


def _as_response(said: Said, _: str) -> dict[str, Any]:
    return {"response": said.text} | ({"thinking": said.thought} if said.thoughts else {})


def _read(form: type[OllamaChatBody | OllamaGenerateBody], raw: bytes) -> ContextLimit:
    """Returns the request in OpenAI's form. Raises BadRequest."""
    return translated(parse(form, raw).asked)


class OllamaEndpoints:
    def __init__(self, gateway: EndpointContext) -> None:
        self._gateway = replace(gateway, tag=LATEST)

    async def chat(self, request: Request) -> Response:
        prepare = partial(self._prepare, _as_message)
        return await self._gateway.answer(request, partial(_read, OllamaChatBody), prepare, EVENTS)

    async def generate(self, request: Request) -> Response:
        prepare = partial(self._prepare, _as_response)
        return await self._gateway.answer(request, partial(_read, OllamaGenerateBody), prepare, EVENTS)

    async def _prepare(
        self, told: Told, body: ContextLimit, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        card = model.card
        if (body.num_ctx or 0) > card.context_length:
            said = (
                f"options.num_ctx: {body.num_ctx} is more than the model's context of {card.context_length}"
            )
            raise BadRequest(said, param="options.num_ctx")
        asked, body.model = body.model, card.name
        generations, reader = [], AnswerReader(None)
        if isinstance(body, ChatOfOllama):
            generation, readers = await chat_generation(body, model, tenant, origin, PREFIX)
            generations, reader = [generation], readers(whole_calls=True)
        elif isinstance(body, CompletionOfOllama):
            generations = [await _completion(body, model, tenant, origin)]
        body.model = asked  # the answer has the name by which the client knows the model
        return Answering(self._gateway, LineWriter(origin, body, reader, watch, told), generations, watch)


async def _completion(
    body: CompletionOfOllama, model: ServedModel, tenant: str, origin: Origin
) -> Generation:
    """Returns what a prompt without a template asks of an engine. Raises KvloomError."""
    prompt = await model.tokens(PlainPrompt(body.prompt), tenant)
    check_prompt(prompt, model.card)
    most = room_for(prompt, body.max_tokens, model.card, "prompt", "options.num_predict")
    sampling = sampling_params(body, model, max_tokens=most, drawn=origin.seed_of(0))
    return Generation(
        start_of(body, origin.request_id(PREFIX), prompt, sampling), model.tokenizer, body.stops
    )


def instant(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class LineWriter(Writer):
    """Writes the one choice of an answer, as one line for each piece that says something, and a last line
    with counts and times."""

    kind = chunk_kind = "line"

    def __init__(
        self, origin: Origin, body: ContextLimit, reader: AnswerReader, watch: Watch, told: Told
    ) -> None:
        """told: what the endpoint's answers have of what is said, in the answer of a number."""
        super().__init__(PREFIX, origin, body, 1)
        self._line = {"model": body.model, "created_at": instant(origin.created)}
        self._reader, self._told, self._watch = reader, told, watch
        self._said = Said()
        self._reason = "load"
        self._prepared = watch.seconds
        self._first: float | None = None  # the time of the first token of a stream

    def chunk(self, at: int, piece: Piece) -> bytes:
        if self._first is None:
            self._first = self._watch.seconds
        said = Said()
        self._read(piece, said)
        line = self._line | self._told(said, self._number) | {"done": False}
        return encode(line) + b"\n" if said else b""

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        return self.answer(usage) + b"\n"

    def add(self, at: int, piece: Piece) -> None:
        self._read(piece, self._said)

    def answer(self, usage: dict[str, Any]) -> bytes:
        return encode(self._line | self._told(self._said, self._number) | {"done": True} | self._end(usage))

    def _read(self, piece: Piece, said: Said) -> None:
        said.add(self._reader.take(piece.text, last=piece.finish is not None))
        self._reason = piece.finish or self._reason

    def _end(self, usage: dict[str, Any]) -> dict[str, Any]:
        now = self._watch.seconds
        begun = self._prepared if self._first is None else self._first
        prompt = {} if self._first is None else {"prompt_eval_duration": nanoseconds(begun - self._prepared)}
        return {
            "done_reason": self._reason,
            "total_duration": nanoseconds(now),
            "load_duration": nanoseconds(self._prepared),
            "prompt_eval_count": usage["prompt_tokens"],
            **prompt,
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(now - begun),
        }

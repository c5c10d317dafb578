"""/v1/responses: from items to a chat, from pieces of text to items, and answers that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace as with_fields
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.access.tenants import access_of
from kvloom.api.bodies import PARSED, Account, account, parse, translated
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import JSON, json_answer
from kvloom.api.generation.answering import Answering, EndpointContext, encode
from kvloom.api.generation.chat import chat_generation
from kvloom.api.generation.pieces import Generation
from kvloom.api.generation.resume import Origin
from kvloom.api.metrics import Watch
from kvloom.api.openai.response_writer import PREFIX, Hold, ResponseWriter
from kvloom.api.openai.stored import PreviousNotFound, ResponseNotFound, ResponseStore, StoredResponse
from kvloom.api.schemas.chat import ChatBody
from kvloom.api.schemas.responses import (
    ITEMS,
    Item,
    NamedChoice,
    ReferenceItem,
    ResponsesBody,
    UnservedItem,
)
from kvloom.api.stream import EventForm
from kvloom.types.errors import BadRequest, KvloomError

MOST_LISTED: Final = 100
_LISTED: Final = 20
_OWN_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""The names of parameters that have other names in a chat."""


class _Answered(msgspec.Struct):
    """The part of a kept answer that a conversation goes on from."""

    output: msgspec.Raw


def _in_own_words(error: BadRequest) -> BadRequest:
    """Returns the error of a chat with the names that parameters have here."""
    if (name := _OWN_NAMES.get(error.param or "")) is not None:
        message = error.message
        if message.startswith(f"{error.param}:"):
            message = name + message.removeprefix(error.param or "")
        return type(error)(message, param=name)
    return error


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    gateway: EndpointContext
    store: ResponseStore

    async def __call__(self, request: Request) -> Response:
        exchange = _Exchange(self.gateway, self.store, access_of(request.scope).tenant, account(request))
        form = EventForm(b"", exchange.failed)
        return await self.gateway.answer(request, exchange.read, exchange.prepare, form)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise BadRequest("stream: a kept answer comes whole; leave stream out", param="stream")
        return Response(self._found(request).answer, media_type=JSON)

    async def delete(self, request: Request) -> Response:
        found = self._found(request)
        self.store.forget(found)
        return json_answer({"id": found.name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """Lists what the answer's conversation held when the model was asked."""
        *past, last = self._found(request).turns()
        items: list[dict[str, Any]] = []
        for turn in past:
            answered = msgspec.json.decode(turn.answer, type=_Answered)
            items += msgspec.json.decode(turn.given) + msgspec.json.decode(answered.output)
        return json_answer(_listed(items + msgspec.json.decode(last.given), request))

    def _found(self, request: Request) -> StoredResponse:
        return self.store.get(access_of(request.scope).tenant, request.path_params["response"])


def _listed(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Returns the part of the items that a request asks for, in its order. Raises BadRequest."""
    asked = request.query_params
    limit, order, after = asked.get("limit", str(_LISTED)), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST_LISTED):
        raise BadRequest(f"limit: a number from 1 to {MOST_LISTED} is right", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc is right", param="order")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise BadRequest(f"after: there is no item {after[:200]!r} in this answer's input", param="after")
        ordered = ordered[at + 1 :]
    data = ordered[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data} | ends | {"has_more": len(ordered) > len(data)}


_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class _Exchange:
    """One request and its answer."""

    def __init__(self, gateway: EndpointContext, store: ResponseStore, tenant: str, held: Account) -> None:
        self._gateway, self._store, self._tenant, self._held = gateway, store, tenant, held
        self._body: ResponsesBody | None = None
        self._added: list[Item] = []
        self._before: StoredResponse | None = None
        self._read: dict[str, list[Item]] = {}  # items of kept answers, by the answer's id
        self._writer: ResponseWriter | None = None

    def read(self, raw: bytes) -> ChatBody:
        """Returns the request as a chat, with the conversation before it. Raises KvloomError."""
        self._body = body = parse(ResponsesBody, raw)
        past: list[Item] = []
        if (name := body.previous_response_id) is not None:
            self._before = before = self._store.find(self._tenant, name)
            if before is None:
                said = f"Previous response with id '{name[:200]}' not found."
                raise PreviousNotFound(said, param="previous_response_id")
            past = [item for turn in before.turns() for item in self._items_of(turn)]
        self._added = [self._resolved(item) for item in body.items]
        try:
            return translated(partial(body.chat, [*past, *self._added]))
        except BadRequest as error:
            raise _in_own_words(error) from None

    def _resolved(self, item: Item) -> Item:
        """Returns the item, or that which it stands for. An item's id tells the answer that it is part of."""
        if not isinstance(item, ReferenceItem):
            return item
        _, number, *_ = *item.id.split("_"), ""
        turn = self._store.find(self._tenant, f"{PREFIX}_{number}")
        for known in () if turn is None else self._items_of(turn):
            if known.id == item.id:
                return known
        raise ResponseNotFound(f"Item with id '{item.id[:200]}' not found.", param="input")

    def _items_of(self, turn: StoredResponse) -> list[Item]:
        """Returns what a kept answer added to its conversation. A request may name it many times."""
        if turn.name not in self._read:
            self._held.add(PARSED * turn.bytes_held)
            output = msgspec.json.decode(turn.answer, type=_Answered).output
            self._read[turn.name] = [*ITEMS.validate_json(turn.given), *ITEMS.validate_json(bytes(output))]
        return self._read[turn.name]

    async def prepare(
        self, chat: ChatBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        assert self._body is not None
        try:
            generation, readers = await chat_generation(chat, model, tenant, origin, PREFIX)
        except BadRequest as error:
            raise _in_own_words(error) from None
        sampling = generation.body.sampling
        if sampling.guide is not None and sampling.guide.param in _OWN_NAMES:
            guide = with_fields(sampling.guide, param=_OWN_NAMES[sampling.guide.param])
            generation.body = with_fields(generation.body, sampling=with_fields(sampling, guide=guide))
        echo = _echo(self._body, generation)
        given = b"" if self._body.store is False else encode(self._given(origin))
        self._added, self._read = [], {}
        hold = Hold(self._held, len(given) + PARSED * len(encode(echo)))
        keep = None if self._body.store is False else partial(self._keep, given)
        self._writer = ResponseWriter(origin, chat, echo, readers, hold, keep)
        return Answering(self._gateway, self._writer, [generation], watch)

    def _given(self, origin: Origin) -> list[dict[str, Any]]:
        """Returns what the request added to the conversation, each item with an id."""
        items = [item.kept() for item in self._added if not isinstance(item, ReferenceItem | UnservedItem)]
        for at, item in enumerate(items):
            item["id"] = item["id"] or f"{_PREFIXES[item['type']]}_{origin.number}_i{at}"
        return items

    def _keep(self, given: bytes, name: str, answer: bytes) -> None:
        self._store.keep(StoredResponse(name, self._tenant, self._before, given, answer))

    def failed(self, error: KvloomError) -> bytes:
        assert self._writer is not None  # which has written the stream's first event
        return self._writer.failed(error)


def _raw(value: Any) -> msgspec.Raw:
    """Returns JSON with a client's schemas in it, whose integers may have more than the 64 bits that msgspec
    writes."""
    return msgspec.Raw(to_json(value))


def _echo(body: ResponsesBody, generation: Generation) -> dict[str, Any]:
    """Returns what an answer says of its request."""
    sampling, text, reasoning = generation.body.sampling, body.text, body.reasoning
    dumped = {} if text is None else text.model_dump(by_alias=True)
    shown = {name: value for name, value in dumped.items() if value is not None}
    choice = body.tool_choice
    return {
        "model": body.model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": _raw({"format": {"type": "text"}} | shown),
        "tools": _raw([tool.model_dump() for tool in body.tools or []]),
        "tool_choice": choice.model_dump() if isinstance(choice, NamedChoice) else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "metadata": body.metadata or {},
        "user": body.user,
        "store": body.store is not False,
        "background": False,
        "truncation": "disabled",
    }

"""Turns events into answers, choice by choice: the loop over a stream, and the writers that endpoints give
it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec.structs import replace as with_fields
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.access.log import measured_by
from kvloom.api.access.tenants import NOBODY, Access, access_of
from kvloom.api.access.turns import LARGE, Pace
from kvloom.api.auth import priority
from kvloom.api.bodies import OPEN_BYTES, PARSED, Account, account, named_model, read_body
from kvloom.api.catalog import Catalog, ServedModel
from kvloom.api.errors import ID_STATE
from kvloom.api.generation.pieces import Generation, Piece
from kvloom.api.generation.resume import HEADER, Origin
from kvloom.api.metrics import Metrics, Watch
from kvloom.api.schemas.generation import ModelBody
from kvloom.api.stream import (
    NO_LIMIT,
    OPENAI_EVENTS,
    EventForm,
    EventStream,
    TimeLimit,
    Write,
    while_connected,
)
from kvloom.journal.lives import Lives, Tokens
from kvloom.types.client import ModelServer
from kvloom.types.clock import together
from kvloom.types.errors import BadRequest
from kvloom.types.request import ModelCard

encode = msgspec.json.Encoder().encode


AT_ONCE = 128  # generations of one request that run at the same time
PROMPT_TOKEN_BYTES: Final = 64
CHOICE_BYTES: Final = 1 << 10  # of a choice, and for each of its tokens' alternatives
KEPT_BYTES: Final = 256  # of a token in an answer that is not streamed, and for each of its alternatives
Body = TypeVar("Body", bound=ModelBody)
T = TypeVar("T")
Prepare = Callable[[Body, ServedModel, Watch, str, Origin], Awaitable["Answering"]]


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """The parts that every endpoint uses."""

    client: ModelServer
    catalog: Catalog
    metrics: Metrics
    seconds: float | None = None
    """The seconds that a request may take; None for as long as it likes."""
    pace: Pace = field(default_factory=Pace)
    """Large bodies are read by it."""
    tag: str = ""
    """An end that the names of models may have in requests (`Catalog.get`)."""

    async def answer(
        self,
        request: Request,
        read: Callable[[bytes], Body],
        prepare: Prepare[Body],
        form: EventForm = OPENAI_EVENTS,
    ) -> Response:
        """Answers a request with what `prepare` makes of its body for a tenant. read: reads the body; form:
        that of a stream's end."""
        trace = request.headers.get("traceparent", "")
        watch = self.metrics.watch(request.scope.get("state", {}).get(ID_STATE, ""), trace)
        held, limit = account(request), TimeLimit(self.seconds)
        measured_by(request.scope, watch)
        access = access_of(request.scope)
        with watch.preparing():
            async with limit.kept():
                raw = await read_body(request)
                held.add(OPEN_BYTES + PARSED * len(raw))
                body, origin = await self._read_for(watch, request, raw, read)
            del raw
            body.priority = priority(request.scope, body.priority)
        stream = bool(body.stream)
        coming = self._prepared(body, origin, prepare, watch, held, access, limit)
        if stream:
            return EventStream(_stream(coming), form)
        answer = await while_connected(request.receive, _whole(coming, held))
        return Response(answer, media_type="application/json")

    async def read_form(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Returns what `read` makes of the whole body, whose memory counts until the answer's end."""
        async with TimeLimit(self.seconds).kept():
            raw = await read_body(request)
            account(request).add(PARSED * len(raw))
            return await self._read(request, raw, read)

    async def _read(self, request: Request, raw: bytes, read: Callable[[bytes], T]) -> T:
        """Reads a body; a large one when its turn has come, while the client is connected."""
        if len(raw) < LARGE:
            return read(raw)
        reading = self.pace.run(access_of(request.scope).tenant, partial(read, raw))
        return await while_connected(request.receive, reading)

    async def _read_for(
        self, watch: Watch, request: Request, raw: bytes, read: Callable[[bytes], Body]
    ) -> tuple[Body, Origin]:
        """Reads a body as `_read` does. One that is refused counts for the model that it names, if that is
        served."""
        name = ""

        def reading(raw: bytes) -> tuple[Body, Origin]:
            nonlocal name
            try:
                body = read(raw)
                return body, _origin(request, body, raw)
            except BadRequest:
                name = named_model(raw)
                raise

        try:
            return await self._read(request, raw, reading)
        except BadRequest:
            may_use = access_of(request.scope).may_use
            if (card := await self.catalog.card(name, may_use, self.tag)) is not None:
                _count_for(card, watch)
            raise

    async def _prepared(
        self,
        body: Body,
        origin: Origin,
        prepare: Prepare[Body],
        watch: Watch,
        held: Account,
        access: Access,
        limit: TimeLimit,
    ) -> Answering:
        """Runs while the client is connected, and has the request's body only until it is prepared."""
        with watch.preparing():
            async with limit.kept():
                model = await self.catalog.get(body.model, access.may_use, self.tag)
                _count_for(model.card, watch)
                prepared = await prepare(body, model, watch, access.tenant, origin)
                answering = replace(prepared, access=access, limit=limit)
            watch.request = answering.request
            answering.begin(body.most_tokens)
            answering.tell(self.metrics.lives)
            held.settle(answering.bytes_held)
            return answering


def _count_for(card: ModelCard, watch: Watch) -> None:
    """Lets a request count for the model."""
    watch.model = watch.life.model = card.name
    watch.base = card.parent or ""


def _origin(request: Request, body: ModelBody, raw: bytes) -> Origin:
    """Returns the origin of the request's answer. Raises BadRequest."""
    last = request.headers.get(HEADER, "")
    if last and not body.stream:
        raise BadRequest(f"{HEADER} needs stream to be true", param=HEADER)
    return Origin.of(request.url.path, raw, last) if last or body.wants_ids else Origin()


async def _stream(coming: Awaitable[Answering]) -> Callable[[Write], Awaitable[None]]:
    return (await coming).stream


async def _whole(coming: Awaitable[Answering], held: Account) -> bytes:
    return await (await coming).whole(held)


class Writer(ABC):
    """Turns the pieces of `generation` number `at` into an endpoint's own form."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    """The kind of a stream's chunks."""

    def __init__(self, prefix: str, origin: Origin, body: ModelBody, choices: int) -> None:
        """prefix: of the answer's id; choices: over all prompts."""
        self.answer_id = origin.answer_id(prefix)
        self._number = origin.number
        head: dict[str, Any] = {"id": self.answer_id, "created": origin.created, "model": body.model}
        self._ids = origin.ids(choices)
        self._head = head | {"object": self.kind}
        self._chunk_head = head | {"object": self.chunk_kind}
        self._wants_usage = body.wants_usage

    @abstractmethod
    def chunk(self, at: int, piece: Piece) -> bytes:
        """Returns the events that tell of the piece; it may be none."""

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        """Returns the event that tells the usage, if that was asked for."""
        if not self._wants_usage:
            return b""
        line = b"" if self._ids is None else self._ids.last_line
        return line + b"data: " + encode(self._chunk_head | {"choices": [], "usage": usage}) + b"\n\n"

    @property
    def over(self) -> bool:
        """Whether the client has all events already, in an earlier stream."""
        return self._ids is not None and (self._ids.done or (self._ids.over and not self._wants_usage))

    @abstractmethod
    def add(self, at: int, piece: Piece) -> None:
        """Keeps the piece for `answer`."""

    @abstractmethod
    def answer(self, usage: dict[str, Any]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Answering:
    """One HTTP request being answered by a generation for each of its prompts, of which it may have none."""

    gateway: EndpointContext
    writer: Writer
    generations: Sequence[Generation]
    watch: Watch
    access: Access = NOBODY
    limit: TimeLimit = NO_LIMIT
    at_once: int = AT_ONCE

    @property
    def request(self) -> str:
        """The id by which engines know the request, without a prompt's number: the answer's, unless a stream
        is resumed."""
        first = self.generations[0].body.request if self.generations else self.writer.answer_id
        return first.removesuffix("-0")

    def begin(self, most: int | None) -> None:
        """Notes for whom the engine is asked, and takes the request's tokens off the caller's limit. most:
        tokens of a choice, if the request names a number. Raises RateLimited."""
        access = self.access
        for one in self.generations:
            one.body = with_fields(one.body, tenant=access.tenant, salt=access.salt)
        if access.grant is not None:
            prompt, _ = self._counts()
            access.grant.reserve(prompt, (most or 0) * sum(one.body.n for one in self.generations))

    def tell(self, lives: Lives) -> None:
        """Tells how to follow the request's life."""
        life = self.watch.life
        self.watch.prompts = sum(1 + len(one.body.more) for one in self.generations)
        life.api_id = self.writer.answer_id
        life.tokens_by(self._tokens)
        lives.ask(life, [one.body.request for one in self.generations])

    def _tokens(self) -> Tokens:
        return Tokens(*self._counts(), sum(one.cached_tokens for one in self.generations))

    @property
    def bytes_held(self) -> int:
        """Returns about how many bytes of this process the request holds until its answer has ended, beside
        what an answer keeps that is not streamed: its prompts, and for each choice what is on its way."""
        held = OPEN_BYTES
        for generation in self.generations:
            body, sampling = generation.body, generation.body.sampling
            held += generation.answer_bytes
            held += PROMPT_TOKEN_BYTES * sum(map(len, (body.prompt, *body.more)))
            held += CHOICE_BYTES * body.n * (1 + (sampling.logprobs or 0))
            if sampling.prompt_logprobs is not None:
                held += KEPT_BYTES * len(body.prompt) * (1 + sampling.prompt_logprobs)
        return held

    async def stream(self, write: Write) -> None:
        chunk, made_tokens = self.writer.chunk, False

        async def tell(at: int, pieces: list[Piece]) -> None:
            nonlocal made_tokens
            if not made_tokens:
                made_tokens = True
                self.watch.made_tokens()
            body = b"".join([chunk(at, piece) for piece in pieces])
            if body:
                await write(body)

        with self.watch.answering(self._counts):
            if self.writer.over:
                return
            async with self.limit.kept():
                await self._run(tell)
            await write(self.writer.last_chunk(self.usage()))

    async def whole(self, held: Account) -> bytes:
        async def keep(at: int, pieces: list[Piece]) -> None:
            sampling = self.generations[at].body.sampling
            known = 1 if sampling.logprobs is None else 1 + sampling.logprobs
            held.add(KEPT_BYTES * known * sum(len(piece.tokens) for piece in pieces))
            for piece in pieces:
                self.writer.add(at, piece)

        with self.watch.answering(self._counts):
            async with self.limit.kept():
                await self._run(keep)
            if self.access.grant is not None:
                self.access.grant.settle()  # before the head of the answer tells what is left
            return self.writer.answer(self.usage())

    async def _run(self, tell: Callable[[int, list[Piece]], Awaitable[None]]) -> None:
        """Runs all generations at the same time, and tells their pieces with the generation's number as they
        come. The first error ends them all."""
        client, tell = self.gateway.client, self._counted(tell)
        if len(self.generations) == 1:
            await self.generations[0].run(client, partial(tell, 0))
            return
        room = asyncio.Semaphore(self.at_once)

        async def run(at: int, generation: Generation) -> None:
            async with room:
                await generation.run(client, partial(tell, at))

        async with together() as group:
            for at, generation in enumerate(self.generations):
                group.create_task(run(at, generation))

    def _counted(
        self, tell: Callable[[int, list[Piece]], Awaitable[None]]
    ) -> Callable[[int, list[Piece]], Awaitable[None]]:
        """Returns `tell`, which counts the tokens against the caller's limit, if the caller has any."""
        grant = self.access.grant
        if grant is None:
            return tell
        made = [0] * len(self.generations)

        async def counted(at: int, pieces: list[Piece]) -> None:
            by_now = self.generations[at].output_tokens
            grant.made(by_now - made[at])
            made[at] = by_now
            await tell(at, pieces)

        return counted

    def _counts(self) -> tuple[int, int]:
        prompt = sum(len(text) for one in self.generations for text in (one.body.prompt, *one.body.more))
        return prompt, sum(one.output_tokens for one in self.generations)

    def usage(self) -> dict[str, Any]:
        prompt, output = self._counts()
        cached = sum(one.cached_tokens for one in self.generations) if self.access.shows_cached else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

"""Turns events into answers, choice by choice: the loop over a stream, and what an endpoint makes of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
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
from kvloom.api.bodies import OPEN_BYTES, PARSED, Account, account, read_body
from kvloom.api.catalog import Catalog, ServedModel
from kvloom.api.errors import ID_STATE
from kvloom.api.metrics import Metrics, Watch
from kvloom.api.openai.resume import HEADER, Origin
from kvloom.api.openai.text import StopStrings, detokenizer
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
from kvloom.api.tokenizer import Tokenizer
from kvloom.journal.lives import Lives, Tokens
from kvloom.types.client import ModelServer
from kvloom.types.clock import together
from kvloom.types.errors import BadRequest, KvloomError, Unavailable, WireError
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent, TokenLogprob

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Piece:
    """The part of one frame that one choice got."""

    choice: int
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None
    """Why the choice ended; set in its last piece only."""
    stop: str | None = None
    """The stop string that ended it, if one did."""


class Generation:
    """One StartGenerate on its way to text. The counts grow as it goes."""

    def __init__(
        self,
        body: StartGenerate,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        keep: frozenset[int] = frozenset(),
        *,
        scoring: bool = False,
    ) -> None:
        """keep: special tokens that are shown. scoring: only the prompt is of interest, and the one token
        that the engine must make is not shown."""
        self.body = body
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._scoring = scoring
        self._ended: set[int] = set()  # by the engine; a stop string ends a choice here first
        min_tokens = body.sampling.min_tokens
        self.choices = [_Choice(index, tokenizer, stops, min_tokens, keep) for index in range(body.n)]

    @property
    def output_tokens(self) -> int:
        return 0 if self._scoring else sum(choice.made for choice in self.choices)

    async def run(self, client: ModelServer, tell: Callable[[list[Piece]], Awaitable[None]]) -> None:
        """Tells the pieces of each frame as it comes, until every choice is over: the one loop that a stream
        has here. Ended early, it ends the request in the engine. Raises KvloomError if the engine ends a
        choice badly, or the stream too soon."""
        left = len(self.choices)
        async with aclosing(client.start_generate(self.body)) as frames:
            async for frame in frames:
                pieces = self._read(frame)
                over = [piece.choice for piece in pieces if piece.finish is not None]
                left -= len(over)
                if left:
                    for choice in set(over) - self._ended:
                        await client.abort(self.body.request, choice)
                if pieces:
                    await tell(pieces)
                if left == 0:
                    return
        raise Unavailable("the engine ended the stream before the answer was complete")

    def _read(self, frame: list[Event]) -> list[Piece]:
        tokens: dict[int, list[TokenEvent]] = {}
        ends: dict[int, EndEvent] = {}
        for event in frame:
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.choice, []).append(event)
            elif isinstance(event, EndEvent):
                ends[event.choice] = event
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            else:
                self.prompt_logprobs = event.logprobs
        self._ended.update(ends)
        pieces = [
            self.choices[index].take(tokens.get(index, []), ends.get(index))
            for index in dict.fromkeys([*tokens, *ends])
            if not self.choices[index].over
        ]
        if self._scoring:
            return [Piece(piece.choice, finish="length") for piece in pieces if piece.finish]
        return pieces


class _Choice:
    """One of a request's choices: its text so far, and whether it is over."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int, keep: frozenset[int]
    ) -> None:
        self.index = index
        self.made = 0
        self.over = False
        self._text = detokenizer(tokenizer, keep)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens

    def take(self, tokens: list[TokenEvent], end: EndEvent | None) -> Piece:
        piece = Piece(self.index)
        stopped = end is not None and end.stop_token is not None
        for event in tokens:
            if event.index != self.made:
                raise KvloomError(
                    f"choice {self.index} lost a token: {event.index} came after {self.made - 1}"
                )
            self.made += 1
            if stopped and event is tokens[-1]:
                break
            piece.tokens.append(event)
            text = self._text.push(event.token)
            piece.text += text if self._stops is None else self._shown(text)
            if self._stops is not None and self._stops.hit is not None:
                piece.finish, piece.stop, self.over = "stop", self._stops.hit, True
                break
        if end is not None and not self.over:
            self._finish(piece, end)
        return piece

    def _shown(self, text: str) -> str:
        return text if self._stops is None or self.made < self._min_tokens else self._stops.push(text)

    def _finish(self, piece: Piece, end: EndEvent) -> None:
        if end.reason == "error":
            message = end.message or "the engine could not go on with this request"
            raise KvloomError.from_wire(WireError(end.code, message, end.param or None))
        if end.reason == "abort":
            raise Unavailable(end.message or "the request was ended early: the server is stopping")
        piece.text += self._shown(self._text.end())
        piece.finish = end.reason
        if self._stops is not None:
            piece.text += self._stops.end()
            if self._stops.hit is not None:
                piece.finish, piece.stop = "stop", self._stops.hit
        self.over = True


AT_ONCE = 128  # generations of one request that run at the same time
PROMPT_TOKEN_BYTES: Final = 64
CHOICE_BYTES: Final = 1 << 10  # of a choice, and for each of its tokens' alternatives
KEPT_BYTES: Final = 256  # of a token in an answer that is not streamed, and for each of its alternatives
Body = TypeVar("Body", bound=ModelBody)
Prepare = Callable[[Body, ServedModel, Watch, str, Origin], Awaitable["Answering"]]


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """The parts that every endpoint uses."""

    client: ModelServer
    catalog: Catalog
    metrics: Metrics
    seconds: float | None = None
    """What a request may take; None for as long as it likes."""
    pace: Pace = field(default_factory=Pace)
    """Large bodies are read by it."""

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
                if len(raw) < LARGE:
                    body = read(raw)
                else:
                    reading = self.pace.run(access.tenant, partial(read, raw))
                    body = await while_connected(request.receive, reading)
                origin = _origin(request, body, raw)
            del raw
            body.priority = priority(request.scope, body.priority)
        stream = bool(body.stream)
        coming = self._prepared(body, origin, prepare, watch, held, access, limit)
        if stream:
            return EventStream(_stream(coming), form)
        answer = await while_connected(request.receive, _whole(coming, held))
        return Response(answer, media_type="application/json")

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
                model = await self.catalog.get(body.model, access.may_use)
                watch.model = watch.life.model = model.card.name
                prepared = await prepare(body, model, watch, access.tenant, origin)
                answering = replace(prepared, access=access, limit=limit)
            watch.request = answering.request
            answering.begin(body.most_tokens)
            answering.tell(self.metrics.lives)
            held.settle(answering.bytes_held)
            return answering


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
    """One HTTP request being answered by one generation for each of its prompts."""

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
        return self.generations[0].body.request.removesuffix("-0")

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
        for body in (generation.body for generation in self.generations):
            sampling = body.sampling
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

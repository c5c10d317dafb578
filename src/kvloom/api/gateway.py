"""What the endpoints are handed, and how an answer is made from generations: whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.catalog import Catalog
from kvloom.api.generation import Generation, Piece
from kvloom.api.metrics import Metrics, Watch
from kvloom.api.stream import EventStream, Write, while_connected
from kvloom.types.client import Server
from kvloom.types.clock import Clock, together

AT_ONCE = 128  # generations of one request that run at the same time


@dataclass(frozen=True, slots=True)
class Gateway:
    """What every endpoint is handed. `unix_time` and `random_bits` are the world's, or a test's."""

    client: Server
    catalog: Catalog
    metrics: Metrics
    clock: Clock
    unix_time: Callable[[], float]
    random_bits: Callable[[int], int]

    def draw_seed(self) -> int:
        return self.random_bits(63)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{self.random_bits(128):032x}"


class Writer(Protocol):
    """Turns the pieces of `generation` number `at` into an endpoint's own form."""

    def chunk(self, at: int, piece: Piece) -> bytes:
        """Returns the events that tell of the piece; it may be none."""

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        """Returns the event that tells the usage, if that was asked for."""

    def add(self, at: int, piece: Piece) -> None:
        """Keeps the piece for `answer`."""

    def answer(self, usage: dict[str, Any]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Answering:
    """One HTTP request being answered by one generation for each of its prompts."""

    gateway: Gateway
    writer: Writer
    generations: Sequence[Generation]
    watch: Watch

    async def respond(self, request: Request, *, stream: bool) -> Response:
        if stream:
            return EventStream(self._stream)
        body = await while_connected(request.receive, self._whole())
        return Response(body, media_type="application/json")

    async def _stream(self, write: Write) -> None:
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
            await self._run(tell)
            await write(self.writer.last_chunk(self.usage()))

    async def _whole(self) -> bytes:
        async def keep(at: int, pieces: list[Piece]) -> None:
            for piece in pieces:
                self.writer.add(at, piece)

        with self.watch.answering(self._counts):
            await self._run(keep)
            return self.writer.answer(self.usage())

    async def _run(self, tell: Callable[[int, list[Piece]], Awaitable[None]]) -> None:
        """Runs all generations at the same time, and tells their pieces with the generation's number as they
        come. The first error ends them all."""
        client = self.gateway.client
        if len(self.generations) == 1:
            await self.generations[0].run(client, partial(tell, 0))
            return
        room = asyncio.Semaphore(AT_ONCE)

        async def run(at: int, generation: Generation) -> None:
            async with room:
                await generation.run(client, partial(tell, at))

        async with together() as group:
            for at, generation in enumerate(self.generations):
                group.create_task(run(at, generation))

    def _counts(self) -> tuple[int, int]:
        prompt = sum(len(one.body.prompt) for one in self.generations)
        return prompt, sum(one.output_tokens for one in self.generations)

    def usage(self) -> dict[str, Any]:
        prompt, output = self._counts()
        cached = sum(one.cached_tokens for one in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

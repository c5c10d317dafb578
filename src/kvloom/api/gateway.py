"""What the endpoints are handed, and how an answer is made from generations: whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.catalog import Catalog
from kvloom.api.generation import Generation, Piece
from kvloom.api.metrics import Metrics, Watch
from kvloom.api.stream import EventStream, merged, while_connected
from kvloom.types.client import Server
from kvloom.types.clock import Clock


@dataclass(frozen=True, slots=True)
class Gateway:
    """`unix_time` and `random_bits` are the world's; tests hand in their own."""

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
        """The events that tell of the piece; may be none."""

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        """The usage, where it was asked for."""

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
            return EventStream(self._events())
        body = await while_connected(request.receive, self._whole())
        return Response(body, media_type="application/json")

    async def _whole(self) -> bytes:
        with self.watch.answering(self._counts):
            async with aclosing(self._pieces()) as all_pieces:
                async for at, pieces in all_pieces:
                    for piece in pieces:
                        self.writer.add(at, piece)
            return self.writer.answer(self.usage())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        chunk = self.writer.chunk
        with self.watch.answering(self._counts):
            async with aclosing(self._pieces()) as all_pieces:
                async for at, pieces in all_pieces:
                    self.watch.made_tokens()
                    body = b"".join([chunk(at, piece) for piece in pieces])
                    if body:
                        yield body
            yield self.writer.last_chunk(self.usage())

    def _pieces(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        return merged([one.pieces(self.gateway.client) for one in self.generations])

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

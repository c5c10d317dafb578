"""A small OpenAI endpoint that does what a test tells it to: real HTTP, made-up answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """Of completions: bodies and Authorization headers."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


async def stream(request: web.Request, *pieces: bytes, pause: float = 0.0) -> web.StreamResponse:
    """The pieces, as they are, with pauses between them."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(pause)
    return response


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunks(tokens: int) -> list[bytes]:
    """A whole answer of so many tokens, with its usage."""
    usage = {"completion_tokens": tokens, "prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    return [
        *(event(choices=[{"text": "x"}]) for _ in range(tokens)),
        event(choices=[], usage=usage),
        b"data: [DONE]\n\n",
    ]


async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, *chunks(body["max_tokens"]))


@asynccontextmanager
async def serving(answer: Answer = whole, models: tuple[str, ...] | None = ("a", "b")) -> AsyncIterator[Seen]:
    """models: None where the endpoint does not tell."""
    seen = Seen()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        seen.bodies.append(body)
        seen.keys.append(request.headers.get("authorization"))
        return await answer(request, body)

    async def listed(_: web.Request) -> web.Response:
        if models is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"data": [{"id": name, "object": "model"} for name in models]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", listed)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        seen.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield seen
    finally:
        await runner.cleanup()

"""start_generate over HTTP: a chunked stream of frames (core.frames), or of lines of JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvloom.api.bodies import decode, read_body
from kvloom.api.errors import JSON, MSGPACK, error_response, media
from kvloom.types.client import EngineClient
from kvloom.types.errors import KvloomError
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import FrameEncoder


class GenerateVerb:
    """start_generate as plain ASGI: what runs once a token is one encoding and one send."""

    def __init__(self, client: EngineClient, max_body: int) -> None:
        self._client = client
        self._max_body = max_body
        self._forms: dict[str, Form] = {MSGPACK: Frames(), JSON: Lines()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = decode(request, await read_body(request, self._max_body), StartGenerate)
        async with aclosing(self._client.start_generate(body)) as events:
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(_hung_up(receive))
                    await self._stream(events, request, send)
                    watch.cancel()
            except* HungUp:
                pass

    async def _stream(self, events: AsyncGenerator[list[Event], None], request: Request, send: Send) -> None:
        try:
            first: list[Event] = await anext(events, [])
        except KvloomError as error:  # refused at admission: an HTTP status still can say so
            await error_response(request.scope, error)(request.scope, request.receive, send)
            return
        form = self._forms[media(request)]
        headers = [(b"content-type", form.media)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await send({"type": "http.response.body", "body": form.events(first), "more_body": True})
            async for frame in events:
                await send({"type": "http.response.body", "body": form.events(frame), "more_body": True})
        except KvloomError as error:
            await send({"type": "http.response.body", "body": form.error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class HungUp(Exception):
    """The caller is gone."""


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise HungUp


class Form(Protocol):
    """How a stream is written."""

    media: ClassVar[bytes]

    def events(self, events: list[Event]) -> bytes: ...

    def error(self, error: KvloomError) -> bytes: ...


class Frames(FrameEncoder):
    """For gateways."""

    media: ClassVar[bytes] = MSGPACK.encode()


class Lines:
    """For curl: a JSON array of events a line, or the error's object."""

    media: ClassVar[bytes] = b"application/x-ndjson"

    def events(self, events: list[Event]) -> bytes:
        return msgspec.json.encode(events) + b"\n"

    def error(self, error: KvloomError) -> bytes:
        return msgspec.json.encode(error.to_wire()) + b"\n"

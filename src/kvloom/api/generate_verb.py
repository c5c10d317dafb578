"""start_generate over HTTP: a chunked stream of frames (core.frames), or of lines of JSON."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import ClassVar, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvloom.api.bodies import decode, read_body
from kvloom.api.errors import JSON, MSGPACK, error_response, media
from kvloom.api.stream import while_connected
from kvloom.types.client import EngineClient, Frames
from kvloom.types.errors import KvloomError
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import FrameEncoder


class GenerateVerb:
    """The verb start_generate as plain ASGI: what runs once a token is one encoding and one send."""

    def __init__(self, client: EngineClient, max_body: int) -> None:
        self._client = client
        self._max_body = max_body
        self._forms: dict[str, Form] = {MSGPACK: Framed(), JSON: Lines()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = decode(request, await read_body(request, self._max_body), StartGenerate)
        async with aclosing(self._client.start_generate(body)) as frames:
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream(frames, request, send))

    async def stream(self, frames: Frames, request: Request, send: Send) -> None:
        """Sends the frames as they come: the loop over a stream in the engine's process."""
        try:
            first: list[Event] = await anext(frames, [])
        except KvloomError as error:  # refused at admission: an HTTP status still can say so
            await error_response(request.scope, error)(request.scope, request.receive, send)
            return
        form = self._forms[media(request)]
        headers = [(b"content-type", form.media)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await send({"type": "http.response.body", "body": form.events(first), "more_body": True})
            async for frame in frames:
                await send({"type": "http.response.body", "body": form.events(frame), "more_body": True})
        except KvloomError as error:
            await send({"type": "http.response.body", "body": form.error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Form(Protocol):
    """One way to write a stream."""

    media: ClassVar[bytes]

    def events(self, events: list[Event]) -> bytes: ...

    def error(self, error: KvloomError) -> bytes: ...


class Framed(FrameEncoder):
    """The form for gateways."""

    media: ClassVar[bytes] = MSGPACK.encode()


class Lines:
    """The form for curl: a JSON array of events a line, or the error's object."""

    media: ClassVar[bytes] = b"application/x-ndjson"

    def events(self, events: list[Event]) -> bytes:
        return msgspec.json.encode(events) + b"\n"

    def error(self, error: KvloomError) -> bytes:
        return msgspec.json.encode(error.to_wire()) + b"\n"

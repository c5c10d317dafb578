"""The verbs over HTTP, as an engine process serves them to its gateways."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.access.audit import note
from kvloom.api.bodies import decode, read_body
from kvloom.api.errors import (
    JSON,
    MSGPACK,
    VERBS_PATH,
    answer,
    error_response,
    media,
    on_disconnect,
    on_http_error,
    on_kvloom_error,
)
from kvloom.api.stream import while_connected
from kvloom.offload.terms import LEND, TAKE_BACK, Borrow, HandBack, Loan
from kvloom.types.client import EngineClient, Frames
from kvloom.types.errors import BadRequest, KvloomError, Unauthorized
from kvloom.types.request import PROTOCOL, Event, StartGenerate
from kvloom.types.verbs import VERBS, Done, FrameEncoder, Verb


class GenerateVerb:
    """The verb start_generate as plain ASGI: what runs once a token is one encoding and one send."""

    def __init__(self, client: EngineClient, max_body: int) -> None:
        self._client = client
        self._max_body = max_body
        self._forms: dict[str, Framed | Lines] = {MSGPACK: Framed(), JSON: Lines()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = decode(request, await read_body(request, self._max_body), StartGenerate)
        note(scope, body)
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


class Framed(FrameEncoder):
    """The form of a stream for gateways."""

    media: ClassVar[bytes] = MSGPACK.encode()


class Lines:
    """The form of a stream for curl: a JSON array of events a line, or the error's object."""

    media: ClassVar[bytes] = b"application/x-ndjson"

    def events(self, events: list[Event]) -> bytes:
        return msgspec.json.encode(events) + b"\n"

    def error(self, error: KvloomError) -> bytes:
        return msgspec.json.encode(error.to_wire()) + b"\n"


MAX_BODY = 16 << 20


def create_verbs(
    client: EngineClient,
    *,
    secret: str,
    max_body: int = MAX_BODY,
    lend: Callable[[Borrow], Coroutine[Any, Any, Loan]] | None = None,
    take_back: Callable[[HandBack], Coroutine[Any, Any, object]] | None = None,
) -> Starlette:
    """Returns the app of one engine, which refuses whoever does not know `secret`.

    `lend` and `take_back` answer engines that borrow of this one; nobody else may ask them.
    """
    routes = verb_routes(client, max_body)
    if lend is not None:
        routes.append(_route(LEND, lend, max_body))
    if take_back is not None:
        routes.append(_route(TAKE_BACK, take_back, max_body))
    return Starlette(
        routes=[Mount(VERBS_PATH, routes=routes)],
        middleware=[Middleware(Guard, secret=secret)],
        exception_handlers={
            KvloomError: on_kvloom_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: _fail,
        },
    )


def verb_routes(client: EngineClient, max_body: int = MAX_BODY) -> list[Route]:
    """Returns a route for each verb of one engine."""
    return [
        Route("/start_generate", GenerateVerb(client, max_body), methods=["POST"]),
        Route("/health", _healthy, methods=["GET"]),
        *(_route(verb, partial(verb.ask, client), max_body) for verb in VERBS),
    ]


def _route(verb: Verb[Any, Any], ask: Callable[[Any], Coroutine[Any, Any, object]], max_body: int) -> Route:
    async def endpoint(request: Request) -> Response:
        body = None if verb.reports else decode(request, await read_body(request, max_body), verb.body)
        if body is not None:
            note(request.scope, body)
        asked = ask(body)
        return answer(request, await (while_connected(request.receive, asked) if verb.waits else asked))

    return Route(f"/{verb.name}", endpoint, methods=["GET" if verb.reports else "POST"])


async def _healthy(request: Request) -> Response:
    return answer(request, Done())


class Guard:
    """An ASGI middleware that lets in peers who speak this protocol and know the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._expected = f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._check(dict(scope["headers"]))):
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: dict[bytes, bytes]) -> KvloomError | None:
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return Unauthorized(
                "authorization: `Bearer` and the secret made when this fleet started is needed"
            )
        version = headers.get(b"kvloom-protocol", b"").decode("latin-1")
        if version != PROTOCOL:
            return BadRequest(
                f"kvloom-protocol: this engine speaks {PROTOCOL}, the caller {version or 'none'}"
            )
        return None


async def _fail(request: Request, _: Exception) -> Response:
    """Answers a caller whose request met a bug, which the server logs."""
    return error_response(request.scope, KvloomError("the engine failed at this request; its log says how"))

"""The verbs over HTTP, as an engine process serves them to its gateways.

start_generate answers with a chunked stream: frames (core.frames), or lines of JSON.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.errors import error_response, on_http_error, on_kvloom_error
from kvloom.api.stream import while_connected
from kvloom.api.wire import JSON, MSGPACK, VERBS, Body, answer, decode, media, read_body
from kvloom.core.client import EngineClient
from kvloom.core.errors import BadRequest, KvloomError, Unauthorized
from kvloom.core.frames import FrameEncoder
from kvloom.core.request import PROTOCOL, Event, StartGenerate
from kvloom.core.verbs import (
    Held,
    Hold,
    Lease,
    Offer,
    Pin,
    Prefix,
    PrepRecv,
    RemoteSend,
    Renew,
    Resume,
    Standing,
    Unpin,
)
from kvloom.core.weaving import Borrow, Loan

MAX_BODY = 16 << 20

Endpoint = Callable[[Request], Awaitable[Response]]
Call = Callable[[Body], Coroutine[Any, Any, object]]


class Abort(msgspec.Struct, frozen=True):
    """Body of the verb abort: the whole request, or one choice of it."""

    request: str
    choice: int | None = None


class Done(msgspec.Struct, frozen=True):
    """Answer of a verb that has nothing to say."""

    ok: bool = True


def create_verbs(
    client: EngineClient,
    *,
    secret: str,
    max_body: int = MAX_BODY,
    lend: Callable[[Borrow], Coroutine[Any, Any, Loan]] | None = None,
) -> Starlette:
    """The app of one engine. Who does not know `secret` is refused. lend: what it does for engines that
    borrow of it, and nobody else is to ask."""
    routes = verb_routes(client, max_body)
    if lend is not None:
        routes.append(Route("/lend", _verb(Borrow, lend, max_body), methods=["POST"]))
    return Starlette(
        routes=[Mount(VERBS, routes=routes)],
        middleware=[Middleware(Guard, secret=secret)],
        exception_handlers={
            KvloomError: on_kvloom_error,
            HTTPException: on_http_error,
            Exception: _fail,
        },
    )


def verb_routes(client: EngineClient, max_body: int = MAX_BODY) -> list[Route]:
    """A route for each verb of one engine. A caller of `waits` who hangs up has changed its mind."""

    def verb(
        kind: type[Body], call: Callable[[Body], Coroutine[Any, Any, object]], *, waits: bool = False
    ) -> Endpoint:
        return _verb(kind, call, max_body, waits=waits)

    def report(call: Callable[[], Awaitable[object]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return answer(request, await call())

        return endpoint

    async def abort(body: Abort) -> Done:
        await client.abort(body.request, body.choice)
        return Done()

    async def renew(body: Renew) -> Lease:
        return await client.renew(body.request)

    async def unpin(body: Unpin) -> Held:
        return await client.unpin(body.request)

    async def hold(body: Hold) -> Standing:
        return await client.hold(body.request, body.sends)

    async def resume(body: Resume) -> Done:
        await client.resume(body.request)
        return Done()

    async def health() -> Done:
        return Done()

    return [
        Route("/start_generate", GenerateVerb(client, max_body), methods=["POST"]),
        Route("/prep_recv", verb(PrepRecv, client.prep_recv), methods=["POST"]),
        Route("/remote_send", verb(RemoteSend, client.remote_send, waits=True), methods=["POST"]),
        Route("/abort", verb(Abort, abort), methods=["POST"]),
        Route("/renew", verb(Renew, renew), methods=["POST"]),
        Route("/pin", verb(Pin, client.pin), methods=["POST"]),
        Route("/unpin", verb(Unpin, unpin), methods=["POST"]),
        Route("/hold", verb(Hold, hold), methods=["POST"]),
        Route("/resume", verb(Resume, resume), methods=["POST"]),
        Route("/offer", verb(Offer, client.offer), methods=["POST"]),
        Route("/evict", verb(Prefix, client.evict), methods=["POST"]),
        Route("/models", report(client.models), methods=["GET"]),
        Route("/load", report(client.load), methods=["GET"]),
        Route("/health", report(health), methods=["GET"]),
    ]


def _verb(
    kind: type[Body],
    call: Callable[[Body], Coroutine[Any, Any, object]],
    max_body: int,
    *,
    waits: bool = False,
) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        work = call(decode(request, await read_body(request, max_body), kind))
        return answer(request, await (while_connected(request.receive, work) if waits else work))

    return endpoint


class Guard:
    """Lets in peers that speak this protocol and know the secret."""

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


async def _fail(request: Request, _: Exception) -> Response:
    """A bug; the server logs it."""
    return error_response(request.scope, KvloomError("the engine failed at this request; its log says how"))

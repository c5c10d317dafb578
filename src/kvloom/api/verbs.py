"""The verbs over HTTP, as an engine process serves them to its gateways."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.errors import error_response, on_http_error, on_kvloom_error
from kvloom.api.generate_verb import GenerateVerb
from kvloom.api.stream import while_connected
from kvloom.api.wire import VERBS, Body, answer, decode, read_body
from kvloom.offload.terms import Borrow, Loan
from kvloom.types.client import EngineClient
from kvloom.types.errors import BadRequest, KvloomError, Unauthorized
from kvloom.types.request import PROTOCOL
from kvloom.types.verbs import (
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

MAX_BODY = 16 << 20

Endpoint = Callable[[Request], Awaitable[Response]]
Call = Callable[[Any], Coroutine[Any, Any, object]]


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
    """A route for each verb of one engine. A caller of one that `waits` who hangs up has changed its mind."""
    calls = _Calls(client)

    def verb(name: str, kind: type[Body], call: Call, *, waits: bool = False) -> Route:
        return Route(f"/{name}", _verb(kind, call, max_body, waits=waits), methods=["POST"])

    return [
        Route("/start_generate", GenerateVerb(client, max_body), methods=["POST"]),
        verb("prep_recv", PrepRecv, client.prep_recv),
        verb("remote_send", RemoteSend, client.remote_send, waits=True),
        verb("abort", Abort, calls.abort),
        verb("renew", Renew, calls.renew),
        verb("pin", Pin, client.pin),
        verb("unpin", Unpin, calls.unpin),
        verb("hold", Hold, calls.hold, waits=True),
        verb("resume", Resume, calls.resume),
        verb("offer", Offer, client.offer),
        verb("evict", Prefix, client.evict),
        Route("/models", _report(client.models), methods=["GET"]),
        Route("/load", _report(client.load), methods=["GET"]),
        Route("/health", _report(calls.health), methods=["GET"]),
    ]


class _Calls:
    """Verbs whose body an engine's client takes apart."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def abort(self, body: Abort) -> Done:
        await self._client.abort(body.request, body.choice)
        return Done()

    async def renew(self, body: Renew) -> Lease:
        return await self._client.renew(body.request)

    async def unpin(self, body: Unpin) -> Held:
        return await self._client.unpin(body.request)

    async def hold(self, body: Hold) -> Standing:
        return await self._client.hold(body.request, body.sends)

    async def resume(self, body: Resume) -> Done:
        await self._client.resume(body.request)
        return Done()

    async def health(self) -> Done:
        return Done()


def _report(call: Callable[[], Awaitable[object]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return answer(request, await call())

    return endpoint


def _verb(
    kind: type[Body],
    call: Call,
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


async def _fail(request: Request, _: Exception) -> Response:
    """A bug; the server logs it."""
    return error_response(request.scope, KvloomError("the engine failed at this request; its log says how"))

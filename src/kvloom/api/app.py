"""The gateway: the OpenAI API as an ASGI application in front of an engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kvloom.api.admin import Admin
from kvloom.api.auth import Keys, RequireKey
from kvloom.api.catalog import Catalog, ServedModel
from kvloom.api.chat import ChatEndpoint
from kvloom.api.completions import CompletionEndpoint
from kvloom.api.errors import error_response, on_disconnect, on_http_error, on_kvloom_error, on_unexpected
from kvloom.api.gateway import Gateway
from kvloom.api.limits import LimitBody
from kvloom.api.metrics import CONTENT_TYPE, Metrics
from kvloom.api.openapi import describe, page
from kvloom.types.client import Server
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.load import UnitLoad

DEFAULT_MAX_BODY = 8 << 20
BODY_SECONDS = 30.0
ENGINE_SECONDS = 5.0  # after which an engine that does not answer counts as away


def create_app(
    client: Server,
    *,
    keys: Keys | None = None,
    admin: Admin | None = None,
    moves: Callable[[], Mapping[str, int]] = dict,
    max_body: int = DEFAULT_MAX_BODY,
    body_seconds: float = BODY_SECONDS,
    clock: Clock | None = None,
    unix_time: Callable[[], float] = time.time,
    random_bits: Callable[[int], int] = secrets.randbits,
) -> Starlette:
    """Holds no connection of its own: whoever makes the client closes it. moves: how many requests have been
    moved so far, by what became of that."""
    clock = clock or WallClock()
    gateway = Gateway(client, Catalog(client), Metrics(clock), clock, unix_time, random_bits)
    info = _Information(gateway, moves, int(unix_time()))
    app = Starlette(
        routes=[
            *info.routes(),
            Route("/v1/completions", CompletionEndpoint(gateway).__call__, methods=["POST"]),
            Route("/v1/chat/completions", ChatEndpoint(gateway).__call__, methods=["POST"]),
            *_Description(admin).routes(),
            *(admin.routes() if admin else ()),
        ],
        middleware=[
            Middleware(RequireKey, keys=keys or Keys()),
            Middleware(LimitBody, max_bytes=max_body, max_seconds=body_seconds),
        ],
        exception_handlers={
            KvloomError: on_kvloom_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_unexpected,
        },
    )
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class _Information:
    """The routes that only tell."""

    gateway: Gateway
    moves: Callable[[], Mapping[str, int]]
    started: int

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def models(self, _: Request) -> Response:
        served = await self.gateway.catalog.models()
        return _json({"object": "list", "data": [self._describe(model) for model in served]})

    async def model(self, request: Request) -> Response:
        return _json(self._describe(await self.gateway.catalog.get(request.path_params["name"])))

    def _describe(self, model: ServedModel) -> dict[str, object]:
        card = model.card
        return {
            "id": card.name,
            "object": "model",
            "created": self.started,
            "owned_by": "kvloom",
            "max_model_len": card.context_length,
        }

    async def health(self, request: Request) -> Response:
        try:
            loads = await self._loads()
        except KvloomError as error:
            return error_response(request.scope, Unavailable(f"the engine does not answer: {error.message}"))
        services = self.gateway.client.services
        if any(services[unit] == "up" for unit in loads):
            return _json({"status": "ok", "units": services})
        for service in ("restarting", "starting", "away"):  # requests wait for such a unit
            if service in services.values():
                return _json({"status": service, "units": services})
        said = ", ".join(f"{unit} is {service}" for unit, service in services.items())
        return error_response(request.scope, Unavailable(f"no engine takes requests: {said}"))

    async def metrics(self, _: Request) -> Response:
        try:
            loads = await self._loads()
        except KvloomError:
            loads = {}
        text = self.gateway.metrics.render(loads, self.gateway.client.services, self.moves())
        return Response(text, media_type=CONTENT_TYPE)

    async def _loads(self) -> dict[str, UnitLoad]:
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                return await self.gateway.client.loads()
        except TimeoutError:
            raise Unavailable(f"no answer from the engine in {ENGINE_SECONDS:g} s") from None


@dataclass(frozen=True, slots=True)
class _Description:
    """What can be asked for here, as the units are by now."""

    admin: Admin | None

    def routes(self) -> list[Route]:
        return [
            Route("/openapi.json", self.openapi_json, methods=["GET"]),
            Route("/docs", self.docs_page, methods=["GET"]),
        ]

    async def openapi_json(self, _: Request) -> Response:
        return _json(self._document())

    async def docs_page(self, _: Request) -> Response:
        return HTMLResponse(page(self._document()))

    def _document(self) -> dict[str, Any]:
        return describe(units=self.admin.units if self.admin else ())


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

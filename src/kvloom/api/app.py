"""The gateway's ASGI application: the OpenAI API in front of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from kvloom.api.access.log import LogRequests
from kvloom.api.access.origins import RequireJson, cors
from kvloom.api.access.proxies import TrustProxies
from kvloom.api.access.tenants import MeterRequests, access_of
from kvloom.api.access.turns import TakeTurns
from kvloom.api.admin import Admin
from kvloom.api.anthropic.messages import MessagesEndpoint
from kvloom.api.auth import Keys, RequireKey
from kvloom.api.bodies import LimitBody
from kvloom.api.catalog import NO_UNIT, Catalog, ServedModel
from kvloom.api.errors import (
    error_response,
    json_answer,
    on_disconnect,
    on_http_error,
    on_kvloom_error,
    on_unexpected,
)
from kvloom.api.generation.answering import EndpointContext
from kvloom.api.live.page import serve_page
from kvloom.api.metrics import CONTENT_TYPE, Metrics
from kvloom.api.ollama.chat import OllamaEndpoints
from kvloom.api.ollama.embed import OllamaEmbedding
from kvloom.api.ollama.models import OllamaModels, refusals
from kvloom.api.openai.chat import ChatEndpoint
from kvloom.api.openai.completions import CompletionEndpoint
from kvloom.api.openai.pooling import EmbeddingEndpoint, ScoreEndpoints
from kvloom.api.openai.responses import ResponsesEndpoint
from kvloom.api.openai.stored import ResponseStore
from kvloom.api.openai.tokens import TokenEndpoints
from kvloom.api.openapi import Documents
from kvloom.api.routes import PAGE, PUBLIC, Caller, Handler, asgi_routes
from kvloom.api.texts.prompts import Texts
from kvloom.types.client import ModelServer
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.service import NodeService

METERED: Final = frozenset(row.path for row in PUBLIC if row.caller is Caller.KEY and row.method == "POST")
"""The paths whose requests count against a key's limits."""
DEFAULT_MAX_BODY = 8 << 20
BODY_SECONDS = 30.0
ENGINE_SECONDS = 5.0  # for the engines to tell their loads


def create_app(
    client: ModelServer,
    *,
    keys: Keys | None = None,
    admin: Admin | None = None,
    moves: Callable[[], Mapping[str, int]] = dict,
    texts: Texts | None = None,
    max_body: int = DEFAULT_MAX_BODY,
    body_seconds: float = BODY_SECONDS,
    proxies: Sequence[str] = (),
    origins: Sequence[str] = (),
    certified: bool = False,
    request_seconds: float | None = None,
    access_log: Callable[[str], object] | None = None,
    metrics: Metrics | None = None,
) -> Starlette:
    """Returns the application. Whoever makes the client closes it.

    `moves` tells how many requests have been moved so far, by outcome. There are routes for `admin` if it is
    given. `texts` renders and encodes prompts; without it that is done in this process, and without limits.
    proxies: the addresses and networks of those that speak for others; origins: those whose pages may ask
    from a browser; certified: an admin needs a certificate that the listener has verified; request_seconds:
    what a completion may take, None for as long as it likes; access_log: takes a line of JSON for
    each request, without its content; metrics: those to which the application counts, its own by default.
    """
    gateway = EndpointContext(client, Catalog(client, texts), metrics or Metrics(), request_seconds)
    keys, documents = keys or Keys(), Documents(lambda: admin.units if admin else ())

    def nodes() -> dict[str, NodeService]:
        return {node.name: node.state for node in admin.orders.nodes} if admin else {}

    messages, tokens = MessagesEndpoint(gateway), TokenEndpoints(gateway)
    responses, scores = ResponsesEndpoint(gateway, ResponseStore()), ScoreEndpoints(gateway)
    info = _Information(gateway, documents, moves, nodes, keys, int(time.time()))
    ollama, ollama_models = OllamaEndpoints(gateway), OllamaModels(gateway, info.started)
    embedding = OllamaEmbedding(gateway)
    handlers: dict[str, Handler] = {
        "models": info.models,
        "model": info.model,
        "completions": CompletionEndpoint(gateway).__call__,
        "chat_completions": ChatEndpoint(gateway).__call__,
        "responses": responses.__call__,
        "response": responses.retrieve,
        "delete_response": responses.delete,
        "response_items": responses.input_items,
        "embeddings": EmbeddingEndpoint(gateway).__call__,
        **dict.fromkeys(("rerank", "rerank_v1", "rerank_v2"), scores.rerank),
        **dict.fromkeys(("score", "score_v1"), scores.score),
        "messages": messages.__call__,
        "count_tokens": messages.count,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "tokenizer_info": tokens.information,
        "ollama_chat": ollama.chat,
        "ollama_generate": ollama.generate,
        "ollama_embed": embedding.embed,
        "ollama_embeddings": embedding.embeddings,
        "ollama_tags": ollama_models.tags,
        "ollama_ps": ollama_models.ps,
        "ollama_show": ollama_models.show,
        "ollama_version": ollama_models.version,
        "health": info.health,
        "metrics": info.metrics,
        "openapi": info.openapi,
        "docs": info.docs,
        "page": serve_page,
        "page_part": serve_page,
    }
    app = Starlette(
        routes=[
            *asgi_routes((*PUBLIC, *PAGE), handlers),
            *refusals(),
            *(admin.routes() if admin else ()),
        ],
        middleware=[
            Middleware(LogRequests, write=access_log),
            # first, because it ends the connection of whoever is refused before the body has come
            Middleware(
                LimitBody,
                max_bytes=max_body,
                max_seconds=body_seconds,
                tenant_of=lambda scope: access_of(scope).tenant,
            ),
            *([Middleware(TrustProxies, proxies=proxies)] if proxies else ()),
            Middleware(TakeTurns),
            *([cors(origins)] if origins else ()),
            Middleware(RequireKey, keys=keys, origins=origins, certified=certified),
            Middleware(MeterRequests, paths=METERED),
            Middleware(RequireJson),
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
    """The handlers of routes that only tell."""

    gateway: EndpointContext
    documents: Documents
    moves: Callable[[], Mapping[str, int]]
    nodes: Callable[[], Mapping[str, NodeService]]
    keys: Keys
    started: int

    async def models(self, request: Request) -> Response:
        served = await self.gateway.catalog.models(access_of(request.scope).may_use)
        return json_answer({"object": "list", "data": [self._describe(model) for model in served]})

    async def model(self, request: Request) -> Response:
        may_use = access_of(request.scope).may_use
        return json_answer(
            self._describe(await self.gateway.catalog.get(request.path_params["model"], may_use))
        )

    def _describe(self, model: ServedModel) -> dict[str, object]:
        card = model.card
        return {
            "id": card.name,
            "object": "model",
            "created": self.started,
            "owned_by": "kvloom",
            "max_model_len": card.context_length,
            "root": card.path if card.parent else card.name,
            "parent": card.parent,
            "task": card.task,
        }

    async def health(self, request: Request) -> Response:
        try:
            loads = await self._loads()
        except KvloomError as error:
            return error_response(request.scope, Unavailable(f"the engine does not answer: {error.message}"))
        services = self.gateway.client.services
        if any(services[unit] == "up" for unit in loads):
            return json_answer({"status": "ok", "units": services})
        awaited = [services[unit] for unit in self.gateway.client.awaited]
        for service in ("restarting", "starting", "down", "away"):
            if service in awaited:
                return json_answer({"status": service, "units": services})
        said = ", ".join(f"{unit} is {service}" for unit, service in services.items()) or NO_UNIT
        return error_response(request.scope, Unavailable(f"no engine takes requests: {said}"))

    async def metrics(self, _: Request) -> Response:
        try:
            loads = await self._loads()
        except KvloomError:
            loads = {}
        tenants = self.keys.ring.tenants.items() if self.keys.ring else ()
        counts = {name: tenant.counts for name, tenant in tenants}
        client = self.gateway.client
        text = self.gateway.metrics.render(
            loads,
            client.services,
            self.moves(),
            counts,
            client.choices,
            waiting=client.waiting,
            nodes=self.nodes(),
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        return Response(self.documents.made().description, media_type="application/json")

    async def docs(self, _: Request) -> Response:
        return HTMLResponse(self.documents.made().page)

    async def _loads(self) -> dict[str, UnitLoad]:
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                return await self.gateway.client.loads()
        except TimeoutError:
            raise Unavailable(f"no answer from the engine in {ENGINE_SECONDS:g} s") from None

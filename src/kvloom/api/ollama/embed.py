"""/api/embed, and /api/embeddings, its older form: Ollama's requests for vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.bodies import parse, translated
from kvloom.api.catalog import ServedModel
from kvloom.api.generation.answering import Answering, EndpointContext
from kvloom.api.generation.resume import Origin
from kvloom.api.metrics import Watch
from kvloom.api.ollama.chat import LATEST, PREFIX, nanoseconds
from kvloom.api.openai.pooling import embeddings
from kvloom.api.schemas.ollama import EmbeddingsOfOllama, OllamaEmbedBody, OllamaEmbeddingsBody

Told = Callable[[str, list[Any], int, Watch, float], dict[str, Any]]
"""Makes an answer of the model's name, the vectors, the count of tokens, the watch, and the seconds that
passed until engines were asked."""


def _as_embeddings(
    name: str, vectors: list[Any], tokens: int, watch: Watch, prepared: float
) -> dict[str, Any]:
    return {
        "model": name,
        "embeddings": vectors,
        "total_duration": nanoseconds(watch.seconds),
        "load_duration": nanoseconds(prepared),
        "prompt_eval_count": tokens,
    }


def _as_embedding(_: str, vectors: list[Any], __: int, ___: Watch, ____: float) -> dict[str, Any]:
    return {"embedding": vectors[0]}


def _read(form: type[OllamaEmbedBody | OllamaEmbeddingsBody], raw: bytes) -> EmbeddingsOfOllama:
    """Returns the request in OpenAI's form. Raises BadRequest."""
    return translated(parse(form, raw).asked)


class OllamaEmbedding:
    def __init__(self, gateway: EndpointContext) -> None:
        self._gateway = replace(gateway, tag=LATEST)

    async def embed(self, request: Request) -> Response:
        return await self._answer(request, OllamaEmbedBody, _as_embeddings)

    async def embeddings(self, request: Request) -> Response:
        return await self._answer(request, OllamaEmbeddingsBody, _as_embedding)

    async def _answer(
        self, request: Request, form: type[OllamaEmbedBody | OllamaEmbeddingsBody], told: Told
    ) -> Response:
        return await self._gateway.answer(request, partial(_read, form), partial(self._prepare, told))

    async def _prepare(
        self,
        told: Told,
        body: EmbeddingsOfOllama,
        model: ServedModel,
        watch: Watch,
        tenant: str,
        origin: Origin,
    ) -> Answering:
        asked, body.model = body.model, model.card.name

        def write(_: dict[str, Any], vectors: list[Any], usage: dict[str, int]) -> dict[str, Any]:
            return told(asked, vectors, usage["prompt_tokens"], watch, prepared)

        answering = await embeddings(self._gateway, PREFIX, origin, body, model, tenant, watch, write)
        prepared = watch.seconds
        return answering

"""/api/tags, /api/ps, /api/show and /api/version: what Ollama's clients ask about models; and the paths that
would change them, which are refused."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvloom.api.access.tenants import access_of
from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import OLLAMA_PATH, NotServed, json_answer
from kvloom.api.generation.answering import EndpointContext
from kvloom.api.ollama.chat import LATEST, instant
from kvloom.api.schemas.ollama import OllamaShowBody
from kvloom.types.errors import KvloomError
from kvloom.types.load import UnitLoad

API_VERSION: Final = "0.12.0"
"""The version of Ollama's API that this one follows; some clients refuse older ones."""
LOAD_SECONDS: Final = 5.0  # for the engines to tell their loads
_NEVER: Final = "9999-12-31T23:59:59Z"
_REFUSED: Final = ("pull", "push", "create", "copy", "delete", "blobs/{digest:path}")
_METHODS: Final = ("POST", "DELETE", "GET")
_SIZES: Final = (("B", 10**9), ("M", 10**6), ("K", 10**3))


def refusals() -> list[BaseRoute]:
    """Returns the routes of what is not served."""
    return [Route(f"{OLLAMA_PATH}/{name}", _refuse, methods=_METHODS) for name in _REFUSED]


async def _refuse(request: Request) -> Response:
    raise NotServed(
        f"{request.url.path}: models are not changed by Ollama's API; the server's config names them, and "
        "`kvloom model add` and `kvloom model remove` change them"
    )


@dataclass(frozen=True, slots=True)
class OllamaModels:
    gateway: EndpointContext
    started: int
    """The time at which the gateway started, in seconds since 1970."""

    async def tags(self, request: Request) -> Response:
        served = await self.gateway.catalog.models(access_of(request.scope).may_use)
        changed = {"modified_at": instant(self.started)}
        return json_answer({"models": [_named(model) | changed for model in served]})

    async def ps(self, request: Request) -> Response:
        served = await self.gateway.catalog.models(access_of(request.scope).may_use)
        asleep = _asleep((await self._loads()).values())
        return json_answer(
            {
                "models": [
                    _named(model)
                    | {
                        "expires_at": _NEVER,
                        "size_vram": 0,
                        "context_length": model.card.context_length,
                    }
                    for model in served
                    if (model.card.parent or model.card.name) not in asleep
                ]
            }
        )

    async def show(self, request: Request) -> Response:
        body = await self.gateway.read_form(request, partial(parse, OllamaShowBody))
        model = await self.gateway.catalog.get(body.named, access_of(request.scope).may_use, LATEST)
        card, family = model.card, _family(model)
        return json_answer(
            {
                "modelfile": "",
                "parameters": _parameters(model),
                "template": card.chat_template or "",
                "details": _details(model),
                "model_info": {
                    "general.architecture": family,
                    "general.parameter_count": card.parameters,
                    f"{family}.context_length": card.context_length,
                    f"{family}.vocab_size": card.vocab_size,
                    **({f"{family}.embedding_length": card.dimensions} if card.task == "embed" else {}),
                },
                "capabilities": _capabilities(model),
                "modified_at": instant(self.started),
            }
        )

    async def version(self, _: Request) -> Response:
        return json_answer({"version": API_VERSION})

    async def _loads(self) -> dict[str, UnitLoad]:
        """Returns the loads of the units that tell them."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return await self.gateway.client.loads()
        except (TimeoutError, KvloomError):
            return {}


def _asleep(loads: Iterable[UnitLoad]) -> set[str]:
    """Returns the models whose weights are known to sleep wherever they are."""
    awake, asleep = set[str](), set[str]()
    for load in loads:
        for name, model in load.models.items():
            (awake if model.weights is None or model.weights.awake else asleep).add(name)
    return asleep - awake


def _named(model: ServedModel) -> dict[str, Any]:
    card = model.card
    form = repr((card.name, card.path, card.architecture, card.parameters, card.dtype)).encode()
    return {
        "name": card.name,
        "model": card.name,
        "size": 0,
        "digest": hashlib.sha256(form).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    card, family = model.card, _family(model)
    return {
        "parent_model": card.parent or "",
        "format": "gguf" if card.path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(card.parameters),
        "quantization_level": card.dtype,
    }


def _family(model: ServedModel) -> str:
    """Returns the architecture in Ollama's words: `llama` of `LlamaForCausalLM`."""
    return model.card.architecture.partition("For")[0].lower()


def _size(parameters: int) -> str:
    for letter, unit in _SIZES:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _parameters(model: ServedModel) -> str:
    """Returns the model's own sampling parameters under Ollama's names."""
    ours = model.card.sampling
    told = {
        "temperature": ours.temperature,
        "top_k": ours.top_k,
        "top_p": ours.top_p,
        "min_p": ours.min_p,
        "repeat_penalty": ours.repetition_penalty,
    }
    return "\n".join(f"{name} {value}" for name, value in told.items())


def _capabilities(model: ServedModel) -> list[str]:
    if model.card.task != "generate":
        return ["embedding"] if model.card.task == "embed" else []
    tools = ["tools"] if model.answer_format.tool_calls is not None else []
    return ["completion", *tools, *(["thinking"] if model.answer_format.thinks else [])]

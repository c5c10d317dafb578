"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: what a model's tokenizer makes of texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.access.tenants import access_of
from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.errors import json_answer
from kvloom.api.generation.answering import EndpointContext
from kvloom.api.generation.chat import prompt_of
from kvloom.api.schemas.chat import DetokenizeBody, TokenizeBody
from kvloom.api.stream import while_connected
from kvloom.api.texts.prompts import PlainPrompt, Prompt
from kvloom.types.errors import BadRequest


@dataclass(frozen=True, slots=True)
class TokenEndpoints:
    gateway: EndpointContext

    async def tokenize(self, request: Request) -> Response:
        body = await self.gateway.read_form(request, partial(parse, TokenizeBody))
        access = access_of(request.scope)
        model = await self.gateway.catalog.chosen(body.model, access.may_use)
        prompt: Prompt
        if body.messages is None:
            special = body.add_special_tokens is not False
            prompt = PlainPrompt(body.prompt or "", special=special, bounded=False)
        else:
            options = {"add_generation_prompt": body.add_generation_prompt is not False}
            options |= body.chat_template_kwargs or {}
            prompt = prompt_of(model, body.messages, body.tools or [], options, bounded=False)
        tokens = await while_connected(request.receive, model.tokens(prompt, access.tenant))
        words = [model.tokenizer.token_word(one) for one in tokens] if body.return_token_strs else None
        return json_answer(
            {
                "count": len(tokens),
                "max_model_len": model.card.context_length,
                "tokens": tokens,
                "token_strs": words,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self.gateway.read_form(request, partial(parse, DetokenizeBody))
        access = access_of(request.scope)
        model = await self.gateway.catalog.chosen(body.model, access.may_use)
        size = model.card.vocab_size
        if (most := max(body.tokens, default=0)) >= size:
            raise BadRequest(f"tokens: token {most} is not in the vocabulary of {size}", param="tokens")
        decode = partial(model.tokenizer.decode, body.tokens, keep_special=True)
        decoding = self.gateway.pace.run(access.tenant, decode)
        return json_answer({"prompt": await while_connected(request.receive, decoding)})

    async def information(self, request: Request) -> Response:
        name = request.query_params.get("model")
        return json_answer(
            _information(await self.gateway.catalog.chosen(name, access_of(request.scope).may_use))
        )


def _information(model: ServedModel) -> dict[str, Any]:
    """Returns what of a `tokenizer_config.json` a client needs to make prompts of its own."""
    card = model.card
    return {
        **card.special_tokens,
        "model": card.name,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": card.add_bos,
        "chat_template": card.chat_template,
        "model_max_length": card.context_length,
        "vocab_size": card.vocab_size,
    }

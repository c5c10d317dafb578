"""The models that the engines serve, with what a gateway needs to speak for each."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.api.tokenizer import Tokenizer
from kvloom.api.tools import Family, family_of
from kvloom.types.client import ModelServer
from kvloom.types.errors import BadRequest, ConfigError, Unavailable, UnknownModel
from kvloom.types.request import ModelCard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family | None

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the text's tokens. Raises BadRequest if there are none.

        `special` adds what the model wants around plain text, which a chat template has added already.
        """
        ids, bos = await self.tokenizer.encode(text, special=special), self.card.bos_token_id
        if bos is None and not ids:
            raise BadRequest(
                f"the prompt is empty and model {self.card.name} has no token to begin with", param="prompt"
            )
        missing = special and self.card.add_bos and ids[:1] != [bos]
        return [bos, *ids] if bos is not None and (missing or not ids) else ids


@dataclass(frozen=True, slots=True)
class UnreadableModel:
    """A model that an engine serves, but whose tokenizer no gateway can read."""

    card: ModelCard
    why: str


def _any(_: str) -> bool:
    return True


class Catalog:
    """Knows the models that the engines serve.

    The server is asked for all models, and again for a name that it does not know: models come and go. A
    model that cannot be read is not listed, and whoever asks for it by name is told why. Models with equal
    tokenizers share one, which takes tens of megabytes for a large vocabulary.
    """

    def __init__(self, client: ModelServer) -> None:
        self._client = client
        self._models: dict[str, ServedModel | UnreadableModel] = {}
        self._asking = asyncio.Lock()

    async def models(self, may_use: Callable[[str], bool] = _any) -> list[ServedModel]:
        """Returns the models of which the caller may know."""
        await self._refresh()
        return self._readable(may_use)

    async def get(self, name: str, may_use: Callable[[str], bool] = _any) -> ServedModel:
        """To a caller that may not use it, a model is as one that there is not."""
        if name not in self._models or not may_use(name):
            await self._refresh()
        found = self._models.get(name) if may_use(name) else None
        if found is None:
            served = ", ".join(sorted(model.card.name for model in self._readable(may_use))) or "none"
            raise UnknownModel(f"the model '{name[:200]}' does not exist; served: {served}", param="model")
        if isinstance(found, UnreadableModel):
            raise Unavailable(found.why, param="model")
        return found

    def _readable(self, may_use: Callable[[str], bool] = _any) -> list[ServedModel]:
        return [
            model for name, model in self._models.items() if isinstance(model, ServedModel) and may_use(name)
        ]

    async def _refresh(self) -> None:
        async with self._asking:
            cards = await self._client.models()
            tokenizers = {model.card.tokenizer: model.tokenizer for model in self._readable()}
            self._models = {card.name: await self._read(card, tokenizers) for card in cards}

    async def _read(self, card: ModelCard, tokenizers: dict[str, Tokenizer]) -> ServedModel | UnreadableModel:
        """Reads a model that is new or has changed. tokenizers: those that have been read, by their text."""
        known = self._models.get(card.name)
        if known is not None and known.card == card:
            return known
        try:
            if card.tokenizer not in tokenizers:
                # Reading a large one takes a second; the loop has streams to serve meanwhile.
                tokenizers[card.tokenizer] = await asyncio.to_thread(Tokenizer, card.tokenizer)
        except ConfigError as error:
            why = f"model {card.name}: {error.message}"
            log.error("%s", why)
            return UnreadableModel(card, why)
        tokenizer = tokenizers[card.tokenizer]
        return ServedModel(card, tokenizer, ChatTemplate(card), family_of(card.chat_template))


MAX_RENDERED = 16 << 20  # characters, after which a template is stopped


# A template that is wrong, or is given what it does not expect, may raise these beside jinja2's own errors.
_BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class _Generation(Extension):
    """Reads {% generation %}, which marks the assistant's words for training, as its body."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders a model's own chat template as transformers does, in a sandbox.

    The template is compiled on first use. If it does not compile, each request is answered with 400.
    """

    def __init__(self, card: ModelCard) -> None:
        self.text = card.chat_template
        self._name = card.name
        self._special = dict(card.special_tokens)
        self._environment = _environment()
        self._compiled: Template | None = None

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        """Returns the prompt. Raises BadRequest if there is no template or if it fails.

        `options` are the template's own switches, which cannot replace messages, tools or tokens.
        """
        if self.text is None:
            raise BadRequest(
                f"model {self._name} has no chat template: use /v1/completions", param="messages"
            )
        given = {"add_generation_prompt": True} | options | self._special
        given |= {"messages": messages, "tools": tools}
        try:
            pieces, size = [], 0
            self._compiled = self._compiled or self._environment.from_string(self.text)
            for piece in self._compiled.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise BadRequest("the chat template wrote too long a text", param="messages")
        except TemplateError as error:
            raise BadRequest(f"chat template of {self._name}: {error}", param="messages") from None
        except _BROKEN as error:
            kind = type(error).__name__
            raise BadRequest(f"chat template of {self._name}: {kind}: {error}", param="messages") from None
        return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment

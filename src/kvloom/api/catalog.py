"""The models that the engines serve, with what a gateway needs to speak for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kvloom.api.answers.reader import AnswerFormat
from kvloom.api.texts.prompts import InlineTexts, Prompt, TextModel, Texts, grouped
from kvloom.api.texts.template import ChatTemplate
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.client import ModelServer
from kvloom.types.errors import BadRequest, ConfigError, KvloomError, Unavailable, UnknownModel
from kvloom.types.request import ModelCard

NO_UNIT: Final = "the fleet has no unit; `kvloom config apply` adds some"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel(TextModel):
    answer_format: AnswerFormat
    key: str
    texts: Texts

    async def tokens(self, prompt: Prompt, tenant: str = "") -> list[int]:
        """Returns the prompt's tokens, as `tokens_of` yields them."""
        (tokens,) = [tokens async for tokens in self.tokens_of([prompt], tenant)]
        return tokens

    async def tokens_of(self, prompts: Sequence[Prompt], tenant: str = "") -> AsyncGenerator[list[int]]:
        """Yields each prompt's tokens, at most as many as the context has if it is bounded. tenant: who asks.
        Raises BadRequest, QueueFull, Unavailable, and PromptTooLong before anything is done with prompts
        of which one's bytes cannot fit."""
        for prompt in prompts:
            if prompt.bounded:
                self.check_size(prompt.size, prompt.most_times, prompt.param)
        for group in grouped(prompts):
            for tokens in await self.texts.encode(self.key, self, group, tenant):
                yield tokens


@dataclass(frozen=True, slots=True)
class UnreadableModel:
    """A model that an engine serves, but whose tokenizer no gateway can read or use."""

    card: ModelCard
    why: str


@dataclass(frozen=True, slots=True)
class UnreadModel:
    """A model that an engine serves, and for which nobody has asked yet."""

    card: ModelCard
    key: str
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


def _any(_: str) -> bool:
    return True


class Catalog:
    """Knows the models that the engines serve.

    The server is asked for all models, and again for a name that it does not know: models come and go. A
    model is read when it is first asked for, so that a request waits for the tokenizer of its own model only.
    One that cannot be read is not listed, and whoever asks for it by name is told why. Models with equal
    tokenizers share one, which takes tens of megabytes for a large vocabulary.
    """

    def __init__(self, client: ModelServer, texts: Texts | None = None) -> None:
        self._client = client
        self._texts = texts or InlineTexts()
        self._models: dict[str, ServedModel | UnreadableModel | UnreadModel] = {}
        self._asking = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._numbers = count()

    async def models(self, may_use: Callable[[str], bool] = _any) -> list[ServedModel]:
        """Returns the models of which the caller may know."""
        await self._refresh()
        unread = [
            model for name, model in self._models.items() if isinstance(model, UnreadModel) and may_use(name)
        ]
        await asyncio.gather(*map(self._read, unread))
        return self._readable(may_use)

    async def get(self, name: str, may_use: Callable[[str], bool] = _any, tag: str = "") -> ServedModel:
        """Returns a model. tag: an end that a name may have if no model has the whole name. Raises
        UnknownModel if there is none or the caller may not use it, in the same words, and Unavailable if it
        cannot be read."""
        if name not in self._models or not may_use(name):
            await self._refresh()
        found = self._models.get(name) if may_use(name) else None
        if isinstance(found, UnreadModel):
            found = await self._read(found)
        if found is None and tag and name.endswith(tag):
            return await self.get(name.removesuffix(tag), may_use)
        if found is None:
            names = sorted(one for one, model in self._models.items() if _may_serve(model) and may_use(one))
            raise UnknownModel.named(name, names)
        if isinstance(found, UnreadableModel):
            raise Unavailable(found.why, param="model")
        return found

    async def card(self, name: str, may_use: Callable[[str], bool] = _any, tag: str = "") -> ModelCard | None:
        """Returns the card of a model that is known already, or None; `tag` is as in `get`. Units are asked
        only if no model is known yet."""
        if name and not self._models:
            with suppress(KvloomError):
                await self._refresh()
        found = self._models.get(name) if may_use(name) else None
        if found is None and tag and name.endswith(tag):
            return await self.card(name.removesuffix(tag), may_use)
        return None if found is None else found.card

    async def chosen(self, name: str | None, may_use: Callable[[str], bool] = _any) -> ServedModel:
        """Returns a model, or the only one if none is named. Raises BadRequest if there are several."""
        if name is not None:
            return await self.get(name, may_use)
        served = await self.models(may_use)
        if len(served) != 1:
            names = ", ".join(sorted(one.card.name for one in served)) or "none"
            raise BadRequest(f"model: one has to be named, of those that are served: {names}", param="model")
        return served[0]

    def _readable(self, may_use: Callable[[str], bool] = _any) -> list[ServedModel]:
        return [
            model for name, model in self._models.items() if isinstance(model, ServedModel) and may_use(name)
        ]

    async def _refresh(self) -> None:
        async with self._asking:
            if not self._client.services:
                raise Unavailable(NO_UNIT, retry_after=1)
            cards = await self._client.models()
            self._models = {card.name: self._known(card) for card in cards}

    def _known(self, card: ModelCard) -> ServedModel | UnreadableModel | UnreadModel:
        """Returns what is known of a model, which is nothing if it is new or has changed."""
        known = self._models.get(card.name)
        if known is not None and known.card == card:
            return known
        return UnreadModel(card, f"{next(self._numbers)} {card.name}")

    async def _read(self, unread: UnreadModel) -> ServedModel | UnreadableModel:
        name = unread.card.name
        async with unread.reading:
            if isinstance(known := self._models.get(name), ServedModel | UnreadableModel):
                return known
            try:
                found: ServedModel | UnreadableModel = await self._made(unread)
            except ConfigError as error:
                found = UnreadableModel(unread.card, f"model {name}: {error.message}")
                log.error("%s", found.why)
            if self._models.get(name) is unread:
                self._models[name] = found
            return found

    async def _made(self, unread: UnreadModel) -> ServedModel:
        """Raises ConfigError."""
        card = unread.card
        await self._texts.admit(unread.key, card)
        async with self._loading:
            equal = [one.tokenizer for one in self._readable() if one.card.tokenizer == card.tokenizer]
            # Reading a large one takes a second; the loop has streams to serve meanwhile.
            tokenizer = equal[0] if equal else await asyncio.to_thread(Tokenizer, card.tokenizer)
            answer_format = AnswerFormat.of(card.chat_template)
            made = ServedModel(card, tokenizer, ChatTemplate(card), answer_format, unread.key, self._texts)
            if self._models.get(card.name) is unread:
                self._models[card.name] = made
            return made


def _may_serve(model: ServedModel | UnreadableModel | UnreadModel) -> bool:
    return not isinstance(model, UnreadableModel)

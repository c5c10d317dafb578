"""The models the engine serves, with what a gateway needs to speak for each."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvloom.api.chat_template import ChatTemplate
from kvloom.api.tokenizer import Tokenizer
from kvloom.api.tool_families import Family, family_of
from kvloom.types.client import Server
from kvloom.types.errors import ConfigError, Unavailable, UnknownModel
from kvloom.types.request import ModelCard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family | None


@dataclass(frozen=True, slots=True)
class UnreadableModel:
    """The engine serves it, but no gateway can speak for it."""

    card: ModelCard
    why: str


class Catalog:
    """Asks the server for all models, and again for a name that it does not know: models come and go. A model
    that cannot be read is not listed, and whoever asks for it by name is told why."""

    def __init__(self, client: Server) -> None:
        self._client = client
        self._models: dict[str, ServedModel | UnreadableModel] = {}
        self._asking = asyncio.Lock()

    async def models(self) -> list[ServedModel]:
        await self._refresh()
        return self._readable()

    async def get(self, name: str) -> ServedModel:
        if name not in self._models:
            await self._refresh()
        found = self._models.get(name)
        if found is None:
            served = ", ".join(sorted(model.card.name for model in self._readable())) or "none"
            raise UnknownModel(f"the model '{name[:200]}' does not exist; served: {served}", param="model")
        if isinstance(found, UnreadableModel):
            raise Unavailable(found.why, param="model")
        return found

    def _readable(self) -> list[ServedModel]:
        return [model for model in self._models.values() if isinstance(model, ServedModel)]

    async def _refresh(self) -> None:
        async with self._asking:
            cards = await self._client.models()
            # Reading a large tokenizer takes a second; the loop has streams to serve meanwhile.
            self._models = {card.name: await self._read(card) for card in cards}

    async def _read(self, card: ModelCard) -> ServedModel | UnreadableModel:
        known = self._models.get(card.name)
        if known is not None and known.card == card:
            return known
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, card)
        except ConfigError as error:
            log.error("%s", error.message)
            return UnreadableModel(card, error.message)
        return ServedModel(card, tokenizer, ChatTemplate(card), family_of(card.chat_template))

"""The models the engine serves, with what a gateway needs to speak for each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvloom.api.chat_template import ChatTemplate
from kvloom.api.tokenizer import Tokenizer
from kvloom.api.tool_families import Family, family_of
from kvloom.core.client import EngineClient
from kvloom.core.clock import Clock
from kvloom.core.errors import UnknownModel
from kvloom.core.request import ModelCard

FRESH_SECONDS = 5.0  # a name is not asked for again within this time


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family | None


class Catalog:
    """Asks the engine once, and again for a name it does not know."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._models: dict[str, ServedModel] = {}
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()

    async def models(self) -> list[ServedModel]:
        await self._refresh()
        return list(self._models.values())

    async def get(self, name: str) -> ServedModel:
        if name not in self._models:
            await self._refresh()
        found = self._models.get(name)
        if found is None:
            served = ", ".join(sorted(self._models)) or "none"
            raise UnknownModel(f"the model '{name[:200]}' does not exist; served: {served}", param="model")
        return found

    async def _refresh(self) -> None:
        async with self._asking:
            now = self._clock.now()
            if self._asked_at is not None and now - self._asked_at < FRESH_SECONDS:
                return
            cards = await self._client.models()
            # Reading a large tokenizer takes a second; the loop has streams to serve meanwhile.
            self._models = {card.name: await self._serve(card) for card in cards}
            self._asked_at = now

    async def _serve(self, card: ModelCard) -> ServedModel:
        known = self._models.get(card.name)
        if known is not None and known.card == card:
            return known
        tokenizer = await asyncio.to_thread(Tokenizer, card)
        return ServedModel(card, tokenizer, ChatTemplate(card), family_of(card.chat_template))

"""A model on one unit, and what this router has asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from kvloom.types.client import EngineClient
from kvloom.types.errors import Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.transfer import KVForm

if TYPE_CHECKING:
    from kvloom.router.report import Report
    from kvloom.router.unit import Unit

CALL_TOKENS: Final = 128  # what a call in flight weighs, in prompt tokens


class Replica:
    """calls: in flight there, from the first reservation on. queue: prompt tokens that it is to compute for
    requests that a program has sent its way, from their first verb on: for one that sends until all has
    arrived, for one that generates until its first token. They count whole till then, because engines do not
    tell how far they are; those that it probably has cached do not count. turn: when it was last chosen,
    against its peers."""

    def __init__(self, unit: Unit, card: ModelCard) -> None:
        self.card = card
        self.calls = 0
        self.queue = 0
        self.turn = 0
        self._unit = unit

    def __repr__(self) -> str:
        return f"{self.card.name} on {self.name}"

    @property
    def name(self) -> str:
        """The unit's."""
        return self._unit.name

    @property
    def client(self) -> EngineClient:
        return self._unit.client

    @property
    def form(self) -> KVForm | None:
        return self.card.form

    @property
    def up(self) -> bool:
        return self._unit.up

    @property
    def failed(self) -> bool:
        """Its unit could not be started just now."""
        return not self._unit.may_start

    @property
    def awaited(self) -> bool:
        return self._unit.awaited and self.card.name in self._unit.replicas

    @property
    def lost(self) -> bool:
        return self._unit.lost

    async def check(self) -> None:
        """Whether it is still there, and takes requests."""
        await self._unit.check()

    @property
    def report(self) -> Report:
        return self._unit.report

    @property
    def load(self) -> int:
        """Tokens."""
        return self.queue + CALL_TOKENS * self.calls

    def begin_call(self) -> None:
        self.calls += 1
        self._unit.begin_call()

    def end_call(self) -> None:
        self.calls -= 1
        self._unit.end_call()

    @asynccontextmanager
    async def reached(self) -> AsyncIterator[None]:
        """Where what is done here shows that the unit might be gone, it is asked."""
        try:
            yield
        except Unavailable as error:
            await self._unit.check()
            raise Unavailable(f"{self.name}: {error.message}", retry_after=error.retry_after) from error

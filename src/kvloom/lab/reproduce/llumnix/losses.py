"""Llumnix's preemption loss: the time for which a preempted request waits again and is computed again
(sections 3 and 6.3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from kvloom.journal.records import Preempted, Record
from kvloom.types.client import Frames, Generator
from kvloom.types.request import Event, ModelCard, StartGenerate, TokenEvent

ON_THE_WAY: Final = 0.01
"""Seconds within which a frame that comes holds tokens from before the preemption. Computing a prompt again
takes longer."""


class PreemptionLosses:
    """Satisfies `Generator`, and notes how long each preempted request waits for its next token."""

    def __init__(self, server: Generator, now: Callable[[], float]) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """The losses of each request that was preempted, by its name."""
        self._server = server
        self._now = now
        self._since: dict[str, float] = {}  # when a request that stands still was preempted

    async def models(self) -> list[ModelCard]:
        return await self._server.models()

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self._server.abort(request, choice)

    def start_generate(self, body: StartGenerate) -> Frames:
        return self._watched(body)

    def keep(self, records: Sequence[Record]) -> None:
        """Takes what is new in the fleet's journal. A request that is preempted before its next token has
        come has one loss."""
        for record in records:
            if isinstance(record.event, Preempted):
                self._since.setdefault(record.event.request.partition("~")[0], record.at)

    async def _watched(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._server.start_generate(body)) as frames:
            async for frame in frames:
                lost = self._now() - self._since.get(body.request, self._now())
                if lost > ON_THE_WAY and any(isinstance(event, TokenEvent) for event in frame):
                    self.seconds[body.request].append(lost)
                    del self._since[body.request]
                yield frame

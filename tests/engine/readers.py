"""Who reads a stream of a modelled engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kvloom.types.request import StartGenerate
from tests.engines import Answer
from tests.modelled import turns
from tests.modelled_units import Unit


class Reader:
    """Takes what a request's stream brings."""

    def __init__(self, unit: Unit, body: StartGenerate) -> None:
        self.answer = Answer(tokens={one.choice: list(one.tokens) for one in body.made})
        self.body = body
        self._unit = unit
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self._unit.engine.start_generate(self.body)) as frames:
            async for frame in frames:
                self.answer.take(frame)

    async def until(self, tokens: int) -> None:
        """Each choice has so many, or the request is over."""
        while not self.task.done() and (
            len(self.answer.tokens) < self.body.n
            or min(len(some) for some in self.answer.tokens.values()) < tokens
        ):
            await turns(1)

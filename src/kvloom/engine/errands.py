"""What is to be done to a request when none of its choices is in a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvloom.core.errors import KvloomError
from kvloom.engine.stream import Stream

T = TypeVar("T")


class Errands:
    """Of all streams of an engine."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Stream, Callable[[], None]]] = []
        self._done = False  # since `told`

    async def do(self, stream: Stream, errand: Callable[[], T]) -> T:
        """What it returns, or the KvloomError that it raises. Done at once, or when the job under way has
        landed, before the next one begins."""
        if not stream.in_job:
            return errand()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def do() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(errand())
            except KvloomError as error:
                done.set_exception(error)

        self._waiting.append((stream, do))
        return await done

    async def told(self) -> None:
        """Whoever had to wait goes on before the next job begins, which would want the core for itself; so do
        the tasks that this begins."""
        if self._done:
            self._done = False
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def run(self) -> None:
        """A job has landed."""
        if not self._waiting:
            return
        waiting, self._waiting, self._done = self._waiting, [], True
        for stream, do in waiting:
            if stream.in_job:
                self._waiting.append((stream, do))
            else:
                do()

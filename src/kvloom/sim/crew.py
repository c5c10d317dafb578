"""Tasks of one owner, of which nothing is lost: neither they, nor what they fail of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Crashed = Callable[[BaseException], None]


class Crew:
    """crashed: called with what a task fails of, while they are not dismissed, unless that is `expected`."""

    def __init__(self, crashed: Crashed, expected: tuple[type[Exception], ...] = ()) -> None:
        self._crashed = crashed
        self._expected = expected
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._dismissed = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def dismiss(self) -> list[asyncio.Task[Any]]:
        """Cancel all, in the order in which they began; what they still fail of is nobody's matter."""
        self._dismissed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._dismissed and not isinstance(error, self._expected):
            self._crashed(error)

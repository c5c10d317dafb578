"""The events of a run, one by one, and the tasks that crash it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvloom.lab.faults.faults import Client
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, PromptEvent, TokenEvent


class Journal:
    """A line an event: when (virtual seconds), what, who, and how it was. Lines are kept only where they are
    wanted, for they take longer to write than the events themselves. counts: of what is worth counting."""

    def __init__(self, clock: Clock, *, kept: bool) -> None:
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kept = kept
        self._clock = clock

    def __call__(self, what: str, who: str, *how: object) -> None:
        if self.kept:
            said = " ".join(filter(None, map(str, how)))
            self.lines.append(f"{self._clock.now():11.6f}  {what:<8} {who:<10} {said}".rstrip())

    def count(self, what: str) -> None:
        self.counts[what] += 1


T = TypeVar("T")

Crashed = Callable[[BaseException], None]


class FaultTasks:
    """crashed: called with what a task fails of, while they are not dismissed, unless that is `expected`."""

    def __init__(self, crashed: Crashed, expected: tuple[type[Exception], ...] = ()) -> None:
        self._crashed = crashed
        self._expected = expected
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._cancelled = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all, in the order in which they began; what they still fail of is nobody's matter."""
        self._cancelled = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._cancelled and not isinstance(error, self._expected):
            self._crashed(error)


Fate = Literal["waits", "ended", "failed", "left", "lost"]


@dataclass(slots=True)
class ClientAnswer:
    """fate: ended, its stream did; failed, it was told an error; left, it hung up; lost, its gateway was.
    tokens, ends: by choice. asked, over: when. broken: what no stream may do, law 3."""

    client: Client
    fate: Fate = "waits"
    asked: float | None = None
    over: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndEvent] = field(default_factory=dict)
    prompt: PromptEvent | None = None
    error: KvloomError | None = None
    aborted: bool = False
    stopped: set[int] = field(default_factory=set)  # choices that were aborted for their stop string
    broken: list[str] = field(default_factory=list)

    def take(self, frame: list[Event]) -> None:
        for event in frame:
            if isinstance(event, PromptEvent):
                if self.prompt is not None or self.tokens:
                    self.broken.append("a prompt's report comes twice, or late")
                self.prompt = event
            elif event.choice in self.ends or not 0 <= event.choice < self.client.body.n:
                self.broken.append(f"choice {event.choice} goes on after its end, or never was")
            elif isinstance(event, TokenEvent):
                tokens = self.tokens.setdefault(event.choice, [])
                if event.index != len(tokens):
                    self.broken.append(f"choice {event.choice}: token {event.index} follows {len(tokens)}")
                tokens.append(event.token)
            else:
                self.ends[event.choice] = event

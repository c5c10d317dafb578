"""Cores that jobs share with threads which do other work: each thread's in turn, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Wish = Callable[[], float]


class Cores:
    """Where more want to run than there are cores, threads get equal parts of them. What jobs lose is what
    was measured, and their device's matter."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._threads: list[Thread] = []
        self._devices: list[tuple[Wish, Callable[[], None]]] = []

    def thread(self) -> Thread:
        """One more, idle."""
        thread = Thread(self)
        self._threads.append(thread)
        return thread

    def join(self, wish: Wish, changed: Callable[[], None]) -> None:
        """A device: how many cores its jobs use now, and whom to tell when what they can have has changed."""
        self._devices.append((wish, changed))

    def leave(self, thread: Thread, wish: Wish) -> None:
        """These want nothing any more."""
        self._threads.remove(thread)
        self._devices = [one for one in self._devices if one[0] != wish]
        self.changed()

    @property
    def over(self) -> float:
        """How many more want to run than there are cores; negative where some are idle."""
        threads, jobs = sum(thread.busy for thread in self._threads), sum(wish() for wish, _ in self._devices)
        return threads + jobs - self._count

    def changed(self) -> None:
        """Somebody has begun or ended."""
        pace = self._count / max(self._count, self._count + self.over)
        for thread in self._threads:
            thread.set_pace(pace)
        for _, changed in self._devices:
            changed()


class Thread:
    """CPU work in a queue; its time is the running loop's."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._pace = 1.0
        self._since = 0.0
        self._queued = self._done = 0.0  # CPU seconds so far; `done` as of `since`
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()  # who, and for how much to be done
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        return self._timer is not None

    def charge(self, seconds: float) -> None:
        """Queue so much CPU work."""
        if seconds <= 0.0:
            return
        self._queued += seconds
        if self._timer is None:
            self._since = asyncio.get_running_loop().time()
            self._wait()
            self._cores.changed()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Queue so much, and `call` when it and all before it is done: at once where that is nothing."""
        self.charge(seconds)
        if self._timer is None:
            call()
            return
        self._waiting.append((self._queued, call))

    async def passed(self, seconds: float = 0.0) -> None:
        """Queue so much, and wait until it and all before it is done."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.after(seconds, lambda: None if future.done() else future.set_result(None))
        await future

    def set_pace(self, pace: float) -> None:
        """The part of a core that it has from now on."""
        if self._timer is not None and pace != self._pace:
            self._advance()
            self._pace = pace
            self._wait()
        self._pace = pace

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._done = min(self._queued, self._done + (now - self._since) * self._pace)
        self._since = now

    def _wait(self) -> None:
        """For the next one who waits, or for the end of all."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        until = self._waiting[0][0] if self._waiting else self._queued
        self._timer = loop.call_at(self._since + (until - self._done) / self._pace, self._reach, until)

    def _reach(self, until: float) -> None:
        self._since, self._done = asyncio.get_running_loop().time(), max(self._done, until)
        ready = []
        while self._waiting and self._waiting[0][0] <= self._done:
            ready.append(self._waiting.popleft()[1])
        if self._done < self._queued:
            self._wait()
        else:
            self._timer = None
            self._cores.changed()
        for call in ready:
            call()

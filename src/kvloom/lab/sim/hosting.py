"""A measured machine's work besides jobs: the client's, the gateway's, that of each engine's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvloom.plan.cost.measured import Hosting, Upkeep
from kvloom.plan.cost.profile import Role
from kvloom.plan.cost.work import Work
from kvloom.types.client import Generator
from kvloom.types.request import Event, ModelCard, StartGenerate

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
        """Returns how many more want to run than there are cores; negative where some are idle."""
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
        """Sets the timer for the next one who waits, or for the end of all."""
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


class Worker:
    """One thread that requests and tokens go through."""

    def __init__(self, cores: Cores, upkeep: Upkeep) -> None:
        self.thread: Thread = cores.thread()
        self._upkeep = upkeep

    def tokens(self, count: int) -> None:
        """So many come at once, each in a frame of its own."""
        self.thread.charge(self._upkeep.turn + count * self._upkeep.token)

    async def take_request(self) -> None:
        await self.thread.passed(self._upkeep.request)

    async def passed(self) -> None:
        """Waits until what is there has been sent on."""
        await self.thread.passed()


class HostedMachine:
    """client_here: whether who asks does so on the same machine."""

    def __init__(self, hosting: Hosting, *, client_here: bool) -> None:
        self.hosting = hosting
        self.cores = Cores(hosting.cores)
        roles: list[Role] = ["client", "gateway"] if client_here else ["gateway"]
        self.ways = [Worker(self.cores, hosting.upkeep(role)) for role in roles]  # that a request goes

    def unit(self, between: Callable[[int], float] | None) -> HostedUnit:
        return HostedUnit(self, between or (lambda _: 0.0))

    def server(self, server: Generator) -> HostedServer:
        return HostedServer(server, self.ways)


class HostedUnit:
    """An engine's loop beside its jobs. between: seconds of its own work after a job of so many sequences,
    before it can launch the next."""

    def __init__(self, machine: HostedMachine, between: Callable[[int], float]) -> None:
        self.loop = Worker(machine.cores, machine.hosting.upkeep("engine"))
        self._machine = machine
        self._between = between
        self._jobs = 0.0

    def join(self, changed: Callable[[], None]) -> None:
        """changed: jobs that run are to ask anew for what they lose."""
        self._machine.cores.join(self._wish, changed)

    def leave(self) -> None:
        """Its engine has ended."""
        self._machine.cores.leave(self.loop.thread, self._wish)

    def _wish(self) -> float:
        return self._jobs

    def running(self, cores: float) -> None:
        """So many are used by jobs from now on."""
        self._jobs = cores
        self._machine.cores.changed()

    def slower(self, work: Work, cores: float) -> float:
        """Returns how many times longer a job on so many cores takes, as things are."""
        hosting, busy = self._machine.hosting, self.loop.thread.busy
        slower = hosting.slower(work, cores, self._machine.cores.over - busy)
        return slower / hosting.pace(work, cores) if busy else slower

    def landed(self, batch: int, tokens: int, call: Callable[[], None]) -> None:
        """A job of `batch` sequences has ended: `call` when the engine has seen to it. Then each of so many
        tokens is a frame on its way to who asked."""

        def seen() -> None:
            for worker in (self.loop, *self._machine.ways[::-1]):
                worker.tokens(tokens)
            call()

        self.loop.thread.after(self._between(batch), seen)


class HostedServer:
    """Satisfies `Generator`. ways: whose work a request is before `server` has it, in this order, and its
    frames after it, in the other."""

    def __init__(self, server: Generator, ways: list[Worker]) -> None:
        self._server = server
        self._ways = ways

    async def models(self) -> list[ModelCard]:
        return await self._server.models()

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        for worker in self._ways:
            await worker.take_request()
        async with aclosing(self._server.start_generate(body)) as frames:
            async for frame in frames:
                for worker in reversed(self._ways) if frame else ():
                    await worker.passed()
                yield frame

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self._server.abort(request, choice)

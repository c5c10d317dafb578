"""A measured machine's work besides jobs: the client's, the gateway's, that of each engine's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from kvloom.plan.cost.cpu import CpuCosts
from kvloom.plan.cost.profile import CpuOverhead, Role
from kvloom.plan.cost.work import Work
from kvloom.types.client import Generator
from kvloom.types.request import Event, ModelCard, StartGenerate

Wish = Callable[[], float]


class Cores:
    """If more threads want to run than there are cores, they get equal parts of them. How much slower jobs
    become was measured, and their device asks for it by itself."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._threads: list[CpuThread] = []
        self._devices: list[tuple[Wish, Callable[[], None]]] = []

    def thread(self) -> CpuThread:
        """Returns one more thread, which is idle."""
        thread = CpuThread(self)
        self._threads.append(thread)
        return thread

    def join(self, wish: Wish, changed: Callable[[], None]) -> None:
        """Takes in a device. wish: returns the cores that its jobs use now. changed: called when what they
        can have has changed."""
        self._devices.append((wish, changed))

    def leave(self, thread: CpuThread, wish: Wish) -> None:
        """Takes a thread and a device out, which want no cores any more."""
        self._threads.remove(thread)
        self._devices = [one for one in self._devices if one[0] != wish]
        self.changed()

    @property
    def excess(self) -> float:
        """Returns how many more want to run than there are cores; negative if some are idle."""
        threads, jobs = sum(thread.busy for thread in self._threads), sum(wish() for wish, _ in self._devices)
        return threads + jobs - self._count

    def changed(self) -> None:
        """Shares the cores out anew, because somebody has begun or ended."""
        pace = self._count / max(self._count, self._count + self.excess)
        for thread in self._threads:
            thread.set_pace(pace)
        for _, changed in self._devices:
            changed()


class CpuThread:
    """A modelled thread: CPU work in a queue. Its time is the running loop's."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._pace = 1.0
        self._since = 0.0
        self._queued = self._done = 0.0  # CPU seconds so far; `done` as of `since`
        self._waiting: deque[tuple[float, Callable[[], None]]] = (
            deque()
        )  # the work queued up to each call, and the call
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        return self._timer is not None

    def charge(self, seconds: float) -> None:
        """Queues so much CPU work."""
        if seconds <= 0.0:
            return
        self._queued += seconds
        if self._timer is None:
            self._since = asyncio.get_running_loop().time()
            self._wait()
            self._cores.changed()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Queues so much, and calls `call` when it and all before it is done: at once if that is nothing."""
        self.charge(seconds)
        if self._timer is None:
            call()
            return
        self._waiting.append((self._queued, call))

    async def passed(self, seconds: float = 0.0) -> None:
        """Queues so much, and waits until it and all before it is done."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.after(seconds, lambda: None if future.done() else future.set_result(None))
        await future

    def set_pace(self, pace: float) -> None:
        """Gives the thread this part of a core from now on."""
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


class ProcessLoop:
    """The event loop of one process, through which requests and tokens go."""

    def __init__(self, cores: Cores, overhead: CpuOverhead) -> None:
        self.thread: CpuThread = cores.thread()
        self._overhead = overhead

    def tokens(self, count: int, then: Callable[[], None]) -> None:
        """Takes in so many tokens that come at once, each in a frame of its own, and calls `then` when they
        have been sent on."""
        self.thread.after(self._overhead.turn + count * self._overhead.token, then)

    async def take_request(self, prompt: int) -> None:
        """Waits until the loop has done the work of a request. prompt: the number of its tokens."""
        overhead = self._overhead
        await self.thread.passed(overhead.request + prompt * overhead.prompt)

    async def passed(self) -> None:
        """Waits until what is there has been sent on."""
        await self.thread.passed()


class SimulatedCpu:
    """The CPU of the one machine that all units run on."""

    def __init__(self, costs: CpuCosts, *, client_here: bool) -> None:
        """client_here: whether the client is on the same machine."""
        self.costs = costs
        self.cores = Cores(costs.cores)
        roles: list[Role] = ["client", "gateway"] if client_here else ["gateway"]
        self.hops = [ProcessLoop(self.cores, costs.overhead(role)) for role in roles]
        """The loops that a request passes, one after the other, before an engine has it."""


class EngineCpu:
    """An engine's loop beside its jobs."""

    def __init__(self, cpu: SimulatedCpu, engine_gap: Callable[[Work], float] | None) -> None:
        """engine_gap: returns the seconds of the engine's own work for a job, all of which counts after the
        job, before the next one can be launched; None for no work."""
        self.loop = ProcessLoop(cpu.cores, cpu.costs.overhead("engine"))
        self._cpu = cpu
        self._engine_gap = engine_gap or (lambda _: 0.0)
        self._jobs = self._jobs_beside_loop = 0.0  # the cores that jobs want

    def join(self, changed: Callable[[], None]) -> None:
        """changed: called when jobs may have become slower or faster."""
        self._cpu.cores.join(self._wish, changed)

    def leave(self) -> None:
        """Takes the engine out, which has ended."""
        self._cpu.cores.leave(self.loop.thread, self._wish)

    def _wish(self) -> float:
        """Returns the cores that jobs want now: fewer while the loop's work holds them up."""
        return self._jobs_beside_loop if self.loop.thread.busy else self._jobs

    def running(self, jobs: Sequence[tuple[Work, float]]) -> None:
        """Takes in which jobs run from now on, each with its cores."""
        self._jobs = sum(cores for _, cores in jobs)
        speed = self._cpu.costs.speed_beside_loop
        self._jobs_beside_loop = sum(cores * speed(work, cores) for work, cores in jobs)
        self._cpu.cores.changed()

    def seconds(self, work: Work, cores: float, alone: float) -> float:
        """Returns the seconds of a job on so many cores, as things are. alone: its seconds if nothing
        but jobs wanted the cores."""
        costs, busy = self._cpu.costs, self.loop.thread.busy
        # Other threads that want a core. This unit's jobs count in full, and its own loop not at all, because
        # what that loop takes from them comes in by `speed_beside_loop`.
        others = self._cpu.cores.excess + self._jobs - self._wish() - busy
        slowdown = costs.slowdown(others)
        if busy:
            slowdown /= costs.speed_beside_loop(work, cores)
        return slowdown * alone

    def landed(self, work: Work, tokens: int, call: Callable[[], None]) -> None:
        """Calls `call` when the engine has seen to the end of a job. Then each of so many tokens is a frame
        on its way to the client."""

        def seen() -> None:
            self._send(tokens, (self.loop, *(reversed(self._cpu.hops) if tokens else ())))
            call()

        self.loop.thread.after(self._engine_gap(work), seen)

    def _send(self, tokens: int, way: tuple[ProcessLoop, ...]) -> None:
        """Takes the tokens through one loop after the other."""
        if way:
            way[0].tokens(tokens, lambda: self._send(tokens, way[1:]))


class ServerBehindLoops:
    """Satisfies `Generator`: a server behind the loops of a machine, which requests and frames pass."""

    def __init__(self, server: Generator, cpu: SimulatedCpu) -> None:
        self._server = server
        self._hops = cpu.hops

    async def models(self) -> list[ModelCard]:
        return await self._server.models()

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        for loop in self._hops:
            await loop.take_request(len(body.prompt))
        async with aclosing(self._server.start_generate(body)) as frames:
            async for frame in frames:
                for loop in reversed(self._hops) if frame else ():
                    await loop.passed()
                yield frame

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self._server.abort(request, choice)

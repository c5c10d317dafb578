"""A measured machine's work besides jobs: the client's, the gateway's, that of each engine's loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvloom.core.client import EngineClient, Generator
from kvloom.core.clock import Clock
from kvloom.core.request import Event, ModelCard, StartGenerate
from kvloom.cost.hosting import Hosting, Upkeep
from kvloom.cost.profile import Role
from kvloom.cost.work import Work
from kvloom.sim.cores import Cores, Thread
from kvloom.sim.wire import ModelledWire


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
        """Until what is there has been sent on."""
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
        """How many times longer a job on so many cores takes, as things are."""
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


class HostedWire(ModelledWire):
    """Calls to a hosted engine: a request waits for its loop, and so do its frames. It takes no time of its
    own, which is in what both ends were measured to do."""

    def __init__(
        self,
        reach: Callable[[], EngineClient],
        clock: Clock,
        delay: float,
        loop: Callable[[], Worker],
    ) -> None:
        super().__init__(reach, clock, delay)
        self._loop = loop

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        loop = self._loop()
        await loop.take_request()
        async with aclosing(self._reach().start_generate(body)) as frames:
            async for frame in frames:
                if frame:
                    await loop.passed()
                yield frame


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

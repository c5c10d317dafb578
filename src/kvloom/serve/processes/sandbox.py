"""Processes that compile grammars, tokenise and render prompts under limits.

Libraries that read a client's text may overflow their stack, take all memory or run for minutes, and cannot
be interrupted. In a process of their own they cost that process alone, and another one takes its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

import msgspec

from kvloom.engine.guide import GuideTrial, refused
from kvloom.types.clock import ending
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.request import Guide, ModelCard

Work = Literal["grammars", "texts"]
LENGTH_BYTES: Final = 4
WALL: Final = 20.0  # a call may take so many times its CPU seconds, on a machine that is busy
WANTED: Final = 5.0  # and so many times if another one waits for a process
IMPORT_SECONDS: Final = 60.0
PREPARING: Final = (
    8  # what prepares a process is the operator's, not a client's: it may take so many times more
)
FROM_OUTSIDE: Final = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals by which no work ends its process."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds what one call may take. Preparing a process may take `PREPARING` times as much."""

    seconds: float  # of CPU
    memory: int  # bytes of address space, beyond those that the process has when it is idle


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Gives the process what later calls of `key` need, such as a model's tokenizer."""

    key: str
    data: bytes


class Run(msgspec.Struct, frozen=True, tag=True):
    """Asks for one piece of work."""

    key: str
    data: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answers a `Run`, or a `Prepare` with nothing."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Answers a `Prepare` or a `Run` that makes no sense, and says why."""

    why: str


Question = Prepare | Run
Answer = Done | Failed
_answer: Final[Callable[[bytes], Answer]] = msgspec.msgpack.Decoder(Answer).decode


class Refused(Exception):
    """The work makes no sense, or went over a limit. The message says why."""


class OverLimit(Refused):
    """The work went over a limit, or ended its process in another way."""


class _Lost(Exception):
    """A process was ended from outside."""


@dataclass(slots=True)
class _Worker:
    """One process, which does one piece of work at a time."""

    process: asyncio.subprocess.Process
    prepared: set[str]

    async def ask(self, question: Question) -> Answer:
        """Raises IncompleteReadError or ConnectionError if the process ends."""
        into, out = self.process.stdin, self.process.stdout
        assert into is not None
        assert out is not None
        frame = msgspec.msgpack.encode(question)
        into.writelines((len(frame).to_bytes(LENGTH_BYTES, "big"), frame))
        await into.drain()
        length = int.from_bytes(await out.readexactly(LENGTH_BYTES), "big")
        return _answer(await out.readexactly(length))

    async def end(self) -> int:
        with suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


class Sandbox:
    """A pool of such processes, an async context manager. Each is started when it is first needed."""

    def __init__(self, work: Work, size: int, limits: Limits) -> None:
        self._work = work
        self._limits = limits
        self._room = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._waiting = 0
        self._wanted: dict[asyncio.Timeout, float] = {}  # when work that runs has to end if others wait

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._idle:
            await worker.end()
        self._idle.clear()

    async def call(self, key: str, prepare: Callable[[], bytes], data: bytes) -> bytes:
        """Returns what the work answers. prepare: gives what a process has to know for calls of `key`. Who
        comes first is first. If the caller is cancelled while the work is under way, the work's process is
        ended. Raises Refused, and Unavailable for what is not the work's fault: no process can be started and
        prepared, two have been ended from outside, or one has had too little of the CPU for too long."""
        async with self._turn():
            try:
                return await self._call(self._pick(key), key, prepare, data)
            except _Lost:
                pass
            try:
                return await self._call(None, key, prepare, data)
            except _Lost as error:
                said = f"two processes for {self._work} were ended from outside; the last one {error}"
                raise Unavailable(said, retry_after=1) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._room.locked():
            for limit, at in self._wanted.items():
                if not limit.expired():
                    limit.reschedule(at)
        self._waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._room.release()

    async def _call(
        self, worker: _Worker | None, key: str, prepare: Callable[[], bytes], data: bytes
    ) -> bytes:
        """worker: None for a new one. Raises _Lost besides."""
        worker = worker or await self._started()
        kept = False
        try:
            if key not in worker.prepared:
                await self._prepare(worker, Prepare(key, prepare()))
            answer = await self._ask(worker, Run(key, data))
            kept = True
            return answer
        except OverLimit:
            raise
        except Refused:
            kept = True
            raise
        finally:
            if kept:
                self._idle.append(worker)
            else:
                await worker.end()

    def _pick(self, key: str) -> _Worker | None:
        """Takes an idle process that nobody has killed, one that is prepared for the key if there is any."""
        self._idle = [worker for worker in self._idle if worker.process.returncode is None]
        found = next((worker for worker in reversed(self._idle) if key in worker.prepared), None)
        found = found or (self._idle[-1] if self._idle else None)
        if found is not None:
            self._idle.remove(found)
        return found

    async def _started(self) -> _Worker:
        """Raises Unavailable."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "kvloom.serve.sandbox_process",
                self._work,
                str(self._limits.seconds),
                str(self._limits.memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environment(os.environ),
            )
        except OSError as error:
            raise Unavailable(
                f"no process can be started for {self._work}: {error.strerror}", retry_after=1
            ) from error
        return _Worker(process, set())

    async def _prepare(self, worker: _Worker, question: Prepare) -> None:
        """Raises Unavailable and _Lost."""
        try:
            await self._ask(worker, question)
        except Refused as error:
            raise Unavailable(
                f"a process for {self._work} of {question.key} cannot be used: {error}"
            ) from None
        worker.prepared.add(question.key)

    async def _ask(self, worker: _Worker, question: Question) -> bytes:
        """Raises Refused, _Lost and Unavailable."""
        loop, seconds = asyncio.get_running_loop(), self._limits.seconds
        running = isinstance(question, Run)
        most = WALL * seconds if running else IMPORT_SECONDS + PREPARING * WALL * seconds
        begun = loop.time()
        try:
            async with asyncio.timeout(most) as limit:
                if running:
                    self._wanted[limit] = begun + WANTED * seconds
                if running and self._waiting:
                    limit.reschedule(self._wanted[limit])
                try:
                    answer = await worker.ask(question)
                finally:
                    self._wanted.pop(limit, None)
        except TimeoutError:
            said = f"a process for {self._work} has not ended its work in {loop.time() - begun:.0f} s"
            raise Unavailable(f"{said}: the machine is busy", retry_after=1) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._why(await worker.process.wait()) from None
        if isinstance(answer, Failed):
            raise Refused(answer.why)
        return answer.data

    def _why(self, code: int) -> OverLimit | _Lost:
        """Says why a process has ended. RLIMIT_CPU gives SIGXCPU; RLIMIT_STACK gives SIGSEGV; RLIMIT_AS lets
        Rust's and C++'s allocators abort, while Python raises a MemoryError."""
        if code == -signal.SIGXCPU:
            return OverLimit(f"it takes longer than {self._limits.seconds:g} s")
        if code == -signal.SIGSEGV:
            return OverLimit("it is nested too deeply")
        if code == -signal.SIGABRT:
            return OverLimit(f"it needs more than {self._limits.memory >> 20} MiB of memory")
        return _Lost(ending(code)) if -code in FROM_OUTSIDE else OverLimit(f"its process {ending(code)}")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of such a process, whose libraries have one thread each, and write no traceback
    over a text that they cannot read."""
    one = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**given, **one, "RUST_BACKTRACE": "0"}


def grammar_trial(sandbox: Sandbox) -> GuideTrial:
    """Returns the trial of grammars in a sandbox of `grammars`."""

    async def trial(card: ModelCard, guide: Guide) -> None:
        try:
            await sandbox.call(card.name, lambda: msgspec.msgpack.encode(card), msgspec.msgpack.encode(guide))
        except OverLimit as error:
            raise refused(guide, str(error)) from None
        except Refused as error:
            raise BadRequest(str(error), param=guide.param) from None

    return trial

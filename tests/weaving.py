"""Engines that weave: a hot one in this process, and a cold one beside it or in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from kvloom.engine.engine import Engine
from kvloom.engine.sequence import Sequence
from kvloom.exec.cpu.executor import TorchExecutor, load_executor
from kvloom.offload.cpu.attention import CpuOffloadBackend
from kvloom.offload.planner import OffloadingPlanner
from kvloom.offload.terms import Borrow, Loan
from kvloom.serve.engine import open_transport
from kvloom.types.errors import KvloomError, WireError
from kvloom.types.spec import EngineSpec
from tests.engines import ask, body, running_over, spec_of
from tests.forks import FORKS, preload

MODEL = "m"  # of the hot unit
PAGES = 40  # that are lent
DEADLINE = 120.0
preload(__name__, "tests.standing")


@asynccontextmanager
async def weaving(spec: EngineSpec, patience: float = 20.0) -> AsyncIterator[Engine]:
    """An engine that can lend and borrow; afterwards laws 1 and 4 hold."""
    executor = load_executor(spec)
    assert isinstance(executor, TorchExecutor)
    transport = open_transport(spec, executor.arena)
    backend = CpuOffloadBackend(executor, transport, patience)
    async with running_over(spec, executor, transport, backend) as engine:
        yield engine


async def until(holds: Callable[[], bool], tries: int = 20_000) -> None:
    """Fails after a while where it never does."""
    for _ in range(tries):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


def woven_of(engine: Engine) -> OffloadingPlanner[Sequence]:
    """The hot model's loan."""
    woven = engine.borrower.loan(MODEL)
    assert woven is not None
    return woven


class ColdUnit:
    """A unit in a process of its own, as the test calls it."""

    def __init__(self, end: Connection, process: Any) -> None:
        self._end = end
        self.process = process

    async def call(self, method: str, **arguments: Any) -> Any:
        """One at a time."""
        self._end.send_bytes(msgspec.msgpack.encode((method, arguments)))
        return msgspec.msgpack.decode(await asyncio.to_thread(self._answer))

    def _answer(self) -> bytes:
        assert self._end.poll(DEADLINE), "the cold unit does not answer"
        return self._end.recv_bytes()

    async def lend(self, borrow: Borrow) -> Loan:
        found = await self.call("lend", borrow=borrow)
        if "code" in found:
            raise KvloomError.from_wire(msgspec.convert(found, WireError))
        return msgspec.convert(found, Loan)


@contextmanager
def cold_unit(path: Path) -> Iterator[ColdUnit]:
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_start, args=(theirs, str(path)))
    process.start()
    theirs.close()
    try:
        yield ColdUnit(ours, process)
    finally:
        ours.close()
        process.join(DEADLINE)
        alive = process.is_alive()
        process.kill()
        process.join()
        assert not alive, "the cold unit does not end"


def _start(end: Connection, path: str) -> None:
    asyncio.run(_serve(end, Path(path)))


async def _serve(end: Connection, path: Path) -> None:
    """Until the caller closes its end."""
    async with weaving(spec_of({"cold": path}, threads=1)) as engine, asyncio.TaskGroup() as group:
        own = Own(engine)
        calls = _calls(engine, own)
        while True:
            try:
                order = msgspec.msgpack.decode(await asyncio.to_thread(end.recv_bytes))
            except EOFError:
                own.over = True
                return
            if order[0] == "begin":
                group.create_task(own.run())
            method, arguments = order
            end.send_bytes(msgspec.msgpack.encode(await calls[method](**arguments)))


class Own:
    """What a cold unit's own model generates all the while, once it has begun."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.over = False
        self.found: list[tuple[list[int], list[int]]] = []  # prompts and answers

    async def run(self) -> None:
        for i in itertools.count():
            if self.over:
                return
            prompt = [i % 251, 7, i % 13] * (1 + i % 9)
            answer = await ask(self._engine, body("cold", prompt, max_tokens=32))
            self.found.append((prompt, answer.tokens[0]))


def _calls(engine: Engine, own: Own) -> dict[str, Callable[..., Awaitable[Any]]]:
    async def lend(borrow: Any) -> Loan | WireError:
        try:
            return engine.lender.lend(msgspec.convert(borrow, Borrow))
        except KvloomError as error:
            return error.to_wire()

    async def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        """Of the cold unit's own model."""
        answers = await asyncio.gather(
            *(ask(engine, body("cold", prompt, max_tokens=count)) for prompt in prompts)
        )
        return [answer.tokens[0] for answer in answers]

    async def lent() -> int:
        return engine.pool.lent

    async def recall() -> None:
        engine.lender.recall()

    async def check() -> int:
        """Law 1; what is lent."""
        engine.pool.check()
        return engine.pool.lent

    async def begin() -> None:
        """The own model generates from here on."""

    async def found(least: int = 0) -> list[tuple[list[int], list[int]]]:
        """Returns what it has generated since this was last asked, as soon as these are so many answers."""
        await until(lambda: len(own.found) >= least)
        answers, own.found = own.found, []
        return answers

    return {
        "lend": lend,
        "generate": generate,
        "lent": lent,
        "recall": recall,
        "check": check,
        "begin": begin,
        "found": found,
    }

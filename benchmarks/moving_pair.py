"""Two engines that decode, with a router over both, and who reads from them and when."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Final

from benchmarks.engines import MODEL, engines
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.client import EngineClient, Frames
from kvloom.types.clock import WallClock
from kvloom.types.request import Event, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.verbs import Prefix

VERBS: Final = ("prep_recv", "remote_send", "hold", "start_generate", "abort")
BESIDE: Final = 2000  # tokens of those that decode beside
QUIET: Final = 0.3  # seconds before a move, from which the usual gaps are
COLD_SECONDS: Final = 30.0  # until a target has forgotten what moved there last
_names = itertools.count()
_random = random.Random(0)


@dataclass(slots=True)
class Reader:
    """A stream's tokens, and when each came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    streams: int = 0  # that are open
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, frames: Frames) -> None:
        self.streams += 1
        async with aclosing(frames):
            async for frame in frames:
                for event in frame:
                    if isinstance(event, TokenEvent):
                        self.tokens.append(event.token)
                        self.times.append(time.perf_counter())
                self._more.set()
        self.streams -= 1
        self._more.set()

    async def until(self, tokens: int) -> None:
        while len(self.tokens) < tokens:
            self._more.clear()
            await self._more.wait()
            if not self.streams:
                raise RuntimeError("the request ended before it had moved; the machine is too busy")

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between tokens, where that overlaps a time."""
        pairs = itertools.pairwise(self.times)
        return [after - before for before, after in pairs if before < until and after > since]


@dataclass(slots=True)
class Call:
    """Of a verb, in seconds of the clock. answered: its answer, or a stream's first frame."""

    verb: str
    began: float
    answered: float | None = None


@dataclass(slots=True)
class Pair:
    """Two engines, and the requests that decode at both."""

    source: EngineClient
    target: EngineClient
    router: Router
    beside: list[Reader] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def gaps(self, since: float, until: float) -> list[float]:
        return [gap for reader in self.beside for gap in reader.gaps(since, until)]

    def slower(self, since: float, until: float) -> float:
        """Against as long a time before."""
        return mean(self.gaps(since, until)) / mean(self.gaps(since - QUIET, since)) - 1

    def step_end(self, since: float, until: float) -> float:
        """When the target first told those beside something within this time, or `since`."""
        told = (when for reader in self.beside[1::2] for when in reader.times if since < when < until)
        return min(told, default=since)

    def answered(self, since: float, *verbs: str) -> float:
        """When the last call of one of these verbs since then was, or `since`."""
        times = (one.answered for one in self.calls if one.verb in verbs and one.began >= since)
        return max((when for when in times if when is not None), default=since)


@asynccontextmanager
async def pair(beside: int) -> AsyncIterator[Pair]:
    async with (
        engines(2, "A", kv_bytes=3 << 30) as (source, target),
        paired(source, target, beside, BESIDE) as made,
    ):
        yield made


@asynccontextmanager
async def paired(source: EngineClient, target: EngineClient, beside: int, tokens: int) -> AsyncIterator[Pair]:
    """Two engines that serve already. beside: requests that decode at each meanwhile, for `tokens` tokens
    each."""
    clients = {"source": source, "target": target}
    async with Router(clients, load_program("data_parallel"), WallClock()) as router:
        made = Pair(source, target, router)
        for client in (source, target):
            for verb in VERBS:
                _note(client, verb, made.calls)
        async with asyncio.TaskGroup() as group:
            reading = []
            for client in [source, target] * beside:
                reader = Reader()
                reading.append(group.create_task(_decode(client, reader, tokens)))
                made.beside.append(reader)
            for reader in made.beside:
                await reader.until(8)
            yield made
            for task in reading:
                task.cancel()


async def _decode(client: EngineClient, reader: Reader, tokens: int) -> None:
    """Until nobody wants more."""
    while True:
        await reader.read(client.start_generate(body_of(prompt_of(64), tokens)))


def _note(client: EngineClient, verb: str, calls: list[Call]) -> None:
    real = getattr(client, verb)

    async def noted(*arguments: Any) -> Any:
        calls.append(call := Call(verb, time.perf_counter()))
        answer = await real(*arguments)
        call.answered = time.perf_counter()
        return answer

    def streamed(body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        calls.append(call := Call(verb, time.perf_counter()))
        return _first_noted(real(body), call)

    setattr(client, verb, streamed if verb == "start_generate" else noted)


async def _first_noted(
    frames: AsyncGenerator[list[Event], None], call: Call
) -> AsyncGenerator[list[Event], None]:
    async with aclosing(frames):
        async for frame in frames:
            call.answered = call.answered or time.perf_counter()
            yield frame


def prompt_of(length: int) -> list[int]:
    return [_random.randrange(300, 8000) for _ in range(length)]


def body_of(prompt: list[int], tokens: int) -> StartGenerate:
    return StartGenerate(
        model=MODEL,
        request=f"d{next(_names)}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=tokens, seed=0),
    )


async def cold(on: Pair) -> None:
    """Until the target has nothing but what decodes beside: who has just moved there has ended, and is not
    cached. Raises TimeoutError where that takes too long."""
    beside = len(on.beside) // 2
    async with asyncio.timeout(COLD_SECONDS):
        while True:
            await on.target.evict(Prefix(model=MODEL, prompt=[]))
            own = (await on.target.load()).models[MODEL]
            if own.running + own.waiting <= beside and not own.cached_blocks:
                return
            await asyncio.sleep(0.02)

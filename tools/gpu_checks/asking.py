"""Requests to an engine in this process: one that is waited for, and the open loop of a workload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing

import msgspec

from kvloom.engine.engine import Engine
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate, TokenEvent

_INTERVAL = 8  # tokens of a frame: this process reads them all


class Failed(Exception):
    """A request that was let in has ended with an error."""


async def answered(engine: Engine, body: StartGenerate, token: Callable[[], None] = lambda: None) -> int:
    """How many tokens came; `token` is called for each. Raises Failed, or
    KvloomError where it is not let in."""
    count = 0
    async with aclosing(engine.start_generate(body)) as frames:
        async for frame in frames:
            for event in frame:
                if isinstance(event, TokenEvent):
                    count += 1
                    token()
                elif isinstance(event, EndEvent) and event.reason == "error":
                    raise Failed(event.message)
    return count


class InProcess:
    """Satisfies the `Asked` of `lab/bench/run.py`. engines: by model. tokens: that have come, of all."""

    def __init__(self, engines: Mapping[str, Engine], prompts: Prompts, clock: Clock) -> None:
        self.tokens = 0
        self._engines = engines
        self._prompts = prompts
        self._clock = clock

    def body(self, number: int, ask: WorkloadRequest) -> bytes:
        params = SamplingParams(max_tokens=ask.output, seed=0)
        prompt = self._prompts(number, ask)
        made = StartGenerate(
            model=ask.model, request=str(number), prompt=prompt, sampling=params, interval=_INTERVAL
        )
        return msgspec.msgpack.encode(made)

    async def ask(self, ask: WorkloadRequest, body: bytes, due: float) -> RequestResult:
        asked = msgspec.msgpack.decode(body, type=StartGenerate)
        first: float | None = None
        count = 0

        def came() -> None:
            nonlocal first, count
            first = self._clock.now() - due if first is None else first
            count += 1
            self.tokens += 1

        try:
            await answered(self._engines[ask.model], asked, came)
        except (KvloomError, Failed) as error:
            said = f"{type(error).__name__}: {error}"
            return RequestResult(request=ask, first=first, end=None, tokens=count, error=said)
        return RequestResult(request=ask, first=first, end=self._clock.now() - due, tokens=count)


async def many(count: int, engine: Engine, make: Callable[[int, int], StartGenerate]) -> None:
    """So many requests at any time, for ever: `make(number, turn)` is followed by its next turn."""

    async def again(number: int) -> None:
        turn = 0
        while True:
            await answered(engine, make(number, turn))
            turn += 1

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(again(number))

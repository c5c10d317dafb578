"""A real engine over real checkpoints, in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.offload.terms import OffloadBackend
from kvloom.router.router import Router
from kvloom.serve.engine import open_transport
from kvloom.types.clock import Clock, WallClock
from kvloom.types.job import Executor
from kvloom.types.prefix_store import PrefixStore
from kvloom.types.request import (
    EndEvent,
    Event,
    PromptEvent,
    SamplingParams,
    StartGenerate,
    TokenEvent,
    TokenLogprob,
)
from kvloom.types.spec import EngineSpec, ModelSpec, Policy
from kvloom.types.transfer import Transport

_REQUESTS = itertools.count()


@dataclass
class Answer:
    """What a stream brought. tokens, logprobs and ends by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)
    ends: dict[int, EndEvent] = field(default_factory=dict)
    prompt: list[TokenLogprob] | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Law 3: every index once and in order, and nothing after the end."""
        for event in events:
            if isinstance(event, PromptEvent):
                assert self.prompt is None
                self.prompt = event.logprobs
                continue
            assert event.choice not in self.ends
            if isinstance(event, TokenEvent):
                tokens = self.tokens.setdefault(event.choice, [])
                assert event.index == len(tokens)
                tokens.append(event.token)
                self.logprobs.setdefault(event.choice, []).append(event.logprob)
            else:
                self.ends[event.choice] = event


def spec_of(paths: dict[str, Path], *, policy: Policy = "adbs", **changes: int) -> EngineSpec:
    spec = EngineSpec(
        models=tuple(ModelSpec(name=name, path=str(path)) for name, path in paths.items()),
        kv_bytes=4 << 20,
        block_bytes=2048,
        policy=policy,
        max_running=64,
        max_waiting=256,
        chunk_tokens=64,
        threads=2,
    )
    return replace(spec, **changes)


class RealExecutor(Executor, Protocol):
    def close(self) -> None: ...


class RealStore(PrefixStore, Protocol):
    def close(self) -> None: ...


@asynccontextmanager
async def running(spec: EngineSpec) -> AsyncIterator[Engine]:
    """The engine while it runs; afterwards law 1 and law 4 hold."""
    executor = load_executor(spec)
    async with running_over(spec, executor, open_transport(spec, executor.arena)) as engine:
        yield engine


@asynccontextmanager
async def running_over(
    spec: EngineSpec,
    executor: RealExecutor,
    transport: Transport,
    offload: OffloadBackend | None = None,
    *,
    clock: Clock | None = None,
    store: RealStore | None = None,
) -> AsyncIterator[Engine]:
    """The same over an executor, a transport and perhaps a store that are there already; all are closed."""
    engine = Engine(executor, transport, spec, clock or WallClock(), offload, store=store)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
    if store is not None:
        store.close()
    transport.close_all()
    executor.close()
    engine.pool.check()
    assert engine.pool.lent == 0
    assert engine.pool.available == engine.pool.total


def body(
    model: str, prompt: list[int], *, n: int = 1, priority: int = 0, **sampling: object
) -> StartGenerate:
    params = {"max_tokens": 16, "seed": 7} | sampling
    return StartGenerate(
        model=model,
        request=f"test-{next(_REQUESTS)}",
        prompt=prompt,
        n=n,
        priority=priority,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


async def ask(engine: Engine | Router, request: StartGenerate) -> Answer:
    answer = Answer()
    async for frame in engine.start_generate(request):
        answer.take(frame)
    assert len(answer.ends) == request.n
    return answer

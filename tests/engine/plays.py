"""Orders, plays and readers for the engine over a modelled device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing

from kvloom.engine.engine import Engine
from kvloom.types.request import SamplingParams, StartGenerate
from tests.engines import Answer
from tests.modelled import VOCAB, ModelledExecutor, expected, finish, modelled, surprise, turns
from tests.modelled_units import Unit

MOST_JOBS = 20_000


def order(
    request: str, model: str, length: int, *, n: int = 1, priority: int = 0, **sampling: object
) -> StartGenerate:
    params = {"max_tokens": 8, "seed": 1} | sampling
    return StartGenerate(
        model=model,
        request=request,
        prompt=[(len(request) * 31 + i) % VOCAB for i in range(length)],
        n=n,
        priority=priority,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def serve(
    play: Coroutine[None, None, None], engine: Engine, executor: ModelledExecutor, most_jobs: int = MOST_JOBS
) -> None:
    async def whole() -> None:
        async with modelled(engine, executor):
            await finish(executor, [asyncio.create_task(play)], most_jobs=most_jobs)

    asyncio.run(whole())


def check(executor: ModelledExecutor, body: StartGenerate, answer: Answer, *, whole: bool) -> None:
    for choice, tokens in expected(executor, body).items():
        found = answer.tokens.get(choice, [])
        assert found == (tokens if whole else tokens[: len(found)])
        if whole:
            stop = tokens[-1] if tokens[-1] in body.sampling.stop_token_ids else None
            assert answer.ends[choice].reason == ("length" if stop is None else "stop")
            assert answer.ends[choice].stop_token == stop
    if body.sampling.prompt_logprobs is not None and whole:
        assert answer.prompt is not None
    if answer.prompt is not None:
        assert body.sampling.prompt_logprobs is not None
        after = [surprise(body.model, body.prompt[:i], body.prompt[i]) for i in range(1, len(body.prompt))]
        assert [one.logprob for one in answer.prompt] == after


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await turns(1)


async def until_in_a_job(executor: ModelledExecutor, count: int = 1) -> None:
    await until(lambda: len(executor.jobs) >= count and executor.idle < executor.compute)


class Reader:
    """Takes what a request's stream brings."""

    def __init__(self, unit: Unit, body: StartGenerate) -> None:
        self.answer = Answer(tokens={one.choice: list(one.tokens) for one in body.made})
        self.body = body
        self._unit = unit
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self._unit.engine.start_generate(self.body)) as frames:
            async for frame in frames:
                self.answer.take(frame)

    async def until(self, tokens: int) -> None:
        """Each choice has so many, or the request is over."""
        while not self.task.done() and (
            len(self.answer.tokens) < self.body.n
            or min(len(some) for some in self.answer.tokens.values()) < tokens
        ):
            await turns(1)

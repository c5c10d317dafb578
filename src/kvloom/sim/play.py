"""Plays a workload to a server, and tells what became of each ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final

from kvloom.core.client import Generator
from kvloom.core.clock import Clock
from kvloom.core.errors import KvloomError
from kvloom.core.request import EndEvent, StartGenerate, TokenEvent
from kvloom.core.sampling import SamplingParams
from kvloom.workload.ask import Ask, Outcome

FEW_FRAMES: Final = 1024  # tokens a frame: only the first and the last one's times are told
MOVING_FRAMES: Final = 16  # where requests move: a router knows of one what it was told

Prompts = Callable[[int, Ask], list[int]]  # the token ids of an ask, by its number


async def play(
    server: Generator,
    asks: Iterable[Ask],
    prompts: Prompts,
    clock: Clock,
    tell: Callable[[Outcome], None],
    *,
    interval: int = FEW_FRAMES,
) -> None:
    """Open loop: each ask goes out at its time, whatever became of those before. Asks come in order.
    interval: tokens a frame."""
    begin = clock.now()
    async with asyncio.TaskGroup() as group:
        for number, ask in enumerate(asks):
            wait = begin + ask.at - clock.now()
            if wait > 0:
                await clock.sleep(wait)
            group.create_task(_play(server, number, ask, prompts, clock, tell, interval))


async def _play(
    server: Generator,
    number: int,
    ask: Ask,
    prompts: Prompts,
    clock: Clock,
    tell: Callable[[Outcome], None],
    interval: int,
) -> None:
    body = StartGenerate(
        model=ask.model,
        request=f"ask-{number}",
        prompt=prompts(number, ask),
        sampling=SamplingParams(max_tokens=ask.output, seed=number),
        priority=ask.priority,
        interval=interval,
    )
    begin, first, last, tokens, cached, problem = clock.now(), None, None, 0, 0, ""
    try:
        async with aclosing(server.start_generate(body)) as frames:
            async for frame in frames:
                for event in frame:
                    if isinstance(event, TokenEvent):
                        tokens += 1
                        last = clock.now() - begin
                        first = last if first is None else first
                    elif isinstance(event, EndEvent):
                        cached, problem = event.cached_tokens, event.message or _missing(tokens, ask)
    except KvloomError as error:
        problem = error.message
    tell(Outcome(ask=ask, first=first, end=last, tokens=tokens, cached=cached, error=problem))


def _missing(tokens: int, ask: Ask) -> str:
    """As `kvloom bench serve` says it: a context was too short."""
    return "fewer tokens than were asked for" if tokens < ask.output else ""

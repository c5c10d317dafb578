"""A router over ledgers, and how a test asks it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any, TypeVar

from kvloom.router.program import Program, load_program
from kvloom.router.router import Router
from kvloom.types.request import EndEvent, Event, PromptEvent, SamplingParams, StartGenerate, TokenEvent
from tests.router.ledger import Called, LedgerEngine, World, said

QUIET = 60  # turns of the event loop in which everything that can happen at once has happened
_REQUESTS = itertools.count()
T = TypeVar("T")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


async def turns(count: int = QUIET) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begins the work, and lets everything happen that can happen at once."""
    task = asyncio.create_task(work)
    await turns()
    return task


class ManualClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Everything that is due until then happens, in order."""
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
                await turns()
        self._now = end


@dataclass
class Fleets:
    router: Router
    world: World
    clock: ManualClock

    @property
    def engines(self) -> list[LedgerEngine]:
        return list(self.world.engines.values())

    @property
    def journal(self) -> list[Called]:
        return self.world.journal

    async def begin_send(self, request: StartGenerate, *, pace: int) -> asyncio.Task[None]:
        """Ask, and wait until the first engine sends, which takes it `pace` turns."""
        sender = self.engines[0]
        sender.pace = pace
        task = asyncio.create_task(ask_well(self.router, request))
        while not sender.sending:
            await turns(1)
        return task

    @contextmanager
    def waiting(self, unit: str, tokens: int) -> Iterator[None]:
        """The unit has `tokens` more to compute."""
        replica = self.router.units[unit].replicas["m"]
        replica.queue += tokens
        try:
            yield
        finally:
            replica.queue -= tokens

    @property
    def holds_nothing(self) -> bool:
        counts = [
            (replica.calls, replica.queue)
            for unit in self.router.units.values()
            for replica in unit.replicas.values()
        ]
        return not self.world.held and not self.router.sessions and set(counts) <= {(0, 0)}


@asynccontextmanager
async def routed(
    units: int, program: str | Program = "data_parallel", *, patience: float = 60.0, **options: object
) -> AsyncIterator[Fleets]:
    """Units a, b, c …, each with the model m; at the end nobody holds anything."""
    world, clock = World(), ManualClock()
    for name in ascii_lowercase[:units]:
        world.engine(name)
    chosen = load_program(program, options) if isinstance(program, str) else program
    async with Router(world.engines, chosen, clock, patience=patience) as router:
        fleets = Fleets(router, world, clock)
        yield fleets
        await turns()
        assert fleets.holds_nothing, world.held


def body(
    prompt: list[int] | int = 10, *, tokens: int = 3, n: int = 1, model: str = "m", **sampling: object
) -> StartGenerate:
    """A prompt, or one of that many tokens."""
    params = {"max_tokens": tokens, "seed": 7} | sampling
    return StartGenerate(
        model=model,
        request=f"r{next(_REQUESTS)}",
        prompt=prompt if isinstance(prompt, list) else [2 + at % 900 for at in range(prompt)],
        n=n,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


@dataclass
class Answer:
    """Law 3 holds of it: every index once and in order, nothing after the end."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndEvent] = field(default_factory=dict)
    prompt: PromptEvent | None = None

    def take(self, frame: list[Event]) -> None:
        for event in frame:
            if isinstance(event, PromptEvent):
                assert self.prompt is None
                self.prompt = event
                continue
            assert event.choice not in self.ends
            if isinstance(event, TokenEvent):
                made = self.tokens.setdefault(event.choice, [])
                assert event.index == len(made)
                made.append(event.token)
            else:
                self.ends[event.choice] = event


async def ask(router: Router, request: StartGenerate) -> Answer:
    answer = Answer()
    async for frame in router.start_generate(request):
        answer.take(frame)
    return answer


async def ask_well(router: Router, request: StartGenerate) -> None:
    """And the answer is what any lone engine would say."""
    answer = await ask(router, request)
    length = request.sampling.max_tokens
    assert answer.tokens == {c: [said(request.prompt, c, i) for i in range(length)] for c in range(request.n)}
    assert {end.reason for end in answer.ends.values()} == {"length"}
    assert len(answer.ends) == request.n

"""Every verb in every order, at once and with time passing: clear errors, right tokens, whole pools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.types.errors import KvloomError
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import Pin, Prefix, Prepared, PrepRecv
from tests.examples import examples
from tests.modelled import ask, expected, turns
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units

UNITS = 3
REQUESTS = 4
STEP = st.tuples(
    st.sampled_from(
        ["prep", "prep", "prep", "send", "send", "send", "generate", "generate", "move", "abort", "renew",
         "pin", "unpin", "evict", "time", "turns", "turns"]
    ),
    st.integers(0, UNITS - 1),
    st.integers(0, UNITS - 1),
    st.integers(0, REQUESTS - 1),
    st.integers(0, 2**16),
)  # fmt: skip


@dataclass
class Walk:
    """One run of steps. spots: the last answer to prep_recv of each request, from whichever unit."""

    units: list[Unit]
    spots: dict[int, tuple[Unit, Prepared]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    async def step(self, what: str, here: Unit, there: Unit, request: int, number: int) -> None:
        name, tokens = f"r{request}", self.context(request)
        end = None if number % 5 == 0 else number % (len(tokens) + 1)
        match what:
            case "prep":
                await self.attempt(self.prepare(here, request, end))
            case "send":
                self.spawn(self.send(here, request, number))
            case "generate":
                begin = number % (len(tokens) + 2) - 1
                self.tasks.append(
                    asyncio.create_task(
                        self.attempt(self.generate(here, generate(tokens, begin=begin, request=name)))
                    )
                )
            case "move":  # all verbs in their order
                self.spawn(self.move(here, there, request, number))
            case "abort":
                await here.engine.abort(name)
            case "renew":
                await self.attempt(here.engine.renew(name))
            case "pin":
                await self.attempt(self.pin(here, request, number))
            case "unpin":
                await here.engine.unpin(name)
            case "evict":
                prefix = Prefix(model=MODEL, prompt=tokens[: number % (len(tokens) + 1)])
                await here.engine.evict(prefix)
            case "time":
                await here.pass_time(number % 40)
            case _:
                await turns(number % 30)

    def context(self, request: int) -> list[int]:
        """Requests in pairs share their first 13 tokens."""
        return prompt(13, first=request // 2) + prompt(5 + 7 * request, first=50 + request)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.tasks.append(asyncio.create_task(self.attempt(work)))

    async def attempt(self, work: Awaitable[object]) -> None:
        try:
            await work
        except KvloomError as error:
            self.refusals.append(error.message)

    async def prepare(self, here: Unit, request: int, end: int | None) -> None:
        body = PrepRecv(model=MODEL, request=f"r{request}", prompt=self.context(request), end=end)
        self.spots[request] = here, await here.engine.prep_recv(body)

    async def pin(self, here: Unit, request: int, number: int) -> None:
        """Of this request's context, or of the next one's. The lease is the engine's, or longer."""
        tokens = self.context((request + number % 2) % REQUESTS)[: number % 40]
        body = Pin(model=MODEL, request=f"r{request}", prompt=tokens, lease=50 if number % 3 else None)
        pinned = await here.engine.pin(body)
        assert pinned.tokens <= len(tokens)
        assert await here.engine.pin(body) == pinned

    async def send(self, here: Unit, request: int, number: int) -> None:
        if request not in self.spots:
            return
        _, spot = self.spots[request]
        tokens = self.context(request if number % 11 else request ^ 1)
        begin = spot.matched if number % 3 else number % (len(tokens) + 1)
        end = spot.end if number % 4 else number % (len(tokens) + 1)
        await here.engine.remote_send(sending(tokens, spot, begin, end, f"r{request}"))

    async def generate(self, here: Unit, body: StartGenerate) -> None:
        answer = await ask(here.engine, body)
        if all(end.reason == "length" for end in answer.ends.values()):
            assert answer.tokens == expected(here.executor, structs.replace(body, begin=0))

    async def move(self, source: Unit, target: Unit, request: int, number: int) -> None:
        tokens, name = self.context(request), f"m{request}-{number % 3}"
        end = number % (len(tokens) + 1)
        spot = await target.engine.prep_recv(PrepRecv(model=MODEL, request=name, prompt=tokens, end=end))
        if spot.matched < spot.end:
            await source.engine.remote_send(sending(tokens, spot, spot.matched, end, name))
        await self.generate(target, generate(tokens, begin=end, request=name))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(steps=st.lists(STEP, max_size=40), seed=st.integers(0, 1000), blocks=st.sampled_from([100, 150, 300]))
def test_any_order(steps: list[tuple[str, int, int, int, int]], seed: int, blocks: int) -> None:
    """In pools of the longest request, of one and a half, and of three."""

    async def test() -> None:
        async with units(UNITS, seed=seed, blocks=blocks) as members:
            walk = Walk(members)
            for what, here, there, request, number in steps:
                await walk.step(what, members[here], members[there], request, number)
            await asyncio.gather(*walk.tasks)
            assert all(message and "\n" not in message for message in walk.refusals)
            for unit in members:  # leases end: what was reserved and pinned is let go
                await unit.pass_time(51)
                await unit.settled()
                assert unit.engine.pool.available == unit.engine.pool.total
                assert not unit.transport.ledger

    run(test)

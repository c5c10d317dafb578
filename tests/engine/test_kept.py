"""Cached prefixes that go to a store when they give way, and come back; a store that is slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvloom.kv.kept import LEAST_WAIT, LONGEST_WAIT, RETRY, SAVING, STALL
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import Pin, Prefix
from tests.modelled import ModelledExecutor, ask, engine_over, expected, modelled, turns
from tests.modelled_units import MODEL, Unit, generate, move, prompt, run
from tests.plane import Plane
from tests.stores import MemoryStore

WIDTH = 4  # tokens a page
LENGTH = 40
FEW = 52  # blocks: 13 pages, which hold one such prompt with its answer and little else


class TestClock:
    """Stands still until it is told; sleepers are woken when their time has come."""

    __test__ = False

    def __init__(self) -> None:
        self.time = 0.0
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleeping.append((self.time + seconds, woken))
        await woken.wait()

    async def go(self, seconds: float) -> None:
        await turns()
        self.time += seconds
        for due, woken in self._sleeping:
            if due <= self.time:
                woken.set()
        await turns()


@asynccontextmanager
async def life(
    store: MemoryStore, *, blocks: int = FEW, clock: TestClock | None = None, seconds: float = 0.0
) -> AsyncIterator[Unit]:
    """An engine over the store, from its start to its end; laws 1 and 4 hold afterwards. seconds: of a job,
    which takes 16 tokens of a prompt at most."""
    executor = ModelledExecutor(blocks, seconds=seconds)
    transport = Plane().join("unit-0", executor)
    clock = clock or TestClock()
    engine = engine_over(executor, transport, clock=clock, store=store.over(executor))
    async with modelled(engine, executor):
        yield Unit(engine, executor, transport, clock)  # type: ignore[arg-type]


async def computed(unit: Unit, body: StartGenerate) -> int:
    """Tokens that the unit computed for a request, whose answer was right."""
    before = unit.computed
    answer = await ask(unit.engine, body)
    assert answer.tokens == expected(unit.executor, body)
    return unit.computed - before


async def restored(unit: Unit) -> int:
    return (await unit.engine.load()).models[MODEL].restored_tokens_total


def first(tokens: list[int], request: str = "r", salt: str = "") -> StartGenerate:
    """A request for one token after a prompt."""
    return structs.replace(generate(tokens, request=request, max_tokens=1), salt=salt)


def test_what_gave_way_comes_back() -> None:
    async def test() -> None:
        store = MemoryStore()
        async with life(store) as unit:
            assert await computed(unit, first(prompt(LENGTH))) == LENGTH
            assert await computed(unit, first(prompt(LENGTH, 1))) == LENGTH  # for which the first gives way
            assert store.pages
            assert await computed(unit, first(prompt(LENGTH))) < LENGTH
            assert await restored(unit) > 0

    run(test)


def test_a_restarted_engine_finds_what_the_last_one_had_cached() -> None:
    """It had room for all, so that nothing has given way before the end."""

    async def test() -> None:
        store = MemoryStore(room=2)
        async with life(store, blocks=200) as unit:
            for i in range(3):
                await computed(unit, generate(prompt(LENGTH, i), request=f"{i}"))
            assert not store.pages
        async with life(store, blocks=200) as unit:
            for i in range(3):
                assert await computed(unit, first(prompt(LENGTH, i))) == 1
                longer = [*prompt(LENGTH, i), *expected(unit.executor, generate(prompt(LENGTH, i)))[0]]
                assert await computed(unit, first(longer)) <= WIDTH
            assert await restored(unit) == 3 * (LENGTH + WIDTH)

    run(test)


def test_a_request_takes_what_is_cached_from_the_pool_and_the_rest_from_the_store() -> None:
    async def test() -> None:
        store = MemoryStore()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200) as unit:
            assert await computed(unit, first(prompt(2 * WIDTH + 1))) == 1
            store.reads.clear()
            assert await computed(unit, first(prompt(LENGTH))) == 1
            assert [len(names) for names in store.reads] == [8, 5, 2]  # of ten pages, three at a time
            assert await restored(unit) == LENGTH
            assert await computed(unit, first(prompt(LENGTH), "again")) == 1
            assert len(store.reads) == 3, "nothing is read that is cached"

    run(test)


@pytest.mark.parametrize("salts", [("alice", "bob"), ("alice", ""), ("", "bob")])
def test_another_salt_finds_nothing(salts: tuple[str, str]) -> None:
    async def test() -> None:
        store, (owner, other) = MemoryStore(), salts
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH), salt=owner))
        async with life(store, blocks=200) as unit:
            assert await computed(unit, first(prompt(LENGTH), "a", other)) == LENGTH
            assert await restored(unit) == 0
            assert await computed(unit, first(prompt(LENGTH), "b", owner)) == 1

    run(test)


def test_a_send_finds_what_is_kept() -> None:
    async def test() -> None:
        store = MemoryStore()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200) as unit:
            _, sent = await move(unit, unit, prompt(LENGTH), 2 * WIDTH)
            assert sent is not None
            assert (sent.cached, sent.computed) == (2 * WIDTH, 0)

    run(test)


def test_who_asks_for_prompt_logprobs_reads_nothing() -> None:
    async def test() -> None:
        store = MemoryStore()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200) as unit:
            await ask(unit.engine, generate(prompt(LENGTH), max_tokens=1, prompt_logprobs=0))
            assert not store.reads

    run(test)


def test_evicted_prefixes_are_forgotten_but_for_what_stays_cached() -> None:
    async def test() -> None:
        store = MemoryStore()
        async with life(store, blocks=200) as unit:
            for salt in ("", "alice"):
                await computed(unit, first(prompt(LENGTH), salt=salt))
        every = len(store.pages)
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
            await unit.engine.pin(Pin(model=MODEL, request="pin", prompt=prompt(2 * WIDTH)))
            await unit.engine.evict(Prefix(model=MODEL, prompt=prompt(LENGTH)))
            assert len(store.pages) == every - (LENGTH // WIDTH - 2)
            await unit.engine.evict(Prefix(model=MODEL, prompt=[], salt="alice"))
            assert len(store.pages) == 2
            await unit.engine.evict(Prefix(model=MODEL, prompt=[]))
            assert not store.pages
            await unit.engine.unpin("pin")

    run(test)


# -- a store that is slow -----------------------------------------------------------------------------------


def test_a_request_waits_for_a_slow_store_no_longer_than_it_is_to_and_the_next_not_at_all() -> None:
    async def test() -> None:
        store, clock = MemoryStore(), TestClock()
        async with life(store, blocks=200) as unit:
            for i in range(3):
                await computed(unit, first(prompt(LENGTH, i)))
        async with life(store, blocks=200, clock=clock) as unit:
            store.gate.clear()
            waiting = asyncio.create_task(computed(unit, first(prompt(LENGTH))))
            await clock.go(0.9 * STALL)
            assert not waiting.done()
            await clock.go(0.2 * STALL)
            assert await waiting == LENGTH
            assert await computed(unit, first(prompt(LENGTH, 1))) == LENGTH  # while the disk owes an answer
            store.gate.set()
            await turns()
            assert await computed(unit, first(prompt(LENGTH, 2), "soon")) == LENGTH
            assert len(store.reads) == 1
            await unit.engine.evict(Prefix(model=MODEL, prompt=[]))
            assert not store.pages
            await computed(unit, first(prompt(LENGTH, 2)))
            await clock.go(RETRY)
            await computed(unit, first(prompt(LENGTH, 1)))
            assert len(store.reads) == 2, "it is tried again"
            assert await restored(unit) == 0

    run(test)


def test_pages_that_trickle_in_are_waited_for_up_to_a_bound() -> None:
    """What has come by then is used."""

    async def test() -> None:
        store, clock = MemoryStore(most=1), TestClock()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200, clock=clock) as unit:
            store.gate.clear()
            waiting = asyncio.create_task(computed(unit, first(prompt(LENGTH))))
            step, pages = 0.8 * STALL, 0
            while clock.now() + step < LONGEST_WAIT:
                await clock.go(step)
                store.gate.set()
                await asyncio.sleep(0)
                store.gate.clear()
                pages += 1
            await turns()
            assert not waiting.done()
            await clock.go(step)
            assert await waiting == LENGTH - pages * WIDTH
            assert await restored(unit) == pages * WIDTH
            store.gate.set()

    run(test)


@pytest.mark.parametrize(("seconds", "longest"), [(1e-6, LEAST_WAIT), (0.08, 0.2), (60.0, STALL)])
def test_nobody_waits_longer_than_computing_would_take(seconds: float, longest: float) -> None:
    async def test() -> None:
        store, clock = MemoryStore(), TestClock()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200, clock=clock, seconds=seconds) as unit:
            await computed(unit, first(prompt(16, 5)))  # at 16 tokens in so many seconds
            store.gate.clear()
            waiting = asyncio.create_task(computed(unit, first(prompt(LENGTH))))
            await clock.go(0.99 * longest)
            assert not waiting.done()
            await clock.go(0.02 * longest)
            assert await waiting == LENGTH
            store.gate.set()
            await turns()

    run(test)


@pytest.mark.parametrize(("seconds", "again"), [(0.3, True), (0.08, False)])
def test_a_store_that_is_slower_than_computing_is_left_alone_for_a_while(seconds: float, again: bool) -> None:
    """A third of the prompt is there, and takes a tenth of a second."""

    async def test() -> None:
        store, clock = MemoryStore(most=100), TestClock()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(12)))
        async with life(store, blocks=200, clock=clock, seconds=seconds) as unit:
            await computed(unit, first(prompt(16, 5)))
            store.gate.clear()
            waiting = asyncio.create_task(computed(unit, first(prompt(LENGTH))))
            await clock.go(0.1)
            store.gate.set()
            assert await waiting == LENGTH - 12
            store.reads.clear()
            await computed(unit, first(prompt(LENGTH, 1)))
            assert bool(store.reads) == again
            await clock.go(RETRY)
            await computed(unit, first(prompt(LENGTH, 2)))
            assert store.reads

    run(test)


def test_a_caller_who_hangs_up_leaves_a_slow_read_behind() -> None:
    async def test() -> None:
        store, clock = MemoryStore(), TestClock()
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200, clock=clock) as unit:
            store.gate.clear()
            waiting = asyncio.create_task(computed(unit, first(prompt(LENGTH))))
            other = asyncio.create_task(computed(unit, first(prompt(LENGTH), "other")))
            await turns()
            waiting.cancel()
            assert await other == LENGTH, "it does not wait for a read that nobody waits for"
            store.gate.set()
            await turns()

    run(test)


def test_requests_with_one_beginning_read_it_once() -> None:
    async def test() -> None:
        store = MemoryStore(most=100)
        async with life(store, blocks=200) as unit:
            await computed(unit, first(prompt(LENGTH)))
        async with life(store, blocks=200) as unit:
            bodies = [first(prompt(LENGTH), f"{i}") for i in range(4)]
            answers = await asyncio.gather(*[ask(unit.engine, one) for one in bodies])
            assert [answer.tokens for answer in answers] == [expected(unit.executor, one) for one in bodies]
            assert len(store.reads) == 1
            assert await restored(unit) == LENGTH

    run(test)


def test_an_engine_that_ends_does_not_wait_for_a_store_that_hangs() -> None:
    async def test() -> None:
        store, clock = MemoryStore(room=2), TestClock()
        async with life(store, blocks=200, clock=clock) as unit:
            await computed(unit, first(prompt(LENGTH)))
            store.gate.clear()
            ending = asyncio.create_task(_pass(clock, SAVING))
        await ending
        assert len(store.pages) == 2

    run(test)


async def _pass(clock: TestClock, seconds: float) -> None:
    await turns(200)
    await clock.go(seconds)


# -- whatever happens ---------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 9), min_size=4, max_size=14))
def test_whatever_the_store_loses_and_however_full_the_pool_is_tokens_are_the_same(
    seed: int, doings: list[int]
) -> None:
    """Prompts with common beginnings, several at a time, over a pool for two of them; pages of the store are
    lost, an engine ends and another begins."""

    async def test() -> None:
        rng, store = random.Random(seed), MemoryStore(most=2, room=5)
        left = list(doings)
        while left:
            async with life(store, blocks=80) as unit:
                while left:
                    doing = left.pop()
                    if doing == 0:
                        break
                    if doing == 1:
                        for name in rng.sample(list(store.pages), len(store.pages) // 3):
                            del store.pages[name]
                    bodies = [
                        structs.replace(
                            generate(
                                prompt(rng.choice([8, 20, 40])) + prompt(rng.randrange(1, 20), doing),
                                request=f"{len(left)}-{i}",
                                max_tokens=rng.randrange(1, 6),
                            ),
                            salt=rng.choice(["", "alice"]),
                        )
                        for i in range(rng.randrange(1, 4))
                    ]
                    answers = await asyncio.gather(*[ask(unit.engine, one) for one in bodies])
                    for body, answer in zip(bodies, answers, strict=True):
                        assert answer.tokens == expected(unit.executor, body)

    run(test)

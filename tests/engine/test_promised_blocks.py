"""One budget for pins and reservations: however they come and go, the longest request finds its room."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloom.engine.leases import Pins, Promises
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.reservations import KVReservation, Reservations
from kvloom.engine.sequence import Sequence, Status, TokenBuffer
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.errors import KvloomError, OutOfBlocks
from kvloom.types.request import SamplingParams
from kvloom.types.verbs import Pin, Prepared, PrepRecv
from tests.examples import examples
from tests.modelled import GEOMETRIES, ModelledExecutor, ask, card, expected, turns
from tests.modelled_units import MODEL, ManualClock, Unit, generate, prompt, run, sending, units
from tests.plane import Plane

CONTEXT = 24
MODELS = ("wide", "tall")  # 4 blocks for 4 tokens, 5 blocks for 5
LONGEST = 25  # blocks of CONTEXT tokens of `tall`
LEASE = 30.0

models = st.sampled_from(MODELS)
texts = st.tuples(st.integers(0, 2), st.integers(1, CONTEXT))  # which, and how long
owners = st.sampled_from("abcdef")


def tokens_of(text: tuple[int, int]) -> list[int]:
    """Texts share their first 7 tokens."""
    which, length = text
    return [7 if at < 7 else which for at in range(length)]


class Budget(RuleBasedStateMachine):
    """Everything that promises blocks, over a pool; sequences that are only here, and hold none."""

    @initialize(total=st.sampled_from([LONGEST, LONGEST + 9, 2 * LONGEST - 1, 2 * LONGEST, 100]))
    def begin(self, total: int) -> None:
        geometries = {model: GEOMETRIES[model] for model in MODELS}
        contexts = dict.fromkeys(MODELS, CONTEXT)
        self.pool = Pool(total, geometries, max_sequences=64, max_tokens=contexts)
        self.queues = {
            model: ModelQueue(card(model, CONTEXT), self.pool.caches[model], 64, 64) for model in MODELS
        }
        self.small = total < 2 * LONGEST
        self.ids = iter(range(1_000_000))
        self.clock = ManualClock()
        promises = Promises(self.queues, total)
        self.transport = Plane().join("unit", ModelledExecutor(total))
        self.pins = Pins(self.queues, promises, self.clock, LEASE)
        self.reservations = Reservations(
            self.queues, promises, self.transport, self.clock, LEASE, self.ids.__next__
        )

    # -- what the machine does --------------------------------------------------------------------------

    @rule(model=models, text=texts)
    def serve(self, model: str, text: tuple[int, int]) -> None:
        """A request is computed at once, and leaves its tokens cached."""
        tokens, cache, one = tokens_of(text), self.pool.caches[model], next(self.ids)
        matched = cache.adopt(one, tokens, len(tokens) - 1)
        with suppress(OutOfBlocks):
            cache.end_forward(cache.begin_forward([one], [len(tokens) - matched]))
            cache.keep(one, tokens, tail=True)
        cache.remove_sequence(one)

    @rule(model=models, text=texts, owner=owners, lease=st.sampled_from([None, 5, 100]))
    def pin(self, model: str, text: tuple[int, int], owner: str, lease: int | None) -> None:
        before = self.promised()
        body = Pin(model=model, request=owner, prompt=tokens_of(text), lease=lease)
        try:
            pinned = self.pins.pin(body)
        except OutOfBlocks:
            assert self.promised() == before
        else:
            assert self.pins.pin(body) == pinned

    @rule(model=models, text=texts, owner=owners)
    def reserve(self, model: str, text: tuple[int, int], owner: str) -> None:
        before, cached = self.promised(), self.pool.cached
        body = PrepRecv(model=model, request=owner, prompt=tokens_of(text))
        try:
            self.reservations.prepare(body)
        except OutOfBlocks:
            assert self.promised() == before
            assert self.pool.cached == cached  # nothing gave way in vain
            own = self.pool.caches[model].geometry.blocks(text[1])
            assert own + sum(before.values()) > (0 if self.small else self.pool.total - LONGEST)
        except KvloomError:
            assert self.promised() == before  # it has another reservation

    @rule(owner=owners)
    def give_up(self, owner: str) -> None:
        self.pins.unpin(owner)
        self.reservations.release(owner)

    @rule(owner=owners)
    def renew(self, owner: str) -> None:
        self.pins.renew(owner)
        self.reservations.renew(owner)

    @rule(seconds=st.sampled_from([1, 10, 31]))
    def time(self, seconds: float) -> None:
        self.clock.time += seconds
        self.pins.expire()
        self.reservations.expire()

    @rule(slot=st.integers(0, 5))
    def copying(self, slot: int) -> None:
        """A sender begins to write, or ends."""
        entry = self.transport.ledger.get(slot)
        if entry is not None:
            entry.copying = 1 - entry.copying

    @rule(model=models, text=texts)
    def come(self, model: str, text: tuple[int, int]) -> None:
        one = next(self.ids)
        self.queues[model].enqueue(
            Sequence(
                id=one,
                model=model,
                request=str(one),
                choice=0,
                order=(0, one, 0),
                sampling=SamplingParams(max_tokens=1, seed=0),
                tokens=TokenBuffer(np.asarray(tokens_of(text), dtype=np.int64)),
                prompt_logprobs=[],
            ),
            0,
        )

    @rule(model=models)
    def go(self, model: str) -> None:
        for sequence in list(self.queues[model].waiting):
            self.queues[model].release(sequence, Status.ENDED)

    @rule()
    def wait(self) -> None:
        """Whoever is here has room after one lease, though owners renew all the time."""
        for entry in self.transport.ledger.values():
            entry.copying = 0
        for _ in range(4):
            for owner in "abcdef":
                self.renew(owner)
            self.time(LEASE / 3)
        here = max(queue.blocks_of_longest for queue in self.queues.values())
        assert self.pool.total - sum(self.promised().values()) >= here

    # -- what holds -------------------------------------------------------------------------------------

    def rooms(self) -> list[KVReservation]:
        return [*self.reservations._open.values(), *self.reservations._closing]

    def pages(self, model: str, rooms: list[KVReservation]) -> set[int]:
        """Pinned, or of these."""
        cache = self.pool.caches[model]
        found = {page for page, holders in cache.prefixes.holders().items() if holders > 1}
        for room in rooms:
            if room.cache is cache:
                found.update(cache.page_list(room.sequence))
        return found

    def promised(self, rooms: list[KVReservation] | None = None) -> dict[str, int]:
        """Blocks by model, counted anew."""
        some = self.rooms() if rooms is None else rooms
        caches: dict[str, ModelCache] = self.pool.caches
        return {
            model: len(self.pages(model, some)) * cache.geometry.blocks_per_page
            for model, cache in caches.items()
        }

    @invariant()
    def counted(self) -> None:
        self.pool.check()
        for model, blocks in self.promised().items():
            assert self.pool.caches[model].pages.promised_blocks == blocks
        assert self.pool.total - self.pool.available == sum(self.promised().values())

    @invariant()
    def the_longest_has_its_room(self) -> None:
        lasting = [room for room in self.rooms() if not room.beyond]
        assert sum(self.promised(lasting).values()) <= self.pool.total - LONGEST
        assert self.small or len(lasting) == len(self.rooms())

    def teardown(self) -> None:
        for entry in self.transport.ledger.values():
            entry.copying = 0
        for _ in range(2):
            self.time(101)
        assert self.pool.available == self.pool.total
        assert not self.transport.ledger


TestBudget = Budget.TestCase
TestBudget.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True
)


# -- the same, by engines --------------------------------------------------------------------------------


async def room(unit: Unit, tokens: list[int], request: str = "r") -> Prepared:
    return await unit.engine.prep_recv(PrepRecv(model=MODEL, request=request, prompt=tokens))


def test_reservations_leave_the_longest_request_its_room() -> None:
    async def test() -> None:
        async with units(1, blocks=300) as (d,):
            for i in range(2):
                await room(d, prompt(96, first=i), f"r{i}")
            refusal = (
                "prep_recv: 208 of 300 blocks would be promised to pins and reservations, and the longest"
            )
            with pytest.raises(OutOfBlocks, match=refusal):
                await room(d, prompt(13, first=3), "r3")
            await room(d, prompt(5, first=3), "r3")
            for _ in range(40):  # within the budget they last as long as their owners want
                await d.pass_time(20)
                for i in (0, 1, 3):
                    await d.engine.renew(f"r{i}")
            bodies = [generate(prompt(90, first=i), request=f"g{i}") for i in range(2)]
            answers = await asyncio.gather(*(ask(d.engine, body) for body in bodies))
            assert [answer.tokens for answer in answers] == [expected(d.executor, body) for body in bodies]

    run(test)


def test_a_pool_of_one_longest_request_receives_one() -> None:
    """And whoever comes meanwhile waits for it, but no longer than a lease."""

    async def test() -> None:
        async with units(2, blocks=100) as (p, d):
            tokens, body = prompt(95), generate(prompt(90, first=5), request="later")
            spot = await room(d, tokens)
            with pytest.raises(OutOfBlocks, match="of 100 blocks would be promised"):
                await room(d, prompt(8, first=6), "second")
            later = asyncio.create_task(ask(d.engine, body))
            await p.engine.remote_send(sending(tokens, spot))
            assert not later.done()
            moved = asyncio.create_task(ask(d.engine, generate(tokens, begin=94, max_tokens=1)))
            assert (await later).tokens == expected(d.executor, body)
            assert (await moved).tokens == expected(d.executor, generate(tokens, max_tokens=1))
            await room(d, prompt(95, first=7))
            later = asyncio.create_task(ask(d.engine, body))
            for _ in range(3):
                await d.pass_time(9)
                await d.engine.renew("r")
                assert not later.done()
            await d.pass_time(9)
            assert (await later).tokens == expected(d.executor, body)

    run(test)


def test_two_units_whose_sends_wait_for_each_others_rooms() -> None:
    """They do so for a lease, not for ever; what had to give way is told so."""

    async def test() -> None:
        async with units(2, blocks=100) as pair:
            sends = []
            for i, (here, there) in enumerate((pair, pair[::-1])):
                tokens = prompt(90, first=i)
                spot = await room(there, tokens, f"r{i}")
                sends.append((here, sending(tokens, spot, request=f"r{i}")))
            tasks = [asyncio.create_task(unit.engine.remote_send(body)) for unit, body in sends]
            for _ in range(4):
                await turns()
                assert not any(task.done() for task in tasks)
                for i, unit in enumerate(reversed(pair)):
                    with suppress(KvloomError):
                        await unit.engine.renew(f"r{i}")
                for unit in pair:
                    await unit.pass_time(9)
            for unit in pair:
                await unit.settled()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, KvloomError)
                assert "is over" in error.message

    run(test)

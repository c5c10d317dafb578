"""A loan without much room: who goes out, who has to come back, what that costs the others, and who gives way
where blocks are short; and sequences that go away and come home at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from kvloom.engine.engine import Engine
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence
from kvloom.offload.policy import COPIED, KEPT
from kvloom.types.job import Job
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import PrepRecv
from tests.engine.modelled_weaving import MODEL, PAGE, ModelledBackend, WeavingExecutor, borrow, hot_unit
from tests.engine.plays import check, order, serve, until
from tests.engines import Answer
from tests.modelled import ModelledExecutor, ask, engine_over, modelled, turns
from tests.modelled_units import sending
from tests.plane import Plane


async def answered(engine: Engine, executor: WeavingExecutor, bodies: list[StartGenerate]) -> None:
    answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        check(executor, body, answer, whole=True)


def test_a_full_loan_is_not_gone_out_into_again_and_again() -> None:
    """Sixteen want to be there, and there is room for a third of what they come to have. Of what is kept for
    those away nothing is taken by who goes."""
    engine, executor = hot_unit(300, 120)
    left: list[int] = []

    async def play() -> None:
        woven = borrow(engine, 1.0, 120)
        real = woven.finish

        def finish(
            job: Job, lost: str | None, valid: Mapping[int, int] | None = None
        ) -> tuple[set[int], list[Sequence]]:
            if any(out for _, out in woven._moving):
                left.append(woven.cache.pages.available)
            return real(job, lost, valid)

        woven.finish = finish  # type: ignore[method-assign]
        await answered(engine, executor, [order("r" * i, MODEL, 16 + i, max_tokens=70) for i in range(1, 17)])
        assert woven.tokens > 400
        assert woven.went < 24

    serve(play(), engine, executor)
    assert min(left) >= 120 // KEPT


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_those_that_move_do_so_a_few_at_a_time(share: float) -> None:
    """Sixteen are sent away at once, or called back."""
    engine, executor = hot_unit(200, 200)

    async def play() -> None:
        woven = borrow(engine, 1 - share, 200)
        bodies = [order(f"r{i}", MODEL, 17, max_tokens=70) for i in range(16)]
        asked = asyncio.create_task(answered(engine, executor, bodies))
        await until(lambda: woven.tokens > 150 if woven.share else len(executor.jobs) > 20)
        before = woven.count
        engine.borrower.set_share(MODEL, share)
        await until(lambda: woven.count in (0, 16) and woven.count != before)
        await asked

    serve(play(), engine, executor)
    many = [(pages, moves) for pages, moves in executor.moved if len(moves) > 1]
    assert many
    assert all(sum(moves) <= pages // COPIED for pages, moves in many)


def test_a_prompt_stays_cached_at_home_when_its_sequence_goes() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        borrow(engine, 1.0, 60)
        body = order("first", MODEL, 41, max_tokens=10)
        await answered(engine, executor, [body])
        again = await ask(engine, order("later", MODEL, 41, max_tokens=10))
        assert again.ends[0].cached_tokens == 40

    serve(play(), engine, executor)


def test_what_is_lost_is_computed_again_from_what_is_cached_at_home() -> None:
    engine, executor = hot_unit(60, 60, losing=frozenset([8]))

    async def play() -> None:
        borrow(engine, 1.0, 60)
        await answered(engine, executor, [order("lost", MODEL, 48, max_tokens=20)])
        assert engine.borrower.loan(MODEL) is None

    serve(play(), engine, executor)
    computed = sum(job.tokens.size for job in executor.jobs if job.offloaded is None)
    assert computed < 48 + 20 + 8  # not the prompt again


def test_who_comes_home_is_copied_from_where_the_cache_ends() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        woven = borrow(engine, 1.0, 60)
        body = order("back", MODEL, 48, max_tokens=20)
        asked = asyncio.create_task(answered(engine, executor, [body]))
        await until(lambda: woven.tokens > 5)
        engine.borrower.set_share(MODEL, 0.0)
        await asked
        assert woven.came == 1

    serve(play(), engine, executor)
    out, back = (moves[0] for _, moves in executor.moved if moves)
    assert out >= 12
    assert back <= 3


@pytest.mark.parametrize("failing", [11, 15, 24])
def test_a_step_that_fails_takes_those_that_wait_with_it_to_nobody(failing: int) -> None:
    """All need another page at once, so some have to come home, and wait: they are computed again."""
    engine, executor = hot_unit(200, 30, failing=frozenset([failing]))

    async def play() -> None:
        borrow(engine, 1.0, 30)
        bodies = [order("r" * (i + 1), MODEL, 2, max_tokens=50) for i in range(8)]
        answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
        failed = [any(end.reason == "error" for end in answer.ends.values()) for answer in answers]
        assert 0 < sum(failed) < len(bodies)
        for body, answer, lost in zip(bodies, answers, failed, strict=True):
            check(executor, body, answer, whole=not lost)

    serve(play(), engine, executor)


def test_who_lacks_room_at_home_goes_where_there_is_some() -> None:
    """Nobody is to be away by its number; nobody is computed again."""
    engine, executor = hot_unit(30, 60)

    async def play() -> None:
        woven = borrow(engine, 1e-9, 60)
        await answered(engine, executor, [order("r" * (i + 1), MODEL, 20, max_tokens=50) for i in range(3)])
        assert woven.went > 0
        assert (await engine.load()).models[MODEL].preemptions_total == 0

    serve(play(), engine, executor)


def test_an_offloaded_sequence_is_in_the_loans_cache_alone() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        loan = borrow(engine, 1.0, 60)
        asked = asyncio.create_task(answered(engine, executor, [order("one", MODEL, 20, max_tokens=30)]))
        await until(lambda: loan.tokens > 5)
        assert len(loan.cache.sequences) == 1
        assert engine.pool.caches[MODEL].sequences == ()
        await asked

    serve(play(), engine, executor)


def test_the_prompt_of_an_offloaded_request_can_be_sent() -> None:
    """The verb caches what the request has at home first; it has nothing there."""
    plane, other = Plane(), ModelledExecutor(60 * PAGE, compute=1, models=(MODEL,))
    executor = WeavingExecutor(60 * PAGE, 60 * PAGE)
    hot = engine_over(executor, plane.join("hot", executor), offload=ModelledBackend(executor))
    target = engine_over(other, plane.join("target", other))
    body = order("one", MODEL, 20, max_tokens=30)

    async def play() -> None:
        async with modelled(target, other):
            loan = borrow(hot, 1.0, 60)
            asked = asyncio.create_task(answered(hot, executor, [body]))
            await until(lambda: loan.tokens > 5)
            room = await target.prep_recv(
                PrepRecv(model=MODEL, request="room", prompt=body.prompt, end=len(body.prompt))
            )
            sent = await hot.remote_send(sending(body.prompt, room, 0, room.end, body.request))
            assert sent.cached + sent.computed == room.end == len(body.prompt)
            await target.abort("room")
            await asked

    serve(play(), hot, executor)


Gone = list[tuple[Sequence, bool]]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Gone:
    """Who was put back, and whether from home."""
    seen, real = Gone(), ModelQueue.put_back

    def put_back(self: ModelQueue, sequence: Sequence, now: int, reason: str) -> None:
        seen.append((sequence, self.planner.is_home(sequence)))
        real(self, sequence, now, reason)

    monkeypatch.setattr(ModelQueue, "put_back", put_back)
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_no_urgent_one_is_computed_again(seed: int, gone: Gone) -> None:
    """Four of sixteen are urgent, and the shortest, so that the others together always make room for them."""
    dice = random.Random(seed)
    lent = dice.choice((20, 30))
    engine, executor = hot_unit(dice.choice((30, 40)), lent, seed=seed)

    async def one(i: int) -> None:
        urgent = i % 4 == 1
        length, count = (8, 40) if urgent else (dice.choice((24, 30)), 50)
        body = order(f"{'r' * (i + 1)}", MODEL, length, priority=0 if urgent else 1, max_tokens=count)
        check(executor, body, await ask(engine, body), whole=True)

    async def play() -> None:
        borrow(engine, dice.choice((0.3, 0.6, 1.0)), lent)
        asked = []
        for i in range(16):
            asked.append(asyncio.create_task(one(i)))
            await turns(dice.choice((0, 30)))
        await asyncio.gather(*asked)

    serve(play(), engine, executor)
    assert gone
    assert {sequence.order[0] for sequence, _ in gone} == {1}


def test_the_urgent_go_out_in_the_place_of_the_others(gone: Gone) -> None:
    """By their numbers half would be away, just those that are not urgent. The others need twice the pool."""
    engine, executor = hot_unit(30, 60)

    async def one(i: int) -> None:
        away = i in (0, 2, 4, 5, 7)
        length, count = (30, 50) if away else (8, 40)
        body = order("r" * (i + 1), MODEL, length, priority=int(away), max_tokens=count)
        check(executor, body, await ask(engine, body), whole=True)

    async def play() -> None:
        woven = borrow(engine, 0.5, 60)
        await asyncio.gather(*map(one, range(10)))
        assert woven.went > 5

    serve(play(), engine, executor)
    assert {(sequence.order[0], here) for sequence, here in gone} >= {(1, False)}
    assert not [sequence.id for sequence, _ in gone if not sequence.order[0]]


class Stirred:
    """Requests that come, a share that changes, a loan that ends and is made again, all at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        losing = frozenset(self.random.sample(range(1, 60), self.random.choice((0, 1, 4))))
        failing = frozenset(self.random.sample(range(20, 120), self.random.choice((0, 0, 2))))
        self.lent = self.random.choice((5, 12, 40))
        self.engine, self.executor = hot_unit(
            self.random.choice((26, 32, 60)), self.lent, seed=seed, losing=losing, failing=failing
        )
        self.asked: list[tuple[StartGenerate, asyncio.Task[Answer]]] = []
        self.aborted: set[str] = set()

    async def play(self) -> None:
        stirring = asyncio.create_task(self._stir())
        for i in range(24):
            body = order(
                f"r{i}",
                MODEL,
                self.random.choice((1, 7, 16, 40, 60)),
                n=self.random.choice((1, 1, 2)),
                priority=self.random.choice((0, 0, 1)),
                max_tokens=self.random.choice((1, 8, 30)),
            )
            self.asked.append((body, asyncio.create_task(ask(self.engine, body))))
            await turns(self.random.choice((0, 5, 40)))
        await asyncio.gather(*(task for _, task in self.asked))
        assert not stirring.done()
        stirring.cancel()

    async def _stir(self) -> None:
        while True:
            woven, roll = self.engine.borrower.loan(MODEL), self.random.random()
            if woven is None:
                woven = borrow(self.engine, self.random.random(), self.lent)
            elif roll < 0.4:
                self.engine.borrower.set_share(MODEL, self.random.choice((0.0, 0.3, 0.7, 1.0)))
            elif roll < 0.45:
                self.engine.borrower.withdraw(MODEL)
            elif roll < 0.5 and self.asked:
                body, task = self.random.choice(self.asked)
                if not task.done():
                    self.aborted.add(body.request)
                    await self.engine.abort(body.request)
            woven.pool.check()
            await turns(self.random.choice((1, 3, 10)))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_moves_the_tokens_are_those_of_a_lone_request(seed: int) -> None:
    stirred = Stirred(seed)
    serve(stirred.play(), stirred.engine, stirred.executor)
    for body, task in stirred.asked:
        failed = any(end.reason == "error" for end in task.result().ends.values())
        whole = not failed and body.request not in stirred.aborted
        check(stirred.executor, body, task.result(), whole=whole)


@pytest.mark.parametrize("seed", range(6))
def test_the_policy_sees_that_a_loan_has_ended_before_anybody_left(seed: int) -> None:
    """Two models take turns, so a sequence that is to leave waits for the other model's job."""
    executor = WeavingExecutor(80, 48, seed=seed, models=(MODEL, "thin"))
    engine = engine_over(executor, offload=ModelledBackend(executor), policy="partitioned")

    async def stir() -> None:
        draws = random.Random(seed)
        while True:
            loan = engine.borrower.loan(MODEL)
            if loan is None:
                borrow(engine, 0.01, 12)
            elif loan.policy.offloaded or draws.random() < 0.2:
                engine.borrower.withdraw(MODEL)
            await asyncio.sleep(0)

    async def play() -> None:
        stirring = asyncio.create_task(stir())
        bodies = [
            order(f"{model}-{number}", model, prompt, max_tokens=40)
            for number in range(16)
            for model, prompt in ((MODEL, 16), ("thin", 9))
        ]
        answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
        stirring.cancel()
        for body, answer in zip(bodies, answers, strict=True):
            check(executor, body, answer, whole=True)

    serve(play(), engine, executor)

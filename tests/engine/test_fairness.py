"""Queues are fair between tenants, in tokens and in places (virtual token counters)."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.engine.batching.fair_queue import INPUT_COST, OUTPUT_COST, REMEMBERED, FairQueue
from kvloom.engine.batching.view import Order
from kvloom.engine.engine import Engine
from kvloom.types.errors import QueueFull
from kvloom.types.request import Made, StartGenerate, TokenEvent
from kvloom.types.spec import Policy
from kvloom.types.verbs import Prefix
from tests.engine.plays import check, order, serve, until
from tests.modelled import VOCAB, ModelledExecutor, ask, engine_over, turns

MODEL = "wide"


@dataclass(eq=False)
class One:
    order: Order
    tenant: str


def queued(queue: FairQueue[One], *tenants: str, after: int = 0) -> list[One]:
    """Lets one sequence of each tenant wait, in this order."""
    made = [One((0, after + i, 0), tenant) for i, tenant in enumerate(tenants)]
    for one in made:
        queue.add(one)
    return made


def served(queue: FairQueue[One], cost: int) -> str:
    """Takes the next one out of the queue, charges it, and returns its tenant."""
    one = queue.first
    assert one is not None
    queue.discard(one)
    queue.charge(one, cost)
    return one.tenant


def backlogged_difference(
    prompts: tuple[list[int], list[int]], outputs: tuple[list[int], list[int]], running: int
) -> int:
    """Returns by how much the service of two tenants, of both of whom something waits all the time, differed
    at most, as up to `running` sequences ran at once."""
    queue, number, batch = FairQueue[One](), itertools.count(), list[list[int]]()
    names, had, most = ("a", "b"), Counter[str](), 0
    lengths = {
        name: (itertools.cycle(prompts[i]), itertools.cycle(outputs[i])) for i, name in enumerate(names)
    }
    ones: list[One] = []
    for name in names * 2:
        queue.add(One((0, next(number), 0), name))
    for _ in range(300):
        while len(ones) < running:
            one = queue.first
            assert one is not None
            queue.discard(one)
            queue.add(One((0, next(number), 0), one.tenant))  # another one has always come meanwhile
            prompt, output = (next(of) for of in lengths[one.tenant])
            queue.charge(one, INPUT_COST * prompt)
            had[one.tenant] += INPUT_COST * prompt
            ones.append(one)
            batch.append([output])
        for one, left in zip(ones, batch, strict=True):
            queue.charge(one, OUTPUT_COST)
            had[one.tenant] += OUTPUT_COST
            left[0] -= 1
        ones = [one for one, left in zip(ones, batch, strict=True) if left[0]]
        batch = [left for left in batch if left[0]]
        most = max(most, abs(had["a"] - had["b"]))
    return most


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(st.tuples(LENGTHS, LENGTHS), st.tuples(LENGTHS, LENGTHS), st.integers(1, 6))
def test_the_service_of_backlogged_tenants_differs_by_a_bound(
    prompts: tuple[list[int], list[int]], outputs: tuple[list[int], list[int]], running: int
) -> None:
    """Theorem 4.4 of the paper: at most twice the larger of a prompt and the tokens of a batch."""
    longest, made = max(map(max, prompts)), max(map(max, outputs))
    bound = 2 * max(INPUT_COST * longest, OUTPUT_COST * running * made)
    assert backlogged_difference(prompts, outputs, running) <= bound


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 9)), max_size=30))
def test_one_tenant_is_served_in_order(drawn: list[tuple[int, int]]) -> None:
    queue = FairQueue[One]()
    orders = [(priority, number, 0) for number, (priority, _) in enumerate(drawn)]
    for one, (_, cost) in sorted(zip(orders, drawn, strict=True), key=lambda each: each[1][1]):
        waiting = One(one, "a")
        queue.add(waiting)  # who was preempted comes back behind later ones
        queue.charge(waiting, cost)
    assert [one.order for one in queue] == sorted(orders)
    out: list[Order] = []
    while first := queue.first:
        queue.discard(first)
        out.append(first.order)
    assert out == sorted(orders)


def test_who_was_idle_has_saved_up_nothing() -> None:
    queue = FairQueue[One]()
    queued(queue, "quiet")
    served(queue, 1)
    queued(queue, *"bbbb", after=1)
    assert [served(queue, 100) for _ in range(3)] == ["b"] * 3
    queued(queue, *["quiet"] * 9, after=5)
    assert served(queue, 100) == "b"  # it came first, and the quiet one's counter is no smaller
    assert [served(queue, 100) for _ in range(9)] == ["quiet"] * 9


def test_who_comes_to_an_empty_queue_begins_where_the_last_one_stands() -> None:
    queue = FairQueue[One]()
    queued(queue, "a")
    served(queue, 1000)
    queued(queue, "b", "a", "b", after=1)
    assert [served(queue, 10) for _ in range(3)] == ["b", "a", "b"]


def test_a_more_urgent_request_goes_first_whatever_its_tenant_has_had() -> None:
    queue = FairQueue[One]()
    queued(queue, *"aaab")
    served(queue, 500)
    queue.add(One((-1, 9, 0), "a"))
    assert [served(queue, 500) for _ in range(4)] == ["a", "b", "a", "a"]


@pytest.mark.parametrize("strangers", [5, REMEMBERED + 1])
def test_the_tenants_that_came_last_are_remembered(strangers: int) -> None:
    queue = FairQueue[One]()
    queued(queue, "debtor", "other")
    assert served(queue, 10**9) == "debtor"
    assert served(queue, 1) == "other"
    for i in range(strangers):
        queued(queue, f"stranger {i}", "other", after=10 * i + 10)
        assert {served(queue, 1), served(queue, 1)} == {f"stranger {i}", "other"}
    queued(queue, "other", "other", "debtor", after=10**6)
    then = [served(queue, 1) for _ in range(3)]
    forgotten = strangers > REMEMBERED
    assert then == (["other", "debtor", "other"] if forgotten else ["other", "other", "debtor"])


def test_tenants_and_priorities_without_number_take_bounded_memory() -> None:
    queue = FairQueue[One]()

    def come_and_go(first: int) -> int:
        for i in range(first, first + 2 * REMEMBERED):
            one = One((i, i, 0), f"stranger {i}")
            queue.add(one)
            queue.discard(one)
        return tracemalloc.get_traced_memory()[0]

    come_and_go(0)
    tracemalloc.start()
    try:
        before = come_and_go(10**6)
        assert come_and_go(2 * 10**6) - before < 100_000
    finally:
        tracemalloc.stop()


def flood(tenant: str, count: int, *, length: int = 4, tokens: int = 8) -> list[StartGenerate]:
    return [
        replace(order(f"{tenant}-{i}", MODEL, length, max_tokens=tokens), tenant=tenant) for i in range(count)
    ]


def asker(
    engine: Engine, executor: ModelledExecutor, ended: list[str], told: str = "tenant"
) -> Callable[[StartGenerate], Coroutine[None, None, None]]:
    """Returns a function that asks, checks the answer, and then notes which request has ended. told: the
    field by which."""

    async def one(body: StartGenerate) -> None:
        check(executor, body, await ask(engine, body), whole=True)
        ended.append(getattr(body, told))

    return one


@pytest.mark.parametrize("tokens", [8, 2])
def test_a_quiet_tenant_has_its_share_beside_a_flood(tokens: int) -> None:
    """Of two that wait, tokens decide, and not requests: who asks for a quarter is served four times."""
    executor = ModelledExecutor(160, models=(MODEL,))
    engine = engine_over(executor, max_running=2)
    ended: list[str] = []
    one = asker(engine, executor, ended)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for body in flood("loud", 40):
                group.create_task(one(body))
            await until(lambda: len(ended) == 4)
            for body in flood("quiet", 8, tokens=tokens):
                group.create_task(one(body))

    serve(play(), engine, executor)
    last = max(i for i, tenant in enumerate(ended) if tenant == "quiet")
    service = {8: 4 + 2 * 8, 2: 4 + 2 * 2}
    loud = 4 + (8 * service[tokens]) / service[8]
    assert ended[:last].count("loud") <= loud + 4


async def waits(engine: Engine, count: int) -> None:
    while (await engine.load()).models[MODEL].waiting < count:
        await turns(1)


def test_a_full_queue_is_shared_between_tenants() -> None:
    executor = ModelledExecutor(160, models=(MODEL,))
    engine = engine_over(executor, max_running=1)  # 64 may wait
    ended, refused = list[str](), list[str]()

    async def one(body: StartGenerate) -> None:
        try:
            await ask(engine, body)
            ended.append(body.request)
        except QueueFull:
            refused.append(body.request)

    async def play() -> None:
        loud = flood("loud", 64, tokens=90)
        async with asyncio.TaskGroup() as group:
            group.create_task(one(flood("first", 1, tokens=90)[0]))
            await until(lambda: bool(executor.jobs))
            for body in loud:
                group.create_task(one(body))
            await waits(engine, 64)
            for body in flood("quiet", 3, tokens=1):
                group.create_task(one(body))
            await until(lambda: len(refused) == 3)
            assert refused == ["loud-63", "loud-62", "loud-61"]
            for body in *flood("loud and late", 1), replace(loud[0], request="loud-again"):
                group.create_task(one(body))
            await until(lambda: len(refused) == 5)
            assert refused[3:] == ["loud-again", "loud-60"]
            assert (await engine.load()).models[MODEL].displaced_total == 4

    serve(play(), engine, executor)
    assert {"quiet-0", "quiet-1", "quiet-2", "loud and late-0"} < set(ended)


@pytest.mark.parametrize(
    ("waiting", "newcomer"),
    [
        ([flood(f"tenant {i}", 1)[0] for i in range(64)], flood("one more", 1)[0]),  # as fair as before
        (flood("loud", 64), replace(flood("quiet", 1)[0], priority=1)),  # less urgent
    ],
    ids=["no fairer", "less urgent"],
)
def test_a_newcomer_who_takes_nobodys_place(waiting: list[StartGenerate], newcomer: StartGenerate) -> None:
    executor = ModelledExecutor(160, models=(MODEL,))
    engine = engine_over(executor, max_running=1)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(engine, flood("first", 1, tokens=90)[0]))
            await until(lambda: bool(executor.jobs))
            for body in waiting:
                group.create_task(ask(engine, body))
            await waits(engine, 64)
            with pytest.raises(QueueFull) as refusal:
                await ask(engine, newcomer)
            assert refusal.value.retry_after

    serve(play(), engine, executor)


def test_a_request_of_which_a_choice_was_aborted_gives_its_place() -> None:
    executor = ModelledExecutor(160, models=(MODEL,))
    engine = engine_over(executor, max_running=1)
    several = replace(flood("loud", 64)[63], n=3)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(engine, flood("first", 1, tokens=90)[0]))
            await until(lambda: bool(executor.jobs))
            for body in flood("loud", 63):
                group.create_task(ask(engine, body))
            await waits(engine, 63)
            refused = group.create_task(refusal(several))
            await waits(engine, 64)
            await engine.abort(several.request, choice=2)
            group.create_task(ask(engine, flood("quiet", 1)[0]))
            assert "gave its place" in await refused

    async def refusal(body: StartGenerate) -> str:
        with pytest.raises(QueueFull) as raised:
            async for _ in engine.start_generate(body):
                pass
        return raised.value.message

    serve(play(), engine, executor)


def test_who_has_begun_keeps_its_place_in_a_full_queue() -> None:
    """A request that goes on from another unit comes in though the queue is full, and is not displaced."""
    executor = ModelledExecutor(160, models=(MODEL,))
    engine = engine_over(executor, max_running=1)
    refused = list[str]()

    async def one(body: StartGenerate) -> None:
        try:
            async for _ in engine.start_generate(body):
                pass
        except QueueFull:
            refused.append(body.request)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(one(flood("first", 1, tokens=90)[0]))
            await until(lambda: bool(executor.jobs))
            for body in flood("loud", 64):
                group.create_task(one(body))
            await waits(engine, 64)
            group.create_task(one(replace(flood("loud", 65)[64], made=[Made(0, [1, 2])])))
            await waits(engine, 65)
            group.create_task(one(flood("quiet", 1)[0]))
            await until(lambda: bool(refused))

    serve(play(), engine, executor)
    assert refused == ["loud-63"]


def test_what_is_computed_again_costs_nothing() -> None:
    """Two tenants always wait. What was computed of one's request is lost in the middle, which puts its next
    request behind nobody."""
    executor = ModelledExecutor(400, models=(MODEL,))
    engine = engine_over(executor, max_running=1, chunk_tokens=96)
    ended: list[str] = []
    orders = {
        name: [replace(body, prompt=[100 * i + ord(name)] * length) for i, body in enumerate(flood(name, 3))]
        for name, length in (("a", 60), ("b", 70))
    }

    one = asker(engine, executor, ended, "request")

    async def play() -> None:
        first = orders["a"][0]
        async with asyncio.TaskGroup() as group:
            for body in orders["a"] + orders["b"]:
                group.create_task(one(body))
            await until(lambda: len(executor.jobs) == 3)
            await engine.hold(first.request)
            await engine.resume(first.request)
            assert (await engine.evict(Prefix(model=MODEL, prompt=first.prompt))).tokens

    serve(play(), engine, executor)
    assert ended[:4] == ["b-0", "a-0", "a-1", "b-1"]


def test_tokens_that_are_there_already_cost_nothing() -> None:
    """Two tenants ask for long prompts; one asks for the same again and again, which is cached. It is served
    as many times as its output allows, and not as its prompts would."""
    executor = ModelledExecutor(400, models=(MODEL,))
    engine = engine_over(executor, max_running=1, chunk_tokens=64)
    ended: list[str] = []
    one = asker(engine, executor, ended)

    async def play() -> None:
        same = flood("same", 9, length=60, tokens=2)
        await one(replace(same[0], prompt=same[1].prompt))
        async with asyncio.TaskGroup() as group:
            for i, body in enumerate(flood("new", 9, length=60, tokens=2)):
                group.create_task(one(replace(body, prompt=[i + 1] * 60)))
            for body in same[1:]:
                group.create_task(one(replace(body, prompt=same[1].prompt)))

    serve(play(), engine, executor)
    assert ended[1:11].count("same") == 8


@pytest.mark.parametrize(
    ("blocks", "running"), [(1000, 6), (128, 64)], ids=["places are short", "blocks are short"]
)
@pytest.mark.parametrize("length", [4, 20])
@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_newcomer_runs_at_once_beside_a_crowd_of_another_tenant(
    blocks: int, running: int, length: int, policy: Policy
) -> None:
    """Under `adbs` and `slack` one of the crowd gives way to it, and it never gives way to them, though it
    came last. Under the others it may have to wait."""
    executor = ModelledExecutor(blocks, models=(MODEL,))
    engine = engine_over(executor, max_running=running, policy=policy)
    ended: list[str] = []
    one = asker(engine, executor, ended)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for body in flood("loud", 12, tokens=60):
                group.create_task(one(body))
            await until(lambda: len(executor.jobs) > 20)
            assert not ended
            for body in flood("quiet", 1, length=length, tokens=30):
                group.create_task(one(body))

    serve(play(), engine, executor)
    assert ended[0] == "quiet" or policy not in ("adbs", "slack")


@pytest.mark.parametrize(
    ("running", "priority", "preempted"),
    [(6, 0, 3), (2, 0, 0), (6, 1, 0)],
    ids=["many", "few", "less urgent"],
)
def test_a_place_is_taken_from_a_crowd_and_for_a_tenant_of_whom_nothing_runs(
    running: int, priority: int, preempted: int
) -> None:
    """So tenants that both wait all the time do not preempt one another again and again: here it is once for
    the newcomer, and once each time that all of a tenant's have ended at the same time."""
    executor = ModelledExecutor(1000, models=(MODEL,))
    engine = engine_over(executor, max_running=running)
    counted: list[int] = []

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for body in flood("a", 12, tokens=40):
                group.create_task(ask(engine, body))
            await until(lambda: len(executor.jobs) > 10)
            for body in flood("b", 12, tokens=40):
                group.create_task(ask(engine, replace(body, priority=priority)))
        counted.append((await engine.load()).models[MODEL].preemptions_total)

    serve(play(), engine, executor)
    assert counted == [preempted]


def test_a_crowd_gives_way_whatever_runs_beside_it() -> None:
    """One less urgent request of somebody else is preempted first, and shields nobody."""
    executor = ModelledExecutor(1000, models=(MODEL,))
    engine = engine_over(executor, max_running=7)
    ended: list[str] = []
    one = asker(engine, executor, ended)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for body in flood("loud", 6, tokens=60):
                group.create_task(one(body))
            group.create_task(one(replace(flood("third", 1, tokens=60)[0], priority=1)))
            await until(lambda: len(executor.jobs) > 20)
            group.create_task(one(flood("quiet", 1, tokens=4)[0]))

    serve(play(), engine, executor)
    assert ended[0] == "quiet"


def test_who_is_given_way_to_pays_for_it() -> None:
    """A caller of one long prompt after the other has nothing that runs each time it comes. It takes a place
    only while it has had less than the crowd."""
    executor = ModelledExecutor(4000, models=(MODEL,), context=400)
    engine = engine_over(executor, max_running=8, chunk_tokens=64)
    had, jobs = Counter[str](), 400

    async def loud(number: int) -> None:
        body = replace(flood("loud", 9)[number], prompt=[number] * 4)
        body = replace(body, sampling=replace(body.sampling, max_tokens=390))
        async for frame in engine.start_generate(body):
            had["loud"] += OUTPUT_COST * sum(isinstance(event, TokenEvent) for event in frame)

    async def one_after_the_other() -> None:
        for number in itertools.count():
            body = replace(order(f"alone-{number}", MODEL, 300, max_tokens=1), tenant="alone")
            await ask(engine, replace(body, prompt=[number % VOCAB, *range(299)]))
            had["alone"] += INPUT_COST * 300 + OUTPUT_COST

    async def play() -> None:
        tasks = [asyncio.create_task(loud(number)) for number in range(8)]
        await until(lambda: len(executor.jobs) > 20)
        had.clear()
        tasks.append(asyncio.create_task(one_after_the_other()))
        await until(lambda: len(executor.jobs) > jobs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    serve(play(), engine, executor)
    assert had["alone"] <= 1.3 * had["loud"], had

"""Weights that sleep: the policy over drawn histories, and the engine over a modelled device."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.residency.policy import (
    AGED,
    MARGIN,
    TURN,
    GiveWay,
    Residency,
    ResidencyView,
    Sleep,
    Wake,
    next_due,
    next_move,
    turn_of,
)
from kvloom.types.spec import Policy, Slo
from tests.engine.plays import check, order
from tests.engines import ask
from tests.modelled import (
    CONTEXT,
    GEOMETRIES,
    ModelledExecutor,
    ModelledWeights,
    engine_over,
    modelled,
    turns,
)
from tests.modelled_units import ManualClock


@dataclass
class Model:
    """A model of a modelled fleet, whose requests take so many seconds of being awake."""

    blocks: int
    awake: bool = False
    work: float = 0.0
    since: float = 0.0
    asked: float = 0.0
    waits: list[float] = field(default_factory=list)
    patience: float = inf
    """Seconds from being asked to the deadline."""


class Memory:
    """Plays the policy in steps of a tenth of a second. Waking takes `WAKE` seconds."""

    WAKE = 0.05

    def __init__(self, total: int, models: list[Model]) -> None:
        self.total = total
        self.models = {f"m{i}": model for i, model in enumerate(models)}
        self.now = 0.0
        self.wakes = 0

    def view(self) -> ResidencyView:
        free = self.total - sum(m.blocks for m in self.models.values() if m.awake)
        assert free >= 0
        return ResidencyView(
            models=tuple(
                Residency(
                    name=name,
                    blocks=model.blocks,
                    awake=model.awake,
                    wanted=model.work > 0,
                    priority=0,
                    since=model.since if model.awake else model.asked,
                    turn=turn_of(self.WAKE, 0),
                    begin_by=self.begin_by(model),
                    waking=self.WAKE,
                )
                for name, model in self.models.items()
            ),
            total=self.total,
            free=free,
            available=free,
            now=self.now,
        )

    def begin_by(self, model: Model) -> float:
        due = model.asked + model.patience
        return due if due >= self.now + self.WAKE else -inf

    def ask(self, name: str, seconds: float) -> None:
        model = self.models[name]
        if model.work <= 0:
            model.asked = self.now
        model.work += seconds

    @property
    def longest_wait(self) -> float:
        waiting = (self.now - m.asked for m in self.models.values() if m.work > 0 and not m.awake)
        return max((*waiting, *(wait for m in self.models.values() for wait in m.waits)), default=0.0)

    def step(self) -> None:
        while (move := next_move(self.view())) is not None:
            model = self.models[move.model]
            model.awake = isinstance(move, Wake)
            if isinstance(move, Wake):
                self.wakes += 1
                model.since = self.now
                if model.work > 0:
                    model.waits.append(self.now - model.asked)
            elif model.work > 0:
                model.asked = self.now
        for model in self.models.values():
            if model.awake:
                model.work = max(0.0, model.work - 0.1)
        self.now += 0.1


def bound_for(models: int) -> float:
    """The seconds that a model waits at most if those before it have a turn each."""
    return (models - 1) * (TURN + 0.3)  # a step or two late at each


sizes = st.lists(st.integers(1, 60), min_size=2, max_size=8)


@given(sizes, st.integers(0, 40), st.randoms(use_true_random=False))
def test_nobody_waits_longer_than_a_turn_of_each_other_model(
    sizes: list[int], more: int, rng: random.Random
) -> None:
    memory = Memory(max(sizes) + more, [Model(size) for size in sizes])
    for _ in range(300):
        if rng.random() < 0.4:
            memory.ask(rng.choice(list(memory.models)), rng.choice((0.1, 0.5, 5.0, 30.0)))
        memory.step()
    assert memory.longest_wait <= bound_for(len(sizes))


@given(
    sizes,
    st.integers(0, 40),
    st.lists(st.sampled_from((0.0, 1.0, 3.0, inf))),
    st.randoms(use_true_random=False),
)
def test_deadlines_hold_nobody_back_for_longer_than_the_bound(
    sizes: list[int], more: int, patience: list[float], rng: random.Random
) -> None:
    few = [*patience, *[1.0] * len(sizes)]
    models = [Model(size, patience=one) for size, one in zip(sizes, few, strict=False)]
    memory = Memory(max(sizes) + more, models)
    for _ in range(600):
        if rng.random() < 0.4:
            memory.ask(rng.choice(list(memory.models)), rng.choice((0.1, 0.5, 5.0, 30.0)))
        memory.step()
    assert memory.longest_wait <= AGED + bound_for(len(sizes))


def test_what_is_late_lets_others_go_first_until_it_has_aged() -> None:
    """Two that keep their deadlines want the one place by turns; the third can keep none."""
    memory = Memory(10, [Model(10, patience=2.0), Model(10, patience=2.0), Model(10, patience=0.0)])
    memory.ask("m2", 0.1)
    memory.ask("m0", 0.5)
    memory.ask("m1", 0.5)
    while not memory.models["m2"].waits:
        for name in ("m0", "m1"):
            if memory.models[name].work <= 0:
                memory.ask(name, 0.5)
        memory.step()
    assert memory.models["m2"].waits[0] == pytest.approx(AGED, abs=TURN + 0.2)


@given(sizes, st.integers(0, 40), st.sampled_from((0.0, 1.0, 3.0, inf)))
def test_little_is_lost_to_waking(sizes: list[int], more: int, patience: float) -> None:
    """All are wanted all the time: a model is woken at most once a turn for each place in memory."""
    models = [Model(size, work=1e9, patience=patience) for size in sizes]
    memory = Memory(max(sizes) + more, models)
    for _ in range(100):
        memory.step()
    assert memory.wakes <= len(sizes) * (memory.now / TURN + 1)


def residency(name: str, **more: object) -> Residency:
    values: dict[str, object] = {"blocks": 10, "awake": False, "wanted": False, "priority": 0} | more
    return Residency(name=name, since=0.0, turn=TURN, **values)  # type: ignore[arg-type]


def seen(*models: Residency, free: int = 0, available: int | None = None, **more: object) -> ResidencyView:
    found = free if available is None else available
    view = {"total": 100, "free": free, "available": found, "now": 0.5} | more
    return ResidencyView(models=models, **view)  # type: ignore[arg-type]


def timed(model: Residency, begin_by: float, **more: object) -> Residency:
    return replace(model, begin_by=begin_by, **more)  # type: ignore[arg-type]


A, B = residency("a", wanted=True), residency("b", wanted=True)


@pytest.mark.parametrize(
    ("view", "move"),
    [
        (seen(A, available=10), Wake("a")),
        (seen(A, available=10, moving=True), None),
        (seen(A, residency("idle", awake=True, last_job=3), residency("old", awake=True)), Sleep("old", "a")),
        (seen(A, residency("b", awake=True, wanted=True, excess=8, held=9), available=2), GiveWay("b", "a")),
        (seen(A, residency("b", awake=True, wanted=True, excess=8, held=9), available=1), None),
        (
            seen(A, residency("b", awake=True, wanted=True, excess=8, held=9), available=2, starving="b"),
            None,
        ),
        (seen(A, residency("b", awake=True, wanted=True, held=5)), None),
        (seen(A, residency("b", awake=True, wanted=True, held=5), now=TURN), Sleep("b", "a")),
        (
            seen(A, residency("b", wanted=True, held=5), residency("c", wanted=True, held=7)),
            GiveWay("c", "a"),
        ),
        (seen(A, residency("b", wanted=True, gathered=4), available=6), Wake("b")),
        (seen(residency("a", wanted=True, priority=1), B, available=10), Wake("b")),
        (seen(residency("a", wanted=True, priority=1), B, available=10, now=AGED), Wake("a")),
        (seen(residency("a", wanted=True, priority=1), residency("b", awake=True, wanted=True), now=9), None),
        (seen(A, residency("b", awake=True, wanted=True, held=5), stuck=True), Sleep("b", "a")),
        (seen(residency("idle", awake=True), short=True), Sleep("idle")),
        (seen(residency("b", awake=True, wanted=True), short=True), None),
        (
            seen(
                *(residency(name, awake=True, wanted=True) for name in "ab"),
                starving="a",
                now=TURN,
            ),
            Sleep("b"),
        ),
        (seen(residency("a"), residency("b", last_job=1), free=100 // MARGIN + 10), Wake("b")),
        (seen(residency("a"), free=100 // MARGIN + 9), None),
        (seen(residency("a"), free=100, available=100 // MARGIN + 9), None),
        (seen(residency("a", unreadable=True), free=100), None),
        (seen(residency("a", wanted=True, gathered=4, priority=1), B, available=10), Wake("b")),
        (
            seen(
                A,
                residency("often", awake=True, rate=0.2, last_job=1),
                residency("last", awake=True, last_job=3),
            ),
            Sleep("last", "a"),
        ),
        (seen(residency("a", last_job=1), residency("b", rate=0.1), free=100 // MARGIN + 10), Wake("b")),
        (seen(A, residency("b", wanted=True, begin_by=0.8), available=10), Wake("b")),
        (seen(A, residency("b", wanted=True, begin_by=0.8, waking=0.4), available=10), Wake("a")),
        (seen(timed(A, 0.8), timed(B, 0.9, waking=0.2), available=10), Wake("b")),
        (seen(timed(A, 0.8, gathered=1), timed(B, 0.7), available=10), Wake("a")),
        (seen(timed(A, 0.8, priority=1), timed(B, -inf), available=10), Wake("b")),
        (seen(timed(A, AGED + 1), timed(B, -inf, since=-0.1), available=10, now=AGED), Wake("b")),
        (seen(timed(A, -inf), timed(B, -inf, since=-0.1), available=10), Wake("b")),
    ],
)
def test_the_next_move(view: ResidencyView, move: object) -> None:
    assert next_move(view) == move


def test_a_review_is_due_when_a_turn_is_over() -> None:
    awake = residency("b", awake=True, wanted=True)
    assert next_due(seen(A, awake)) == TURN
    assert next_due(seen(awake)) is None


def test_whoever_loses_its_cache_has_longer_turns() -> None:
    assert [turn_of(0.01, lost) for lost in (0, 1, 2)] == [TURN, 2 * TURN, 4 * TURN]


# -- the engine ---------------------------------------------------------------------------------------

NAMES = tuple(GEOMETRIES)
POLICIES: tuple[Policy, ...] = ("adbs", "slack")


def sleeping(blocks: int, weights: int, seed: int) -> ModelledExecutor:
    executor = ModelledExecutor(blocks, seed=seed)
    executor.weights = ModelledWeights(executor, dict.fromkeys(NAMES, weights))
    return executor


@pytest.mark.parametrize("seed", range(12))
def test_same_tokens_whoever_sleeps(seed: int) -> None:
    """Laws 1 to 5: `modelled` checks the pool, pages and jobs; memory is for one or two models at a time."""
    rng = random.Random(seed)
    page = max(geometry.blocks_per_page for geometry in GEOMETRIES.values())
    weights = rng.choice((8, 30))
    room = rng.choice((1, 2)) * weights + page * -(-CONTEXT // 4) // rng.choice((1, 2))
    executor = sleeping(room + weights // 3, weights, seed)
    engine = engine_over(executor, max_running=rng.choice((2, 16)), policy=POLICIES[seed % 2])
    asked = [
        order(f"r{i}", rng.choice(NAMES), rng.randrange(1, 30), priority=rng.randrange(2))
        for i in range(rng.choice((6, 24)))
    ]

    async def play() -> None:
        async with modelled(engine, executor):
            answers = await asyncio.gather(*(ask(engine, one) for one in asked))
        for one, answer in zip(asked, answers, strict=True):
            check(executor, one, answer, whole=True)

    asyncio.run(play())
    assert executor.weights is not None
    assert executor.weights.awake == set(), "all is given back at the end"
    assert len(executor.weights.wakes) >= len({one.model for one in asked})


@pytest.mark.parametrize("policy", POLICIES)
def test_slack_wakes_first_what_is_due_first(policy: Policy) -> None:
    weights = 300
    executor = sleeping(weights + 100, weights, 0)
    first, later, sooner = NAMES[:3]
    slos = {later: Slo(ttft=20.0, tpot=1.0), sooner: Slo(ttft=10.0, tpot=1.0)}

    async def play() -> None:
        engine = engine_over(executor, clock=ManualClock(), policy=policy, slos=slos)
        async with modelled(engine, executor):
            await asyncio.gather(*(ask(engine, order(f"x{n}", n, 5)) for n in (first, later, sooner)))

    asyncio.run(play())
    assert executor.weights is not None
    order_of = executor.weights.wakes
    assert (order_of.index(sooner) < order_of.index(later)) == (policy == "slack")


def test_all_stay_awake_where_there_is_room() -> None:
    executor = sleeping(4000, 30, 0)

    async def play() -> None:
        engine = engine_over(executor)
        async with modelled(engine, executor):
            for _ in range(3):
                await asyncio.gather(*(ask(engine, order(f"x{n}", n, 5)) for n in NAMES))

    asyncio.run(play())
    assert executor.weights is not None
    assert sorted(executor.weights.wakes) == sorted(NAMES)


class SlowWeights(ModelledWeights):
    """Each part takes a second, and so many turns of the loop that requests come meanwhile."""

    def __init__(self, executor: ModelledExecutor, blocks: dict[str, int], clock: ManualClock) -> None:
        super().__init__(executor, blocks)
        self.begun = asyncio.Event()
        self._clock = clock

    def wake(self, model: str) -> asyncio.Future[bool]:
        self._clock.time += 1.0
        self.begun.set()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._after(200, model, future)
        return future


def test_a_request_that_comes_meanwhile_makes_a_wake_no_shorter() -> None:
    """The first model is woken ahead when a request of it comes, ten seconds after its wake began."""
    name = NAMES[0]

    async def play() -> None:
        executor, clock = ModelledExecutor(4000, seed=0), ManualClock()
        executor.weights = weights = SlowWeights(executor, dict.fromkeys(NAMES, 30), clock)
        engine = engine_over(executor, clock=clock)
        async with modelled(engine, executor):
            await weights.begun.wait()
            clock.time += 10.0
            await ask(engine, order("early", name, 5))
            while (told := (await engine.load()).models[name].weights) is None or told.wake_seconds == 0.0:
                await turns()
            assert told.wake_seconds >= 11.0

    asyncio.run(play())


def test_a_long_prompt_gets_the_memory_of_weights_that_nobody_wants() -> None:
    """Its model alone fits beside it, and the others are not woken again before it has ended."""
    name = NAMES[0]
    geometry = GEOMETRIES[name]
    blocks = geometry.blocks(CONTEXT) + 40
    executor = sleeping(blocks, 20, 0)
    assert executor.weights is not None
    asked = [order("short", name, 2), order("long", name, CONTEXT - 10)]

    async def play() -> None:
        engine = engine_over(executor)
        async with modelled(engine, executor):
            for one in asked:
                check(executor, one, await ask(engine, one), whole=True)

    asyncio.run(play())
    assert len(executor.weights.wakes) <= 2 * len(NAMES)


def test_quotas_come_back_when_weights_sleep() -> None:
    executor = sleeping(140, 60, 0)

    async def play() -> None:
        engine = engine_over(executor, quotas="fixed")
        quotas = [load.quota_blocks for load in (await engine.load()).models.values()]
        async with modelled(engine, executor):
            for i in range(6):
                one = order(f"r{i}", NAMES[i % 2], 4)
                check(executor, one, await ask(engine, one), whole=True)
            few = [load.quota_blocks for load in (await engine.load()).models.values()]
            assert all(0 < now <= quota for now, quota in zip(few, quotas, strict=True))
        assert [load.quota_blocks for load in (await engine.load()).models.values()] == quotas

    asyncio.run(play())


def test_weights_that_cannot_be_read_cost_their_own_requests_alone() -> None:
    executor = sleeping(400, 30, 0)
    assert executor.weights is not None
    bad, good = NAMES[:2]
    executor.weights.unreadable.add(bad)

    async def play() -> None:
        engine = engine_over(executor)
        async with modelled(engine, executor):
            lost, served = await asyncio.gather(
                ask(engine, order("lost", bad, 5)), ask(engine, first := order("served", good, 5))
            )
            assert lost.ends[0].reason == "error"
            assert "cannot be read" in lost.ends[0].message
            check(executor, first, served, whole=True)
            assert executor.weights is not None
            executor.weights.unreadable.clear()
            again = order("again", bad, 5)
            check(executor, again, await ask(engine, again), whole=True)

    asyncio.run(play())

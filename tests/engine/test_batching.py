"""The batching policies: pure functions of a view, and what follows for whoever waits."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.core.job import Phase
from kvloom.core.request import StartGenerate
from kvloom.core.sampling import SamplingParams
from kvloom.core.spec import Policy
from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import LASTING, STARVING, Decode, ModelView, Preempt, Prefill, UnitView
from kvloom.engine.engine import Engine
from tests.engines import Answer
from tests.modelled import (
    GEOMETRIES,
    VOCAB,
    ModelledExecutor,
    ask,
    engine_over,
    expected,
    finish,
    modelled,
    turns,
)

COMPUTE = (1, 2, 3, 8)
NOBODY = (0, 0, 0)


def model(name: str = "a", **changes: object) -> ModelView:
    """An idle model with a quota of 50 blocks in pages of 2."""
    values: dict[str, object] = {
        "name": name,
        "waiting": 0,
        "partial": 0,
        "head_blocks": 0,
        "head": NOBODY,
        "decodable": 0,
        "decode_blocks": 0,
        "held": 0,
        "victim": NOBODY,
        "running": 0,
        "prefilling": False,
        "decoding": False,
        "used": 0,
        "quota": 50,
        "page_blocks": 2,
        "last_prefill": 0,
        "last_decode": 0,
        "waited": 0,
    }
    return ModelView(**(values | changes))  # type: ignore[arg-type]


def unit(*models: ModelView, compute: int = 2, **changes: object) -> UnitView:
    """A pool of 100 blocks of which `models` leave the rest."""
    values: dict[str, object] = {
        "models": models,
        "compute": compute,
        "idle": compute,
        "free_blocks": 100 - sum(m.used for m in models),
        "last_was_prefill": False,
        "jobs": 1000,
    }
    return UnitView(**(values | changes))  # type: ignore[arg-type]


@st.composite
def views(draw: st.DrawFn) -> UnitView:
    """Any view that an engine could show."""
    compute = draw(st.sampled_from(COMPUTE))
    total = draw(st.integers(20, 200))
    idle, used, arrival = compute, 0, itertools.count()
    models: list[ModelView] = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        page = draw(st.integers(1, 5))
        jobs = {
            phase: idle >= 1 and draw(st.booleans()) and not (phase == "prefill" and idle < 1)
            for phase in ("prefill", "decode")
        }
        for runs in jobs.values():
            idle -= draw(st.integers(1, idle)) if runs and idle else 0
        decodable, partial = draw(st.integers(0, 6)), draw(st.integers(0, 1))
        held = decodable + partial
        running = held + sum(jobs.values())
        room = (total - used) // page
        pages = draw(st.integers(min(running, room), room)) if running else 0
        used += pages * page
        waiting = draw(st.integers(0, 5))
        models.append(
            model(
                name,
                waiting=waiting,
                partial=partial,
                head_blocks=draw(st.integers(0, total // page)) * page if waiting or partial else 0,
                head=(draw(st.integers(0, 1)), next(arrival), 0),
                decodable=decodable,
                decode_blocks=draw(st.integers(0, decodable)) * page,
                held=held,
                victim=(draw(st.integers(0, 1)), next(arrival), 0) if held else NOBODY,
                running=running,
                prefilling=jobs["prefill"],
                decoding=jobs["decode"],
                used=pages * page,
                quota=draw(st.integers(page, total)),
                page_blocks=page,
                last_prefill=draw(st.integers(0, 200)),
                last_decode=draw(st.integers(0, 200)),
                waited=draw(st.sampled_from([0, STARVING, STARVING + 1, 500])) if waiting or partial else 0,
            )
        )
    return UnitView(
        tuple(models), compute, idle, total - used, draw(st.booleans()), draw(st.sampled_from([200, 600]))
    )


_SETTINGS = settings(max_examples=500, deadline=None, derandomize=True)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@_SETTINGS
@given(view=views())
def test_every_answer_can_be_carried_out(policy: str, view: UnitView) -> None:
    before = copy.deepcopy(view)
    action = POLICIES[policy](view)
    assert action == POLICIES[policy](view)
    assert view == before
    if action is None:
        return
    chosen = next(m for m in view.models if m.name == action.model)
    if isinstance(action, Preempt):
        assert chosen.held
        return
    assert 1 <= action.share <= view.idle
    if isinstance(action, Decode):
        assert chosen.decodable
        assert not chosen.decoding
        assert chosen.decode_blocks <= view.free_blocks
    else:
        assert chosen.waiting or chosen.partial
        assert not chosen.prefilling
        assert chosen.head_blocks <= action.blocks <= view.free_blocks


@pytest.mark.parametrize("policy", sorted(POLICIES))
@_SETTINGS
@given(view=views())
def test_where_nothing_runs_and_something_can_something_happens(policy: str, view: UnitView) -> None:
    still = tuple(replace(m, prefilling=False, decoding=False, running=m.held) for m in view.models)
    view = replace(view, models=still, idle=view.compute)
    first = min((m for m in view.models if m.wants_prefill), key=lambda m: m.head, default=None)
    can = any(m.wants_decode for m in view.models)
    if first:
        can |= first.head_blocks <= view.free_blocks or any(
            m.held and m.victim > first.head for m in view.models
        )
    assert not can or POLICIES[policy](view)


@_SETTINGS
@given(view=views())
def test_adbs_prefills_one_at_a_time(view: UnitView) -> None:
    if view.prefill_runs:
        assert not isinstance(POLICIES["adbs"](view), Prefill)


@_SETTINGS
@given(view=views())
def test_fcfs_runs_one_job_at_a_time(view: UnitView) -> None:
    action = POLICIES["fcfs"](view)
    if view.idle < view.compute:
        assert action is None
    elif isinstance(action, Prefill | Decode):
        assert action.share == view.compute


@_SETTINGS
@given(view=views())
def test_only_the_urgent_go_beyond_what_is_kept_for_it(view: UnitView) -> None:
    action = POLICIES["adbs"](view)
    urgent = view.urgent
    if isinstance(action, Prefill) and urgent and action.model != urgent.name and view.idle < view.compute:
        assert action.blocks <= view.free_blocks - urgent.head_blocks


# -- adbs, rule by rule -------------------------------------------------------------------------------


def adbs(view: UnitView) -> object:
    return POLICIES["adbs"](view)


def test_adbs_takes_back_what_is_over_quota_for_a_model_within_its_own() -> None:
    a = model("a", waiting=1, head_blocks=10, used=4, running=2, quota=30)
    b = model("b", used=40, quota=30, held=3, running=3, victim=(0, 8, 0))
    c = model("c", used=55, quota=40, held=3, running=3, victim=(0, 9, 0))
    assert adbs(unit(a, b, c)) == Preempt("c")  # 15 over its quota, b 10


def test_adbs_does_not_take_from_those_within_their_quota() -> None:
    a = model("a", waiting=1, head_blocks=10, quota=30)
    b = model("b", used=95, quota=95, held=3, running=3)
    assert adbs(unit(a, b)) is None


def test_adbs_does_not_take_back_for_a_model_beyond_its_quota() -> None:
    a = model("a", waiting=1, head_blocks=10, used=25, running=2, quota=30)
    b = model("b", used=75, quota=30, held=3, running=3)
    assert adbs(unit(a, b)) is None


def test_a_starving_model_takes_from_what_came_later_and_keeps_it() -> None:
    a = model("a", waiting=1, head_blocks=60, head=(0, 5, 0), quota=30, waited=STARVING + 1)
    b = model("b", used=95, quota=95, held=3, running=3, victim=(0, 9, 0), decodable=3, decode_blocks=6)
    assert adbs(unit(a, b)) == Preempt("b")
    older = replace(b, victim=(0, 3, 0))
    assert adbs(unit(a, older)) != Preempt("a")
    begun = model(
        "a", partial=1, head_blocks=40, head=(0, 5, 0), quota=10, waited=99, used=20, victim=(0, 5, 0)
    )
    begun = replace(begun, held=1, running=1)
    rest = model("b", used=78, quota=60, held=3, running=3, victim=(0, 9, 0), decodable=3, decode_blocks=6)
    assert adbs(unit(replace(begun, prefilling=True), rest, idle=1)) == Preempt("b")
    tight = replace(rest, quota=95)  # within its quota, and a over its own: but a came first and starves
    assert adbs(unit(begun, tight, last_was_prefill=True)) == Preempt("b")
    assert adbs(unit(begun, replace(tight, victim=(0, 3, 0), decode_blocks=6))) == Preempt("a")


def test_a_long_queue_is_no_starvation() -> None:
    """A model that runs beyond its quota has always someone waiting; it gives way all the same."""
    a = model("a", waiting=30, head_blocks=6, head=(0, 2, 0), waited=500, used=90, held=9, running=9)
    a = replace(a, victim=(0, 1, 0))
    b = model("b", decodable=2, decode_blocks=12, held=2, running=2, used=10, victim=(0, 60, 0))
    view = unit(a, b, last_was_prefill=True)
    assert view.urgent is None
    assert adbs(view) == Preempt("a")
    assert adbs(unit(a, model("b", waiting=1, head_blocks=16, head=(0, 60, 0)))) == Preempt("a")


def test_an_idle_model_claims_nothing() -> None:
    a = model("a", waiting=9, head_blocks=10, used=80, running=8, quota=10)
    b = model("b", quota=90)
    action = adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert action.blocks == 100 - 80 - 2  # all but a page to grow by


def test_a_waiting_model_claims_what_it_waits_for_up_to_its_quota() -> None:
    a = model("a", waiting=9, head_blocks=10, used=40, running=4, quota=40)
    b = model("b", waiting=2, head_blocks=10, quota=60, last_prefill=5)
    action = adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert (action.model, action.blocks) == ("a", 60 - 2 * 10 - 2)


def test_a_waiting_prefill_holds_decodes_until_the_compute_is_free() -> None:
    a = model("a", waiting=3, head_blocks=10)
    b = model("b", decodable=2, decode_blocks=0, held=2, running=2, used=10)
    c = model("c", decoding=True, running=1, used=10)
    assert adbs(unit(a, b, c, compute=8, idle=2)) is None
    assert adbs(unit(a, b, c, compute=3, idle=1)) is None
    assert isinstance(adbs(unit(a, b, c, compute=3, idle=2, free_blocks=3)), Decode)  # no room: no hold
    started = adbs(unit(replace(a, waiting=1), b, c, compute=3, idle=2))
    assert isinstance(started, Prefill)
    assert started.share == 2


def test_adbs_prefills_turn_by_turn_over_models() -> None:
    a = model("a", waiting=1, head_blocks=4, last_prefill=7)
    b = model("b", waiting=1, head_blocks=4, last_prefill=3)
    action = adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert action.model == "b"


def test_a_decode_without_room_takes_from_the_most_over_quota_or_from_itself() -> None:
    a = model("a", decodable=2, decode_blocks=4, held=2, running=2, used=40, quota=50, victim=(0, 4, 0))
    b = model("b", held=2, running=2, used=60, quota=50, decoding=True, victim=(0, 2, 0))
    assert adbs(unit(a, b, idle=1)) == Preempt("b")
    assert adbs(unit(a, replace(b, quota=60), idle=1)) == Preempt("a")
    assert adbs(unit(a, replace(b, held=0), idle=1)) is None  # all of b is in a job: its end is near


def test_quotas_leave_a_model_its_only_sequence_for_a_while() -> None:
    a = model("a", waiting=1, head_blocks=10, head=(0, 9, 0), quota=50)
    b = model("b", held=1, running=1, used=95, quota=50, decodable=1, victim=(0, 3, 0), last_prefill=990)
    assert adbs(unit(a, b)) == Decode("b", 1)
    assert adbs(unit(a, b, jobs=990 + LASTING + 1)) == Preempt("b")
    assert adbs(unit(a, replace(b, victim=(0, 10, 0)))) == Preempt("b")
    assert adbs(unit(a, replace(b, running=2, held=2))) == Preempt("b")


# -- the others ---------------------------------------------------------------------------------------


def test_fcfs_serves_the_oldest_and_by_priority() -> None:
    a = model("a", waiting=1, head_blocks=4, head=(1, 3, 0))
    b = model("b", waiting=1, head_blocks=4, head=(1, 2, 0))
    c = model("c", waiting=1, head_blocks=4, head=(0, 9, 0))
    names = []
    for others in ((a, b), (a, b, c)):
        action = POLICIES["fcfs"](unit(*others))
        assert isinstance(action, Prefill)
        names.append(action.model)
    assert names == ["b", "c"]


def test_round_robin_takes_turns() -> None:
    a = model("a", waiting=5, head_blocks=2, decodable=1, held=1, running=1, used=2)
    models = {name: replace(a, name=name) for name in "abc"}
    order: list[tuple[str, type]] = []
    for now in range(1, 13):
        action = POLICIES["round-robin"](unit(*models.values(), compute=1))
        assert isinstance(action, Prefill | Decode)
        order.append((action.model, type(action)))
        chosen = models[action.model]
        prefilled = isinstance(action, Prefill)
        models[action.model] = (
            replace(chosen, last_prefill=now) if prefilled else replace(chosen, last_decode=now)
        )
    assert [name for name, _ in order] == list("abc") * 4
    for name in "abc":
        assert [kind for who, kind in order if who == name] == [Prefill, Decode] * 2


# -- law 5 --------------------------------------------------------------------------------------------

_NUMBERS = itertools.count()


def order(name: str, length: int, tokens: int, *, priority: int = 0) -> StartGenerate:
    number = next(_NUMBERS)
    return StartGenerate(
        model=name,
        request=f"r{number}",
        prompt=[number % VOCAB] * length,
        priority=priority,
        sampling=SamplingParams(max_tokens=tokens, seed=1),
    )


def under_load(
    policy: Policy,
    compute: int,
    one: StartGenerate,
    load: Callable[[], StartGenerate],
    *,
    clients: int = 8,
    most_jobs: int,
    rates: dict[str, float] | None = None,
    chunk_tokens: int = 16,
    blocks: int = 110,
) -> int:
    """Jobs between the coming of `one` and its end, while `clients` send one after the other without end."""
    executor = ModelledExecutor(blocks, compute=compute)
    engine = engine_over(executor, policy=policy, chunk_tokens=chunk_tokens, rates=rates)

    async def client(engine: Engine) -> None:
        while True:
            await ask(engine, load())

    async def whole() -> int:
        async with modelled(engine, executor):
            crowd = [asyncio.create_task(client(engine)) for _ in range(clients)]
            for _ in range(2000):
                if engine.pool.free > blocks // 5:
                    await turns(1)
            came = len(executor.jobs)
            asking: asyncio.Task[Answer] = asyncio.create_task(ask(engine, one))
            try:
                await finish(executor, [asking], most_jobs=came + most_jobs)
            finally:
                for task in crowd:
                    task.cancel()
            assert asking.result().tokens == expected(executor, one)
            return len(executor.jobs) - came

    return asyncio.run(whole())


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_model_with_a_free_share_is_served_at_once(policy: Policy, compute: int) -> None:
    """Its prompt fits its quota: adbs makes room within a few jobs, the others within one generation."""
    one = order("tall", 20, 4)
    jobs = under_load(policy, compute, one, lambda: order("wide", 20, 20), most_jobs=1000)
    print(f"{policy} on {compute}: {jobs} jobs")
    assert jobs <= (30 if policy == "adbs" else 250)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_beyond_its_quota_ends_under_an_endless_load(policy: Policy, compute: int) -> None:
    one = order("tall", 88, 4)  # 90 of 110 blocks
    rates = {"wide": 50.0}
    for chunk in (4, 64):
        jobs = under_load(
            policy,
            compute,
            one,
            lambda: order("wide", 9, 12),
            most_jobs=2000,
            rates=rates,
            chunk_tokens=chunk,
        )
        print(f"{policy} on {compute}, chunks of {chunk}: {jobs} jobs")
        assert jobs <= 8 * STARVING


@pytest.mark.parametrize("policy", ["adbs", "round-robin"])  # fcfs serves the whole unit by priority
def test_priorities_order_a_model_but_do_not_starve_another(policy: Policy) -> None:
    one = order("tall", 40, 4, priority=9)
    assert under_load(policy, 2, one, lambda: order("wide", 9, 12), most_jobs=1000) <= 8 * STARVING


def test_two_long_prompts_do_not_take_turns_at_preempting() -> None:
    """Each takes most of the pool and more chunks than a model waits before it may take blocks."""
    for policy in POLICIES:
        executor = ModelledExecutor(100, models=("wide", "tall"))
        engine = engine_over(executor, policy=policy, chunk_tokens=1)  # type: ignore[arg-type]
        orders = [order("wide", 90, 3), order("tall", 90, 3), order("wide", 88, 3), order("tall", 88, 3)]

        async def whole(engine: Engine, executor: ModelledExecutor, orders: list[StartGenerate]) -> None:
            async with modelled(engine, executor):
                tasks = [asyncio.create_task(ask(engine, one)) for one in orders]
                await finish(executor, tasks, most_jobs=3 * 4 * 93)

        asyncio.run(whole(engine, executor, orders))


def test_jobs_fit_the_compute_and_prefills_run_beside_decodes() -> None:
    """adbs on several units: one prefill at most, decodes of several models beside it."""
    executor = ModelledExecutor(400, compute=8)
    engine = engine_over(executor, chunk_tokens=8)
    together: set[tuple[str, ...]] = set()
    launch = executor.launch
    running: list[tuple[str, Phase]] = []

    def watched(job: object) -> object:
        future = launch(job)  # type: ignore[arg-type]
        mark = (job.model, job.phase)  # type: ignore[attr-defined]
        running.append(mark)
        future.add_done_callback(lambda _: running.remove(mark))
        assert sum(phase is Phase.PREFILL for _, phase in running) <= 1
        together.add(tuple(sorted(phase.value for _, phase in running)))
        return future

    executor.launch = watched  # type: ignore[method-assign, assignment]

    async def whole() -> None:
        async with modelled(engine, executor):
            orders = [order(name, 30, 20) for name in GEOMETRIES for _ in range(4)]
            tasks = [asyncio.create_task(ask(engine, one)) for one in orders]
            await finish(executor, tasks, most_jobs=2000)

    asyncio.run(whole())
    assert ("decode", "prefill") in together
    assert ("decode", "decode") in together

"""The policy `slack`: what would miss its deadline soonest, of all that can make it, and nobody starves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.fair_queue import PASSING, FairQueue
from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.engine.batching.slack import RESTED
from kvloom.engine.batching.view import STARVING, Action, Decode, Mixed, Order, Preempt, Prefill, UnitView
from tests.engine.plays import order, serve, until
from tests.engine.views import JOBS, model, unit, views
from tests.examples import examples
from tests.modelled import ModelledExecutor, ask, engine_over
from tests.modelled_units import ManualClock

NOW, TOKEN = 100.0, 0.001
RECENT: dict[str, object] = {"last_decode": JOBS, "last_prefill": JOBS}


def slack(view: UnitView) -> Action | None:
    return POLICIES["slack"](view)


def prompt(name: str, due: float, *, tokens: int = 100, **changes: object) -> object:
    """A model whose next prompt of so many tokens is due in `due` seconds."""
    values: dict[str, object] = {
        "waiting": 1,
        "head_blocks": 4,
        "head_tokens": tokens,
        "head_latest": NOW + due,
    } | RECENT
    return model(name, **(values | {"token_seconds": TOKEN, "tpot": 0.2} | changes))  # type: ignore[arg-type]


def streams(name: str, due: float, *, rows: int = 4, **changes: object) -> object:
    """A model whose streams' next token is due in `due` seconds."""
    values: dict[str, object] = {"decodable": rows, "decode_blocks": rows, "held": rows, "running": rows}
    values |= {"used": rows, "step_due": NOW + due, "step_seconds": 0.02} | RECENT
    values |= {"token_seconds": TOKEN, "tpot": 0.2}
    return model(name, **(values | changes))  # type: ignore[arg-type]


def at(*models: object, **changes: object) -> UnitView:
    return unit(*models, **({"compute": 1, "now": NOW} | changes))  # type: ignore[arg-type]


def test_of_two_prompts_the_one_with_less_slack_is_first() -> None:
    assert slack(at(prompt("a", 3.0), prompt("b", 2.0))) == Prefill("b", 1, 96)
    long = prompt("a", 3.0, tokens=1500)
    assert slack(at(long, prompt("b", 2.0))) == Prefill("a", 1, 96)  # it takes longer


def test_a_prompt_that_is_too_late_comes_after_those_that_are_not() -> None:
    late = prompt("a", 0.1, tokens=200)
    assert slack(at(late, prompt("b", 9.0))) == Prefill("b", 1, 96)
    assert slack(at(late)) == Prefill("a", 1, 100)


def test_a_more_urgent_priority_comes_before_deadlines() -> None:
    sooner, urgent = prompt("a", 1.0, head=(0, 1, 0)), prompt("b", -5.0, head=(-1, 2, 0))
    assert slack(at(sooner, urgent)) == Prefill("b", 1, 96)
    step = streams("c", 0.01)
    assert isinstance(slack(at(sooner, step)), Decode)
    assert slack(at(urgent, step)) == Prefill("b", 1, 92)
    assert slack(at(streams("a", 0.01), streams("b", 9.0, step_order=(-1, 0, 0)))) == Decode("b", 1)


def test_steps_wait_while_their_streams_are_ahead() -> None:
    """The prompt's chunk is what they can spare; if that is little, they are stepped first."""
    ahead = at(prompt("a", 5.0), streams("b", 0.3005))
    assert slack(ahead) == Prefill("a", 1, 92, 280 - WEIGHT_READ_TOKENS)
    assert slack(at(prompt("a", 5.0), streams("b", 0.03))) == Decode("b", 1)
    assert slack(at(prompt("a", 5.0), streams("b", -0.5))) == Decode("b", 1)  # it is behind, and can catch up
    lost = slack(at(prompt("a", 5.0), streams("b", inf)))
    assert isinstance(lost, Prefill)
    assert lost.tokens is None
    assert slack(at(streams("a", 0.3), streams("b", 0.2))) == Decode("b", 1)


def test_a_chunk_goes_with_the_steps_of_its_own_model() -> None:
    both = replace(streams("a", 0.2005), waiting=1, head_blocks=4, head_tokens=900, head_latest=NOW + 5)  # type: ignore[type-var]
    action = slack(at(both, mixes=True))
    assert action == Mixed("a", 1, action.blocks, 200 - WEIGHT_READ_TOKENS - 4)  # type: ignore[union-attr]
    assert isinstance(slack(at(both, streams("b", 0.03), mixes=True)), Decode)


def test_a_prompt_waits_if_the_steps_would_not_keep_up_with_it() -> None:
    heavy = streams("b", 5.0, step_seconds=0.1995)
    assert slack(at(prompt("a", 5.0), heavy)) == Decode("b", 1)
    begun = prompt("a", 5.0, waiting=0, partial=1, running=1)
    assert isinstance(slack(at(begun, heavy)), Prefill)  # it holds blocks already
    half = replace(heavy, step_seconds=0.11)  # type: ignore[type-var]
    assert isinstance(slack(at(prompt("a", 5.0), half)), Prefill)
    assert slack(at(prompt("a", -5.0), half)) == Decode("b", 1)  # one that is late adds to no load


def test_who_has_waited_for_long_is_next_whatever_is_due() -> None:
    heavy = streams("b", 0.01, step_seconds=0.1999)
    waited = prompt("a", -50.0, last_prefill=0, waited=STARVING + 1)
    assert slack(at(waited, heavy, prompt("c", 1.0))) == Prefill("a", 1, 96, 100)
    just = prompt("a", -50.0, last_prefill=0, waited=STARVING)
    assert isinstance(slack(at(just, heavy)), Decode)
    rested = streams("a", inf, last_decode=JOBS - RESTED - 1)
    assert slack(at(rested, streams("b", 0.01))) == Decode("a", 1)
    assert slack(at(replace(rested, last_decode=JOBS), streams("b", 0.01))) == Decode("b", 1)  # type: ignore[type-var]


def test_planned_shares_let_prompts_and_steps_run_side_by_side() -> None:
    a, b = prompt("a", 5.0, prefill_share=6), streams("b", 0.01, decode_share=4)
    assert slack(at(a, b, compute=10)) == Prefill("a", 6, 92)
    runs = replace(a, waiting=0, prefilling=True, running=1)  # type: ignore[type-var]
    assert slack(at(runs, b, compute=10, idle=4)) == Decode("b", 4)


def test_a_job_that_runs_alone_has_the_whole_device() -> None:
    a, b = streams("a", 0.01, decode_share=3), streams("b", 0.02, decode_share=4)
    assert slack(at(a, compute=10)) == Decode("a", 10)
    assert slack(at(a, b, compute=10)) == Decode("a", 3)
    runs = replace(b, decoding=True, decodable=0)  # type: ignore[type-var]
    assert slack(at(a, runs, compute=10, idle=6)) == Decode("a", 3)
    first = prompt("c", 5.0, prefill_share=6)
    assert slack(at(first, compute=10)) == Prefill("c", 10, 100)
    assert slack(at(first, runs, compute=10, idle=6)) == Prefill("c", 6, 92)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(view=views())
def test_a_starving_prompt_that_finds_room_is_next(view: UnitView) -> None:
    """Whatever is due, and whoever is more urgent."""
    still = (replace(m, prefilling=False, decoding=False, running=m.held) for m in view.models)
    view = replace(view, models=tuple(still), idle=view.compute, walls=False)
    urgent = view.urgent
    if urgent is None or urgent.head_blocks > view.free_blocks:
        return
    action = slack(view)
    assert isinstance(action, Prefill | Mixed | Preempt)
    assert isinstance(action, Preempt) or action.model == urgent.name


@dataclass(eq=False)
class One:
    order: Order
    tenant: str = ""
    late: bool = False


def waiting(*late: bool, priority: int = 0) -> FairQueue[One]:
    queue = FairQueue[One]()
    for i, one in enumerate(late):
        queue.add(One((priority, i, 0), late=one))
    return queue


def taken(queue: FairQueue[One]) -> list[int]:
    order = []
    while (one := queue.first) is not None:
        queue.went(one)
        order.append(one.order[1])
    return order


def test_late_ones_go_after_the_others_and_some_go_first_all_the_same() -> None:
    queue = waiting(True, True, *[False] * (2 * PASSING))
    assert queue.put_behind(lambda one: one.late)
    assert not queue.put_behind(lambda one: one.late)
    assert len(queue) == 2 + 2 * PASSING
    first = [*range(2, 2 + PASSING), 0]
    assert taken(queue) == [*first, *range(2 + PASSING, 2 + 2 * PASSING), 1]
    assert not queue


def test_only_those_that_would_be_next_are_looked_at() -> None:
    queue = waiting(False, True)
    assert not queue.put_behind(lambda one: one.late)
    assert taken(queue) == [0, 1]


def test_a_late_one_of_a_more_urgent_priority_goes_before_others() -> None:
    queue = waiting(False, False)
    urgent = One((-1, 7, 0), late=True)
    queue.add(urgent)
    queue.put_behind(lambda one: one.late)
    assert taken(queue) == [7, 0, 1]


def test_late_ones_can_be_taken_out_and_count_for_their_tenant() -> None:
    queue = FairQueue[One]()
    some = [One((0, i, 0), tenant, late=i == 0) for i, tenant in enumerate("aab")]
    for one in some:
        queue.add(one)
    queue.put_behind(lambda one: one.late)
    assert [one.order[1] for one in queue] == [0, 1, 2]
    queue.charge(some[0], 5)
    assert queue.first is some[2]  # a's tokens are those of its late ones too
    queue.discard(some[0])
    assert [one.order[1] for one in queue] == [1, 2]
    queue.discard(some[0])
    assert len(queue) == 2


def ended_of(bodies: list[tuple[float, str, int]], *, policy: str = "slack") -> list[str]:
    """Returns in which order requests end that come at these times, by name, with prompts of so many tokens.
    A job takes 0.03 s for each of its tokens; one request runs at a time."""
    clock = ManualClock()
    executor = ModelledExecutor(400, compute=1, models=("wide",))
    launch = executor.launch

    def timed(job: object) -> object:
        clock.time += 0.03 * job.tokens.size  # type: ignore[attr-defined]
        return launch(job)  # type: ignore[arg-type]

    executor.launch = timed  # type: ignore[method-assign, assignment]
    engine = engine_over(executor, clock=clock, policy=policy, max_running=1, chunk_tokens=16)  # type: ignore[arg-type]
    ended: list[str] = []

    async def one(name: str, length: int) -> None:
        await ask(engine, order(name, "wide", length, max_tokens=2))
        ended.append(name)

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for when, name, length in bodies:
                await until(lambda when=when: clock.time >= when)  # type: ignore[misc]
                group.create_task(one(name, length))
                await asyncio.sleep(0)

    serve(play(), engine, executor)
    return ended


@pytest.mark.parametrize("policy", ["slack", "adbs"])
def test_a_request_that_has_become_late_lets_others_go_first(policy: str) -> None:
    """The usual objective is a first token within 2 s: the second one cannot have it after the first, and the
    third one can."""
    asked = [(0.0, "first", 90), (0.0, "second", 80), (1.0, "third", 10)]
    second = ["second", "third"]
    assert ended_of(asked, policy=policy) == ["first", *(second if policy == "adbs" else second[::-1])]

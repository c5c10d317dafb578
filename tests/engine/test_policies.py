"""The batching policies are pure functions of a view, and each has its order."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kvloom.engine.batching import POLICIES, Policy
from kvloom.engine.batching.adbs import LONGER, adbs
from kvloom.engine.batching.baselines import fcfs, partitioned, round_robin
from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.engine.batching.slack import slack
from kvloom.engine.batching.view import LASTING, STARVING, Action, Decode, Mixed, Preempt, Prefill, UnitView
from tests.engine.views import JOBS, model, unit, views
from tests.examples import examples

_SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


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
    assert 1 <= action.share <= view.idle + view.overload
    room = view.free_blocks
    if isinstance(action, Decode | Mixed):
        assert chosen.decodable
        assert not chosen.decoding
        assert chosen.decode_blocks <= room
        room -= chosen.decode_blocks
    if isinstance(action, Prefill | Mixed):
        assert chosen.waiting or chosen.partial
        assert not chosen.prefilling
        assert (
            chosen.head_blocks <= action.blocks <= (room if isinstance(action, Mixed) else view.free_blocks)
        )
    if isinstance(action, Mixed):
        assert view.mixes
        assert chosen.mixes
        assert action.tokens >= 1


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


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"vllm-2023", "adbs-2024"}))
def test_a_prompt_is_let_in_where_what_runs_can_grow(policy: str) -> None:
    full = model(waiting=1, head_blocks=10, running=9, decodable=9, held=9, used=87, quota=100)
    full = replace(full, last_prefill=-1)
    assert isinstance(POLICIES[policy](unit(full)), Decode)  # 13 are free, and two pages are kept
    action = POLICIES[policy](unit(replace(full, used=86)))
    assert isinstance(action, Prefill)
    assert action.blocks == 10
    begun = POLICIES[policy](unit(replace(full, waiting=0, partial=1, used=90)))
    assert isinstance(begun, Prefill)  # its rest takes what there is


@pytest.mark.parametrize("policy", [adbs, fcfs, partitioned, round_robin, slack])
@_SETTINGS
@given(view=views())
def test_what_a_prompt_is_given_leaves_room_to_grow(policy: Policy, view: UnitView) -> None:
    action = policy(view)
    if isinstance(action, Prefill | Mixed) and not view.walls:
        chosen = next(m for m in view.models if m.name == action.model)
        kept = 0 if chosen is view.urgent or chosen.outnumbered else chosen.growth  # others give way to it
        assert view.free_blocks - action.blocks >= kept


def test_vllm_2023_keeps_its_watermark_and_the_next_step_and_no_more() -> None:
    full = model(waiting=1, head_blocks=10, running=9, decodable=9, held=9, used=280, decode_blocks=9)
    view = unit(full, total_blocks=300, free_blocks=22)  # the next step takes 9, the watermark is 3
    assert POLICIES["vllm-2023"](view) == Prefill("a", view.compute, 10, whole=True)
    assert POLICIES["vllm-2023"](replace(view, free_blocks=21)) == Decode("a", view.compute)
    assert POLICIES["vllm-2023"](replace(view, total_blocks=100, free_blocks=20)) == Decode("a", view.compute)
    # The watermark of 1 would be less than a page of 2.


def test_vllm_2023_makes_the_latest_give_way_before_it_lets_anybody_in() -> None:
    full = model(waiting=1, head_blocks=1, running=9, decodable=9, held=9, used=92, decode_blocks=9)
    assert POLICIES["vllm-2023"](unit(full)) == Preempt("a", kept=False)
    assert POLICIES["fcfs"](unit(replace(full, waiting=0))) == Preempt("a")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_sequence_that_runs_alone_goes_on_beyond_its_quota(policy: str) -> None:
    """It would give way to itself, and be computed again, for ever."""
    alone = model(running=1, decodable=1, held=1, used=60, decode_blocks=2, quota=50)
    view = unit(alone, walls=True)
    assert POLICIES[policy](view) == Decode("a", view.compute)
    assert isinstance(POLICIES[policy](replace(view, free_blocks=1)), Preempt)


def test_vllm_2023_knows_no_quotas() -> None:
    two = model(running=2, decodable=2, held=2, used=60, decode_blocks=2, quota=50)
    view = unit(two, walls=True)
    assert POLICIES["vllm-2023"](view) == Decode("a", view.compute)
    assert POLICIES["fcfs"](view) == Preempt("a")


def test_vllm_2023_steps_the_model_whose_sequence_came_first() -> None:
    late = model("a", decodable=3, held=3, running=3, used=3, step_order=(0, 9, 0), last_decode=1)
    early = model("b", decodable=1, held=1, running=1, used=1, step_order=(0, 2, 0), last_decode=5)
    assert POLICIES["vllm-2023"](unit(late, early)) == Decode("b", 2)


def test_adbs_2024_holds_decodes_for_the_compute_of_a_prompt() -> None:
    waits = model("a", waiting=2, head_blocks=4, prefill_share=2, quota=9)
    steps = model("b", decodable=3, held=3, running=3, used=3, decode_share=1, quota=9)
    assert POLICIES["adbs-2024"](unit(waits, steps)) == Prefill("a", 2, 95, whole=True)
    busy = replace(unit(waits, steps, model("c", running=1, decoding=True, used=1)), idle=1)
    assert POLICIES["adbs-2024"](busy) is None
    begun = replace(busy, models=(replace(waits, prefilling=True), *busy.models[1:]))
    assert POLICIES["adbs-2024"](begun) == Decode("b", 1)


def test_adbs_2024_makes_a_model_give_way_to_itself_alone() -> None:
    short = model("a", decodable=3, held=3, running=3, used=50, decode_blocks=3, decode_share=1)
    other = model("b", decodable=9, held=9, running=9, used=50, quota=1, last_decode=9, decode_share=1)
    assert POLICIES["adbs-2024"](unit(short, other)) == Preempt("a", kept=False)


@_SETTINGS
@given(view=views())
def test_adbs_prefills_one_at_a_time(view: UnitView) -> None:
    if view.prefill_runs:
        assert not isinstance(POLICIES["adbs"](view), Prefill | Mixed)


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
    if view.walls or view.idle == view.compute:
        return  # walls keep what is a model's; and the last resort lets in whoever finds room
    if isinstance(action, Prefill | Mixed) and urgent and action.model != urgent.name:
        assert action.blocks <= view.free_blocks - urgent.head_blocks


BUSY = model("a", waiting=1, head_blocks=8, decodable=4, decode_blocks=4, held=4, running=4, used=8)


def test_adbs_mixes_where_decodes_would_wait_for_a_prefill() -> None:
    chunk = (LONGER - 1) * (WEIGHT_READ_TOKENS + 4)
    assert adbs(unit(BUSY, compute=1, mixes=True)) == Mixed("a", 1, 88, chunk)
    assert adbs(unit(BUSY, compute=1, mixes=True, last_was_prefill=True)) == Mixed("a", 1, 88, chunk)
    crowd = replace(BUSY, waiting=8, partial=1)
    assert adbs(unit(crowd, compute=8, mixes=True)) == Mixed("a", 8, 88, 9 * chunk)
    assert adbs(unit(crowd, compute=8, mixes=True, idle=7)) is None  # it waits for the whole device


@pytest.mark.parametrize(
    "view",
    [
        unit(BUSY, compute=1),
        unit(replace(BUSY, mixes=False), compute=1, mixes=True),
        unit(BUSY, compute=2, mixes=True),  # both run side by side
        unit(replace(BUSY, prefill_share=6), compute=8, mixes=True),
        unit(replace(BUSY, decodable=0), compute=1, mixes=True),
        unit(replace(BUSY, head_blocks=90), compute=1, mixes=True),  # no room for both
    ],
    ids=["not by the unit", "not by the model", "beside", "planned", "no decodes", "no room"],
)
def test_adbs_does_not_mix_where_it_cannot_or_need_not(view: UnitView) -> None:
    assert isinstance(adbs(view), Prefill)


def test_a_mixed_job_lets_the_others_decode_first_that_have_waited_longer() -> None:
    """Once only, if they cannot."""
    other = replace(BUSY, name="b", waiting=0, last_decode=3)
    mixes = unit(replace(BUSY, last_decode=5), other, compute=1, mixes=True)
    assert adbs(replace(mixes, last_was_prefill=True)) == Decode("b", 1)
    assert isinstance(adbs(mixes), Mixed)
    later = unit(replace(BUSY, last_decode=2), other, compute=1, mixes=True, last_was_prefill=True)
    assert isinstance(adbs(later), Mixed)


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


def test_round_robin_holds_all_until_a_planned_prefill_has_room() -> None:
    prompt = model("a", waiting=1, head_blocks=2, prefill_share=9, decode_share=4)
    steps = model("b", decodable=1, held=1, running=1, used=2, prefill_share=9, decode_share=4, last_decode=9)
    other = replace(steps, name="c", decodable=0, held=0, decoding=True)

    def answer(idle: int) -> Action | None:
        return POLICIES["round-robin"](unit(prompt, steps, other, compute=10, idle=idle, overload=2))

    assert answer(6) is None
    assert answer(7) == Prefill("a", 9, 96)
    assert POLICIES["round-robin"](unit(steps, other, compute=10, idle=6)) == Decode("b", 4)
    assert POLICIES["round-robin"](unit(steps, compute=10)) == Decode("b", 10)


@_SETTINGS
@given(view=views())
def test_partitioned_runs_one_job_of_a_model_on_a_share_that_never_changes(view: UnitView) -> None:
    action = POLICIES["partitioned"](view)
    if not isinstance(action, Prefill | Decode) or view.idle == view.compute:  # there the last resort may act
        return
    chosen = next(m for m in view.models if m.name == action.model)
    assert not chosen.prefilling
    assert not chosen.decoding
    planned = chosen.prefill_share if isinstance(action, Prefill) else chosen.decode_share
    assert action.share == (planned or max(1, view.compute // view.served))


def test_partitioned_lets_models_run_side_by_side() -> None:
    a = model("a", waiting=1, head_blocks=2, decodable=1, held=1, running=1, used=2)
    b = replace(a, name="b", last_prefill=5, last_decode=3)
    c = replace(a, name="c", last_prefill=7, last_decode=8)
    free = unit(a, b, c, compute=9)
    assert POLICIES["partitioned"](free) == Prefill("a", 3, free.free_blocks - 2)  # a page to grow by
    busy = unit(replace(a, prefilling=True), b, c, compute=9, idle=6)
    assert POLICIES["partitioned"](busy) == Decode("b", 3)  # its prefill was last
    assert POLICIES["partitioned"](replace(busy, idle=2)) is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
@_SETTINGS
@given(view=views())
def test_quotas_that_do_not_bend_are_kept_to(policy: str, view: UnitView) -> None:
    view = replace(view, walls=True)
    action = POLICIES[policy](view)
    if action is None or view.idle == view.compute:  # then the last resort may go beyond
        return
    chosen = next(m for m in view.models if m.name == action.model)
    room = max(0, chosen.quota - chosen.used)
    if isinstance(action, Decode):
        assert chosen.decode_blocks <= room or chosen.running == 1
    elif isinstance(action, Prefill):
        assert action.blocks <= room
    elif not chosen.outnumbered:  # a crowd gives way to its own model
        assert chosen.wants_decode
        assert chosen.decode_blocks > min(room, view.free_blocks)


def by_adbs(view: UnitView) -> object:
    return POLICIES["adbs"](view)


def test_adbs_takes_back_what_is_over_quota_for_a_model_within_its_own() -> None:
    a = model("a", waiting=1, head_blocks=10, used=4, running=2, quota=30)
    b = model("b", used=40, quota=30, held=3, running=3, victim=(0, 8, 0))
    c = model("c", used=55, quota=40, held=3, running=3, victim=(0, 9, 0))
    assert by_adbs(unit(a, b, c)) == Preempt("c")  # 15 over its quota, b 10


def test_adbs_does_not_take_from_those_within_their_quota() -> None:
    a = model("a", waiting=1, head_blocks=10, quota=30)
    b = model("b", used=95, quota=95, held=3, running=3)
    assert by_adbs(unit(a, b)) is None


def test_adbs_does_not_take_back_for_a_model_beyond_its_quota() -> None:
    a = model("a", waiting=1, head_blocks=10, used=25, running=2, quota=30)
    b = model("b", used=75, quota=30, held=3, running=3)
    assert by_adbs(unit(a, b)) is None


def test_a_starving_model_takes_from_what_came_later_and_keeps_it() -> None:
    a = model("a", waiting=1, head_blocks=60, head=(0, 5, 0), quota=30, waited=STARVING + 1)
    b = model("b", used=95, quota=95, held=3, running=3, victim=(0, 9, 0), decodable=3, decode_blocks=6)
    assert by_adbs(unit(a, b)) == Preempt("b")
    older = replace(b, victim=(0, 3, 0))
    assert by_adbs(unit(a, older)) != Preempt("a")
    begun = model(
        "a", partial=1, head_blocks=40, head=(0, 5, 0), quota=10, waited=99, used=20, victim=(0, 5, 0)
    )
    begun = replace(begun, held=1, running=1)
    rest = model("b", used=78, quota=60, held=3, running=3, victim=(0, 9, 0), decodable=3, decode_blocks=6)
    assert by_adbs(unit(replace(begun, prefilling=True), rest, idle=1)) == Preempt("b")
    tight = replace(rest, quota=95)  # within its quota, and a over its own: but a came first and starves
    assert by_adbs(unit(begun, tight, last_was_prefill=True)) == Preempt("b")
    assert by_adbs(unit(begun, replace(tight, victim=(0, 3, 0), decode_blocks=6))) == Preempt("a")


def test_a_long_queue_is_no_starvation() -> None:
    """A model that runs beyond its quota has always someone waiting; it gives way all the same."""
    a = model("a", waiting=30, head_blocks=6, head=(0, 2, 0), waited=500, used=90, held=9, running=9)
    a = replace(a, victim=(0, 1, 0))
    b = model("b", decodable=2, decode_blocks=12, held=2, running=2, used=10, victim=(0, 60, 0))
    view = unit(a, b, last_was_prefill=True)
    assert view.urgent is None
    assert by_adbs(view) == Preempt("a")
    assert by_adbs(unit(a, model("b", waiting=1, head_blocks=16, head=(0, 60, 0)))) == Preempt("a")


def test_an_idle_model_claims_nothing() -> None:
    a = model("a", waiting=9, head_blocks=10, used=80, running=8, quota=10)
    b = model("b", quota=90)
    action = by_adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert action.blocks == 100 - 80 - 2  # all but a page to grow by


def test_a_waiting_model_claims_what_it_waits_for_up_to_its_quota() -> None:
    a = model("a", waiting=9, head_blocks=10, used=40, running=4, quota=40)
    b = model("b", waiting=2, head_blocks=10, quota=60, last_prefill=5)
    action = by_adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert (action.model, action.blocks) == ("a", 60 - 2 * 10 - 2)


def test_a_waiting_prefill_holds_decodes_until_the_compute_is_free() -> None:
    a = model("a", waiting=3, head_blocks=10)
    b = model("b", decodable=2, decode_blocks=0, held=2, running=2, used=10)
    c = model("c", decoding=True, running=1, used=10)
    assert by_adbs(unit(a, b, c, compute=8, idle=2)) is None
    assert by_adbs(unit(a, b, c, compute=3, idle=1)) is None
    assert isinstance(by_adbs(unit(a, b, c, compute=3, idle=2, free_blocks=3)), Decode)  # no room: no hold
    started = by_adbs(unit(replace(a, waiting=1), b, c, compute=3, idle=2))
    assert isinstance(started, Prefill)
    assert started.share == 2


@pytest.mark.parametrize("prefilling", [False, True])
def test_adbs_lets_a_crowd_give_a_place_also_while_another_model_prefills(prefilling: bool) -> None:
    crowd = model("a", running_full=True, outnumbered=True, held=4, running=4, used=40, decodable=4)
    other = model("b", prefilling=prefilling, running=int(prefilling))
    assert adbs(unit(crowd, other)) == Preempt("a")


def test_adbs_lets_a_crowd_give_blocks_to_the_head_alone() -> None:
    """The rest of the free blocks is what other models may claim."""
    crowd = model("a", outnumbered=True, waiting=9, head_blocks=4, held=4, running=4, used=50)
    other = model("b", waiting=50, head_blocks=2, quota=50, last_prefill=5)
    assert adbs(unit(crowd, other)) == Prefill("a", 2, 4)
    nothing_left = unit(crowd, other, free_blocks=3)
    assert adbs(nothing_left) == Preempt("a")


def test_adbs_prefills_turn_by_turn_over_models() -> None:
    a = model("a", waiting=1, head_blocks=4, last_prefill=7)
    b = model("b", waiting=1, head_blocks=4, last_prefill=3)
    action = by_adbs(unit(a, b))
    assert isinstance(action, Prefill)
    assert action.model == "b"


def test_a_decode_without_room_takes_from_the_most_over_quota_or_from_itself() -> None:
    a = model("a", decodable=2, decode_blocks=4, held=2, running=2, used=40, quota=50, victim=(0, 4, 0))
    b = model("b", held=2, running=2, used=60, quota=50, decoding=True, victim=(0, 2, 0))
    assert by_adbs(unit(a, b, idle=1)) == Preempt("b")
    assert by_adbs(unit(a, replace(b, quota=60), idle=1)) == Preempt("a")
    assert by_adbs(unit(a, replace(b, held=0), idle=1)) is None  # all of b is in a job: its end is near


def test_quotas_leave_a_model_its_only_sequence_for_a_while() -> None:
    a = model("a", waiting=1, head_blocks=10, head=(0, 9, 0), quota=50)
    b = model("b", held=1, running=1, used=95, quota=50, decodable=1, victim=(0, 3, 0), last_prefill=990)
    assert by_adbs(unit(a, b)) == Decode("b", 1)
    assert by_adbs(unit(a, replace(b, last_prefill=JOBS - LASTING - 1))) == Preempt("b")
    assert by_adbs(unit(a, replace(b, victim=(0, 10, 0)))) == Preempt("b")
    assert by_adbs(unit(a, replace(b, running=2, held=2))) == Preempt("b")

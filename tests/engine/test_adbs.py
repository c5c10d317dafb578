"""adbs, rule by rule."""

from __future__ import annotations

from dataclasses import replace

from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import LASTING, STARVING, Decode, Preempt, Prefill, UnitView
from tests.engine.views import JOBS, model, unit


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
    assert adbs(unit(a, replace(b, last_prefill=JOBS - LASTING - 1))) == Preempt("b")
    assert adbs(unit(a, replace(b, victim=(0, 10, 0)))) == Preempt("b")
    assert adbs(unit(a, replace(b, running=2, held=2))) == Preempt("b")

"""Jobs taken apart into operators, and what weaving makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.offload.queueing import Exchange, cut_up, issued, parts_of
from kvloom.plan.cost.devices import FITTED, find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import SHAPES
from kvloom.plan.cost.work import Work

LLAMA = "llama3-8b"
UNHOSTED = Roofline(find_device("A100-80"), 1, SHAPES, replace(FITTED, host=1e-9))
A100 = Roofline(find_device("A100-40"), 1, SHAPES)

decodes = st.builds(
    Work.decode,
    st.sampled_from(list(SHAPES)),
    st.floats(0.1, 1.0),
    st.lists(st.integers(1, 4096), min_size=1, max_size=64),
)


@given(decodes)
def test_a_steps_operators_take_what_the_device_is_busy_for(work: Work) -> None:
    seconds = sum(one.seconds * one.number for one in UNHOSTED.operators(work))
    assert seconds == pytest.approx(UNHOSTED.seconds(work), rel=0.02)


def test_operators_take_what_was_measured_elsewhere() -> None:
    """Vidur's profile of the same model on such a GPU: microseconds at 16 tokens, without a start."""
    found = {one.name: one.seconds for one in UNHOSTED.operators(Work.decode(LLAMA, 1.0, [1] * 16))}
    for name, micros in (("qkv", 34), ("output", 26), ("up", 151), ("down", 79)):
        assert (found[name] - UNHOSTED.start) * 1e6 == pytest.approx(micros, rel=0.25)


def test_the_head_takes_no_longer_than_the_paper_saw() -> None:
    """Weaver, section 3.1: up to 961 µs on an A100."""
    found = {one.name: one.seconds for one in A100.operators(Work.decode(LLAMA, 1.0, [500] * 16))}
    assert 0.7e-3 < found["head"] < 0.961e-3


def test_attention_away_takes_as_long_as_at_home() -> None:
    """But for its start: a step's attention is that of all layers."""
    few, many = (Work.decode(LLAMA, 1.0, [held] * 32) for held in (100, 1100))
    shape = UNHOSTED.shape(LLAMA)
    layer = [UNHOSTED.attention(LLAMA, shape, 32, 32 * held) for held in (100, 1100)]
    more = UNHOSTED.seconds(many) - UNHOSTED.seconds(few)
    assert shape.layers * (layer[1] - layer[0]) == pytest.approx(more, rel=1e-6)


@given(decodes, st.floats(0.0, 3e-4), st.floats(1e-6, 1e-4))
def test_what_is_split_holds_nobody_up_for_long(work: Work, ahead: float, most: float) -> None:
    operators = A100.operators(work)
    parts = parts_of(operators, ahead, most)
    whole, cut = cut_up(operators, (), A100), cut_up(operators, parts, A100)
    exchange = Exchange(own=ahead, service=0.0, wire=0.0)
    assert exchange.stall(cut.times) <= exchange.stall(whole.times) * (1 + 1e-9)
    pieces = len(cut.times) - len(whole.times)
    assert sum(cut.times) == pytest.approx(sum(whole.times) + pieces * A100.start)
    assert cut.more == pytest.approx(pieces * A100.start + len(cut.times) * A100.poll)
    most_parts = [one.most for one in operators for _ in range(one.number)]
    assert all(1 <= n <= bound for n, bound in zip(parts, most_parts, strict=True))


def test_a_task_that_takes_longer_than_the_own_attention_is_waited_for() -> None:
    exchange = Exchange(own=1.0, service=2.0, wire=0.5)
    assert exchange.stall([]) == pytest.approx(1.5)
    assert exchange.stall([4.0]) == pytest.approx(1.5 + 2.0)
    assert Exchange(own=3.0, service=1.0, wire=0.0).stall([4.0]) == pytest.approx((4 - 2) ** 2 / 8)


def test_a_task_that_a_host_launches_is_behind_what_it_has_issued() -> None:
    work = Work.decode(LLAMA, 1.0, [500] * 16)
    [most] = issued(work, A100).times
    assert most == pytest.approx(A100.seconds(work) - FITTED.host * 32, rel=0.01)

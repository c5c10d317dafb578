"""Virtual usage and freeness: the paper's for one model, and what must hold for several."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.engine.freeness import batch, demanded, freeness, headroom, virtual_usage
from kvloom.types.load import LevelLoad, ModelLoad, UnitLoad
from tests.cluster.loads import PAGE, model, model_loads, unit, unit_loads

HEADROOM = {"high": 1600.0, "normal": 0.0}  # tokens


@dataclass(frozen=True)
class Request:
    """Of the paper's algorithm 1: an instance's, in tokens of whole pages."""

    tokens: int
    queuing: bool = False
    priority: str = "normal"


def paper_usage(request: Request, at: int, requests: list[Request]) -> float:
    """Algorithm 1, CalcVirtualUsage, as it is printed."""
    if request.queuing:
        return request.tokens if not any(one.queuing for one in requests[:at]) else 0.0
    mates = sum(1 for one in requests if one.priority == request.priority and not one.queuing)
    return request.tokens + HEADROOM[request.priority] / mates


def paper_freeness(memory: int, requests: list[Request]) -> float:
    return paper_left(memory, requests) / sum(not one.queuing for one in requests)


def paper_left(memory: int, requests: list[Request]) -> float:
    return memory - sum(paper_usage(one, at, requests) for at, one in enumerate(requests))


def reported(memory: int, requests: list[Request], size: int) -> UnitLoad:
    """The same instance, where a page is `size` blocks. Of the prompts, half has been computed."""
    running = [one for one in requests if not one.queuing]
    waiting = [one.tokens // PAGE * size for one in requests if one.queuing]
    high = sum(one.priority == "high" for one in running)
    pages = sum(one.tokens for one in running) // PAGE
    return unit(
        model(
            len(running),
            size=size,
            waiting=len(waiting),
            used_blocks=(pages - pages // 2) * size,
            begun_blocks=pages // 2 * size,
            head_blocks=waiting[0] if waiting else 0,
            waiting_blocks=sum(waiting),
            levels=(LevelLoad(priority=-1, headroom=1600, running=high),) if high else (),
        ),
        blocks=memory // PAGE * size,
    )


requests = st.builds(
    Request,
    tokens=st.integers(1, 40).map(lambda pages: pages * PAGE),
    queuing=st.booleans(),
    priority=st.sampled_from(["high", "normal"]),
)


@given(st.lists(requests, max_size=12), st.integers(1, 2048), st.integers(1, 800))
def test_one_model_has_the_papers_freeness(some: list[Request], size: int, pages: int) -> None:
    some = [Request(PAGE), *some]  # one runs
    ours, memory = freeness(reported(pages * PAGE, some, size)), pages * PAGE
    if ours >= 0:
        assert ours == pytest.approx(paper_freeness(memory, some), abs=1e-6)
    else:
        assert ours == pytest.approx(paper_left(memory, some), abs=1e-6)


def test_the_artifacts_unit() -> None:
    """851 free blocks of 16 tokens, 37 requests (LLaMA-7B on an A10): 23 blocks a request."""
    load = unit(model(37, 0, size=1024), blocks=851 * 1024)
    assert freeness(load) / 16 == pytest.approx(851 / 37)


def test_a_unit_as_its_ends_are() -> None:
    assert freeness(unit(model())) == math.inf
    assert freeness(unit(model(), blocks=1000, draining=True)) == -math.inf
    assert virtual_usage(unit(model(3, 100), draining=True)) == math.inf
    assert freeness(unit(model(used_blocks=1000), blocks=1000)) == 0.0  # all is promised
    waits = unit(model(waiting=1, head_blocks=900), blocks=1000)
    assert freeness(waits) == 100 * PAGE  # as if it ran


def test_only_the_first_that_waits_of_each_model_counts() -> None:
    load = unit(
        model(waiting=3, head_blocks=5, waiting_blocks=50), model(waiting=1, head_blocks=7, waiting_blocks=7)
    )
    assert demanded(load) == 12


def test_headroom_is_shared_out_over_models() -> None:
    """Two of three run where a token takes 4 blocks, one where it takes 1."""
    high = LevelLoad(priority=-1, headroom=300, running=2)
    load = unit(model(9, size=64, levels=(high,)), model(1, size=16, levels=(replace(high, running=1),)))
    assert headroom(load) == 200 * 4 + 100 * 1
    alone = unit(model(9, size=64, levels=(high,)))
    assert headroom(alone) == 300 * 4


def test_a_step_takes_what_each_models_tokens_take() -> None:
    assert batch(unit(model(10, size=64), model(6, size=16, page=32))) == 10 * 4 + 6 * 0.5


@given(unit_loads(), model_loads())
def test_two_halves_of_a_model_are_the_whole(load: UnitLoad, extra: ModelLoad) -> None:
    """One model under two names, where nothing waits, is as free as under one."""
    quiet = replace(extra, waiting=0, head_blocks=0, waiting_blocks=0, levels=())
    twice = replace(quiet, running=2 * quiet.running, used_blocks=2 * quiet.used_blocks)
    twice = replace(twice, begun_blocks=2 * quiet.begun_blocks)
    rest = replace(load, draining=False)
    both = replace(rest, models={**load.models, "x": quiet, "y": quiet})
    one = replace(rest, models={**load.models, "x": twice})
    assert freeness(both) == pytest.approx(freeness(one))


FIELDS = ("used_blocks", "begun_blocks", "head_blocks")


@given(unit_loads(), st.sampled_from(FIELDS), st.integers(1, 500))
def test_more_use_is_never_freer(load: UnitLoad, field: str, more: int) -> None:
    own = replace(load.models["m"], waiting=1)
    load = replace(load, models={**load.models, "m": own})
    fuller = replace(load, models={**load.models, "m": replace(own, **{field: getattr(own, field) + more})})
    assert virtual_usage(fuller) >= virtual_usage(load)
    assert freeness(fuller) <= freeness(load)


@given(unit_loads(), st.integers(1, 20))
def test_another_sequence_is_never_freer(load: UnitLoad, pages: int) -> None:
    own = load.models["m"]
    more = replace(own, running=own.running + 1, used_blocks=own.used_blocks + pages * own.page_blocks)
    fuller = replace(load, models={**load.models, "m": more})
    if any(one.running for one in load.models.values()):
        assert freeness(fuller) <= freeness(load)


@given(unit_loads(), unit_loads())
def test_below_zero_who_misses_most_is_least_free(one: UnitLoad, other: UnitLoad) -> None:
    """In tokens of its largest model, whatever runs there."""
    one, other = (replace(load, draining=False) for load in (one, other))
    left = [
        (load.total_blocks - virtual_usage(load)) / max(own.token_blocks for own in load.models.values())
        for load in (one, other)
    ]
    if max(left) <= 0:
        assert (freeness(one) < freeness(other)) == (left[0] < left[1])
    elif min(left) <= 0:
        assert (freeness(one) < freeness(other)) == (left[0] <= 0)


@given(model_loads(), st.floats(1e-9, 1.0))
def test_freeness_has_no_step_at_zero(own: ModelLoad, blocks: float) -> None:
    """So few blocks more or less than are wanted."""
    own = replace(own, running=own.running + 1)
    wanted = virtual_usage(unit(own))
    above, below = (freeness(unit(own, blocks=wanted + sign * blocks)) for sign in (1, -1))  # type: ignore[arg-type]
    assert below < 0 < above
    assert above - below <= 2.1 * blocks / own.token_blocks


@given(unit_loads(), st.integers(2, 64))
def test_freeness_does_not_hang_on_what_a_block_is(load: UnitLoad, parts: int) -> None:
    """The same unit, its pool cut into smaller blocks."""
    models = {
        name: replace(
            own,
            **{field: parts * getattr(own, field) for field in (*FIELDS, "waiting_blocks", "page_blocks")},
        )
        for name, own in load.models.items()
    }
    finer = replace(load, total_blocks=parts * load.total_blocks, models=models)
    assert freeness(finer) == pytest.approx(freeness(load), abs=1e-6)

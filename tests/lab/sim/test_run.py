"""Whole fleets in virtual time: every program answers all, all blocks come back, and memory is bounded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.run import scaled, simulate
from kvloom.lab.workload.request import Prompts, Segment, WorkloadRequest
from kvloom.lab.workload.summary import Summary
from kvloom.router.program import load_program
from kvloom.router.programs import PROGRAMS
from kvloom.types.errors import BadRequest
from kvloom.types.verbs import PrepRecv
from tests.lab.sim.fleets import outcomes, talks, unit, virtually

SHARING = {"cache_aware", "cache_aware_disaggregate", "migrate_context"}
MOVING = {"disaggregate", "cache_aware_disaggregate", "balanced", "migrate_context"}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("rate", "blocks"), [(4.0, 1500), (60.0, 800)])
def test_every_program_answers_all_and_gives_all_back(program: str, rate: float, blocks: int) -> None:
    played = talks(60, seed=3, rate=rate)
    units = [unit(f"unit-{i}", blocks=blocks) for i in range(2)]
    found, _ = outcomes(units, played, program=program, prompts=Prompts(500))
    assert len(found) == len(played)
    for ask, outcome in found.items():
        assert (outcome.error, outcome.tokens) == ("", ask.output)
        assert outcome.first is not None
        assert outcome.end is not None
        assert 0 < outcome.first <= outcome.end
        assert 0 <= outcome.cached < ask.prompt
    cached = sum(outcome.cached for outcome in found.values())
    assert cached > (0 if program in MOVING - SHARING else sum(ask.shared[0].tokens for ask in played) / 4)


@virtually
async def test_units_of_several_gpus_neither_send_nor_receive() -> None:
    """Their real counterparts do not, either: whoever wants to move a request is told so."""
    units = [unit(f"unit-{i}", ranks=2, device="cuda:0") for i in range(2)]
    async with run_fleet(units, load_program("freest")) as fleet:
        with pytest.raises(BadRequest, match="unit-0 has several GPUs: its K and V are neither sent"):
            await fleet.engines["unit-0"].prep_recv(PrepRecv(model="small", request="r", prompt=[1, 2]))


def test_an_answer_that_the_context_cuts_short_is_an_error() -> None:
    fits, too_long = (WorkloadRequest(at=at, model="small", prompt=200, output=at + 56) for at in (0, 1))
    found, _ = outcomes([unit()], [fits, too_long])
    assert (found[fits].tokens, found[fits].error) == (56, "")
    assert (found[too_long].tokens, found[too_long].error) == (56, "fewer tokens than were asked for")


def sparse(count: int) -> Iterator[WorkloadRequest]:
    """One after the other, in turn of both models, no two at once. Each prompt comes again after 200 others,
    so that the router's index has met them all soon."""
    for number in range(count):
        length = 8 + number % 5
        yield WorkloadRequest(
            at=number * 0.1,
            model=("small", "deep")[number % 2],
            prompt=length,
            output=2,
            shared=(Segment(number % 200, length),),
        )


def marked(asks: Iterator[WorkloadRequest], at: int, peaks: list[int]) -> Iterator[WorkloadRequest]:
    """Notes what Python has held at most when `at` of them have been asked for, and begins anew. Garbage does
    not count."""
    for number, ask in enumerate(asks):
        if number % 50 == 0:
            gc.collect()
        if number == at:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        yield ask


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Of two halves, the first of which fills pools, histograms and the router's index."""
    units = [unit(f"unit-{i}", blocks=100) for i in range(2)]
    program, peaks = load_program("least_loaded"), list[int]()
    summary = Summary({"≤ 5×": scaled(units, 5.0)})
    gc.collect()
    gc.freeze()  # or what other tests have left alive puts off the collections of this one's garbage
    tracemalloc.start()
    try:
        asks = marked(sparse(1000), 500, peaks)
        results = simulate(units, program, asks, Prompts(500), summary, title="sparse")
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert (results.total.requests, results.total.errors) == (1000, 0)
    assert results.total.output_tokens == 2000
    first, second = peaks
    assert second < 1.1 * first, peaks

"""Fleets on a machine whose own work is known: it bounds what they answer, and requests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from kvloom.lab.sim.cpu import Cores, SimulatedCpu
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.cost.cpu import CpuCosts
from kvloom.plan.cost.profile import BesideLoop, CpuOverhead, Role
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program
from kvloom.types.job import Phase
from tests.lab.sim.fleets import asks, now, outcomes, results, unit, virtually
from tests.plan.cost.test_cpu import cpu_costs, measured_job, oversubscribed


@dataclass(frozen=True)
class Fixed:
    """Satisfies `CostModel`: a job takes so many seconds."""

    each: float

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self.each


def overhead(
    role: Role, *, request: float = 0.0, prompt: float = 0.0, token: float = 0.0, turn: float = 0.0
) -> CpuOverhead:
    return CpuOverhead(role=role, request=request, prompt=prompt, token=token, turn=turn)


def fixed(cost: Fixed, gap: float = 0.0) -> SimulatedUnit:
    """Returns a unit with one core of the machine's four."""
    return replace(unit(compute=1), cost=cost, engine_gap=lambda _: gap)


def played(
    found: CpuCosts, given: Sequence[WorkloadRequest], one: SimulatedUnit, *, client_here: bool = False
) -> list[RequestResult]:
    """Returns the results in the order of the requests."""

    async def main() -> list[RequestResult]:
        cpu = SimulatedCpu(found, client_here=client_here)
        async with run_fleet([one], load_program("data_parallel"), cpu=cpu) as fleet:
            by_request = await results(fleet.server, given)
        return [by_request[request] for request in given]

    return run_virtual(main())


def one_ask(at: float = 0.0, output: int = 1) -> WorkloadRequest:
    return WorkloadRequest(at=at, model="small", prompt=10, output=output)


def test_a_request_and_its_tokens_pass_all_who_work_on_them() -> None:
    found = cpu_costs(
        overhead("client", request=1.0, token=0.1, turn=0.01),
        overhead("gateway", request=2.0, token=0.2, turn=0.02),
        overhead("engine", request=4.0, token=0.4, turn=0.04),
    )
    (lone,) = played(found, [one_ask()], fixed(Fixed(0.001), 0.5))
    assert lone.first == pytest.approx(2.0 + 4.0 + 0.001 + 0.5 + 0.44 + 0.22, abs=1e-9)  # one after the other
    (lone,) = played(found, [one_ask()], fixed(Fixed(0.001), 0.5), client_here=True)
    assert lone.first == pytest.approx(1.0 + 2.0 + 4.0 + 0.001 + 0.5 + 0.44 + 0.22 + 0.11, abs=1e-9)


def test_a_gateway_of_a_millisecond_a_token_bounds_the_throughput() -> None:
    given = [one_ask(at=i * 1e-9, output=100) for i in range(16)]
    free, bound = (
        played(found, given, fixed(Fixed(0.001)))
        for found in (cpu_costs(), cpu_costs(overhead("gateway", token=0.001)))
    )
    tokens = sum(ask.output for ask in given)
    seconds = [max(outcome.end or 0.0 for outcome in outcomes) for outcomes in (free, bound)]
    assert seconds[0] < 0.2
    assert 1.0 <= seconds[1] * 1000 / tokens < 1.02  # and no more work than that


def test_requests_and_tokens_queue_for_a_gateway() -> None:
    """10 ms of its work each. The first one's token comes behind the second one's request, which it has until
    20 ms; the second one's and the third find nobody there."""
    given = [one_ask(at=at) for at in (0.0, 0.005, 0.100)]
    found = played(cpu_costs(overhead("gateway", request=0.010)), given, fixed(Fixed(0.0)))
    assert [outcome.first for outcome in found] == pytest.approx([0.020, 0.015, 0.010])


def test_the_next_launch_waits_for_the_loop() -> None:
    """A step takes 1 ms and the engine's own work 2 ms; sending its token takes 5 ms more, while the next
    step runs, and so each token takes 7 ms."""
    (alone,) = played(cpu_costs(), [one_ask(output=51)], fixed(Fixed(0.001), 0.002))
    (busy,) = played(
        cpu_costs(overhead("engine", token=0.005)), [one_ask(output=51)], fixed(Fixed(0.001), 0.002)
    )
    assert alone.per_token == pytest.approx(0.003)
    assert busy.per_token == pytest.approx(0.007)


def test_a_job_stands_still_while_its_loop_works_where_it_was_measured_to() -> None:
    stalls = [
        BesideLoop(job=measured_job("one", phase, 1), busy=0.01, alone=0.04, seconds=0.0475)
        for phase in Phase.MIXED.parts
    ]
    busy = overhead("engine", token=0.004)
    (free,) = played(cpu_costs(busy), [one_ask(output=51)], fixed(Fixed(0.010)))
    (held,) = played(cpu_costs(busy, *stalls), [one_ask(output=51)], fixed(Fixed(0.010)))
    assert free.per_token == pytest.approx(0.010)
    assert held.per_token == pytest.approx(0.004 + 0.010 - 0.25 * 0.004)  # a quarter of its pace for 4 ms


def test_a_job_that_its_loop_holds_up_wants_no_core() -> None:
    """A step takes the only core when the loop has sent a token, and not before: so nobody is slowed."""
    rows = [oversubscribed(excess, 1.0 + excess) for excess in (1, 2)]
    stalls = [
        BesideLoop(job=measured_job("one", phase, 1), busy=0.01, alone=0.04, seconds=0.05)
        for phase in Phase.MIXED.parts
    ]
    found = cpu_costs(overhead("engine", token=0.004), *rows, *stalls, cores=1)
    (held,) = played(found, [one_ask(output=51)], fixed(Fixed(0.010)))
    assert held.per_token == pytest.approx(0.004 + 0.010, rel=0.03)


def test_a_prompt_takes_loops_longer_by_its_tokens() -> None:
    (lone,) = played(cpu_costs(overhead("gateway", prompt=0.01)), [one_ask()], fixed(Fixed(0.001)))
    assert lone.first == pytest.approx(10 * 0.01 + 0.001)


def test_threads_beyond_the_cores_slow_jobs_as_they_did() -> None:
    """A gateway and a client that have more to do than they can, and a job: three threads on four cores,
    three, two and one."""
    rows = [oversubscribed(excess, 1.0 + excess) for excess in (1, 2)]
    found = cpu_costs(*rows, overhead("gateway", turn=0.05), overhead("client", turn=1.0))
    for cores, times in ((4, 1.0), (3, 1.0), (2, 2.0), (1, 3.0)):
        found.cores = cores
        assert step_seconds(found) == pytest.approx(0.010 * times)


def step_seconds(found: CpuCosts) -> float:
    """Of the engine, late in one answer; its frames are told of much later."""
    ends: list[float] = []

    class Noted(Fixed):
        def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
            ends.append(now())
            return self.each

    played(found, [one_ask(output=30)], fixed(Noted(0.010)), client_here=True)
    starts = sorted(set(ends))
    return starts[20] - starts[19]


def test_where_nothing_costs_anything_all_is_as_without() -> None:
    given = asks(40, seed=3, rate=40.0)
    plain, _ = outcomes([unit()], given)

    for found in played(cpu_costs(), given, unit(), client_here=True):
        outcome = plain[found.request]
        for one, other in ((found.first, outcome.first), (found.end, outcome.end)):
            assert other is not None
            assert one == pytest.approx(other - 2 * 0.0003)  # a wire's way, there and back


def note(found: dict[str, float], name: str) -> Callable[[], None]:
    """Returns a callback that notes when it is called."""
    return lambda: found.__setitem__(name, now())


@virtually
async def test_work_is_done_in_turn() -> None:
    found, thread = dict[str, float](), Cores(2).thread()
    thread.after(0.0, note(found, "nothing"))
    thread.after(2.0, note(found, "first"))
    thread.charge(1.0)
    thread.after(0.0, note(found, "behind it"))
    await asyncio.sleep(1.0)
    thread.after(4.0, note(found, "second"))
    await thread.passed(1.0)
    assert now() == 8.0
    assert not thread.busy
    assert found == {"nothing": 0.0, "first": 2.0, "behind it": 3.0, "second": 7.0}


@virtually
async def test_more_threads_than_cores_have_equal_parts() -> None:
    found, cores = dict[str, float](), Cores(1)
    one, two = cores.thread(), cores.thread()
    one.after(1.0, note(found, "one"))
    await asyncio.sleep(0.5)
    two.after(1.0, note(found, "two"))  # half a core each for one second, the half that is left alone
    await asyncio.sleep(100)
    assert found == {"one": 1.5, "two": 2.0}


@virtually
async def test_jobs_take_cores_and_are_told() -> None:
    told, cores = list[float](), Cores(2)
    cores.join(lambda: 3.0, lambda: told.append(cores.excess))
    await cores.thread().passed(1.0)
    assert now() == pytest.approx(2.0)
    assert told == [2.0, 1.0]


@virtually
async def test_who_waits_may_give_up_and_may_ask_for_more() -> None:
    found, thread = dict[str, float](), Cores(1).thread()
    waiting = asyncio.ensure_future(thread.passed(1.0))
    thread.after(1.0, lambda: thread.after(3.0, note(found, "more")))
    await asyncio.sleep(0.5)
    waiting.cancel()
    await asyncio.sleep(100)
    assert found == {"more": 5.0}


@virtually
async def test_who_leaves_takes_nothing_any_more() -> None:
    found, told, cores = dict[str, float](), list[float](), Cores(1)
    staying, going = cores.thread(), cores.thread()

    def wish() -> float:
        return 1.0

    cores.join(wish, lambda: told.append(now()))
    assert cores.excess == 0.0
    staying.after(1.0, note(found, "staying"))  # at half a core, with the device's wish beside it
    going.charge(9.0)
    await asyncio.sleep(0.9)
    cores.leave(going, wish)
    assert cores.excess == 0.0
    told.clear()
    await asyncio.sleep(1.0)
    assert not told
    assert found == {"staying": pytest.approx(0.9 + 0.7)}

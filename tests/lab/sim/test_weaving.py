"""Weaving in virtual time: how long jobs take at both ends of a loan, and the laws over both pools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvloom.cli.__main__ import main
from kvloom.engine.engine import Engine
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.links import ModelledPlane, ModelledTransport
from kvloom.lab.sim.offload import OffloadingUnits, SimulatedOffloadBackend
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor, timed_link
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.lab.workload.results import read_results
from kvloom.offload.terms import Borrow
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Operator, Work
from kvloom.router.program import load_program
from kvloom.types.address import KVForm
from kvloom.types.errors import ConfigError
from kvloom.types.load import Waits
from kvloom.types.spec import WeaveSpec
from tests.engines import ask as answered
from tests.engines import body
from tests.lab.sim.fleets import SHAPES, Plain, check_whole, results, unit, virtually
from tests.lab.sim.plans import write_files

HOT, COLD = "small", "deep"
LAYERS = SHAPES[HOT].layers


class Slow:
    """Satisfies `OperatorCostModel`: a step takes 10 ms of 10 operators, 1 ms a sequence, and 10 µs a token
    that attention looks at; a prefill 1 ms."""

    start = 0.0
    poll = 0.0

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        if work.tokens > work.batch:
            return 1e-3
        return 10e-3 + 1e-3 * work.batch + 1e-5 * work.context

    def shape(self, model: str) -> ModelShape:
        return SHAPES[model]

    def operators(self, work: Work) -> tuple[Operator, ...]:
        return (Operator("ten", self.seconds(work) / 10, 10, 8),)

    def queued(self, work: Work) -> float:
        return self.seconds(work)

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        return 1e-5 * context / shape.layers


def units(weave: WeaveSpec, *, hot: int = 400, cold: int = 400) -> list[SimulatedUnit]:
    """hot, cold: blocks."""
    made = [unit(HOT, [HOT], blocks=hot, policy="fcfs"), unit(COLD, [COLD], blocks=cold, policy="fcfs")]
    spec = msgspec.structs.replace(made[0].spec, weave=weave)
    return [replace(made[0], spec=spec, cost=Slow()), replace(made[1], cost=Slow())]


def played(
    given: Sequence[SimulatedUnit], asks: Sequence[WorkloadRequest], waits: list[Waits] | None = None
) -> dict[WorkloadRequest, RequestResult]:
    """Laws 1 and 4 hold afterwards, over both pools and the loan's. waits: gets what the lender tells at the
    end."""

    async def run() -> dict[WorkloadRequest, RequestResult]:
        async with run_fleet(given, load_program("data_parallel")) as fleet:
            await asyncio.sleep(1.0)  # the hot unit has borrowed
            found = await results(fleet.server, asks)
            hot, cold = fleet.engines[HOT], fleet.engines[COLD]
            told = (await cold.load()).waits
            if waits is not None and told is not None:
                waits.append(told)
            loan = hot.borrower.loan(HOT)
            if loan is not None:
                loan.pool.check()
                assert loan.count == 0
                assert loan.pool.available == loan.pool.total == cold.pool.lent
        check_whole((hot, cold))
        assert all(not one.error and one.tokens == one.request.output for one in found.values())
        return found

    return run_virtual(run())


def pace(weave: WeaveSpec, asks: Sequence[WorkloadRequest], waits: list[Waits] | None = None) -> float:
    """Seconds a token of the first of these."""
    found = played(units(weave), asks, waits)[asks[0]].per_token
    assert found is not None
    return found


def ask(model: str, at: float, prompt: int, output: int) -> WorkloadRequest:
    return WorkloadRequest(at=at, model=model, prompt=prompt, output=output)


def woven(share: float) -> WeaveSpec:
    return WeaveSpec(COLD, share, 0.3)


def test_a_step_away_takes_the_wire_longer_where_the_lender_rests() -> None:
    """All of its attention is done there, none meanwhile here; a token's q, k, v and output are 640 bytes."""
    one = ask(HOT, 0.0, 100, 101)
    home, away = pace(woven(0.0), [one]), pace(woven(1.0), [one])
    assert home == pytest.approx(11e-3 + 149.5e-5, rel=1e-3)
    wire = LAYERS * (2 * 2e-6 + (16 * 2 * (4 + 2 * 2) + 16 * 2 * 4) / 32e9)
    moved = (100 * SHAPES[HOT].kv_bytes / 32e9 + 20e-6) / 100  # before the first such step
    assert away == pytest.approx(home + wire + moved, rel=1e-4)


def test_both_ends_are_slower_by_just_what_they_do_for_each_other() -> None:
    """The hot unit waits for the rest of an operator a layer; the cold one stands still for each task."""
    whole = WeaveSpec(COLD, 1.0, 0.3, split="none")
    short, long = ask(HOT, 0.0, 100, 101), ask(COLD, 0.0, 20, 230)
    waits = list[Waits]()
    found = pace(whole, [short, long], waits)
    operator = (11e-3 + 75e-5) / 10
    assert waits[-1].tasks_total == 100 * LAYERS
    assert 0.0 < waits[-1].wait < operator
    assert waits[-1].stall == waits[-1].wait  # nothing is done at home meanwhile
    step = 11e-3 + 150e-5 + LAYERS * (2 * 2e-6 + waits[-1].wait)
    assert found == pytest.approx(step, rel=1e-3)
    long, short = ask(HOT, 0.0, 50, 200), ask(COLD, 0.0, 20, 101)
    found = pace(whole, [short, long])
    task = 95e-5  # of all layers, half way
    assert found == pytest.approx((11e-3 + 70e-5) / (1 - task / step), rel=0.02)


def test_operators_are_split_until_a_step_is_held_up_by_a_twentieth() -> None:
    short, long = ask(HOT, 0.0, 100, 101), ask(COLD, 0.0, 20, 230)
    for waits in (0.05, 0.03):
        found = list[Waits]()
        step = pace(WeaveSpec(COLD, 1.0, 0.3, waits=waits), [short, long], found)
        assert found[-1].parts > 10
        assert found[-1].wait < 1.1 * waits * step / LAYERS  # the first step's operators are whole
        assert found[-1].expected_wait < 1.1 * waits * step / LAYERS


def test_under_cpu_control_a_task_waits_for_the_whole_of_what_is_issued() -> None:
    """The host issues a job at once here, so two tasks a step never both find the device idle for them."""
    hot, cold = ask(HOT, 0.0, 100, 61), ask(COLD, 0.0, 20, 200)
    spec, waits = WeaveSpec(COLD, 1.0, 0.3, control="iterations", split="none"), list[Waits]()
    slow, quick = pace(spec, [hot, cold], waits), pace(WeaveSpec(COLD, 1.0, 0.3, split="none"), [hot, cold])
    assert slow - quick > LAYERS * (11.8e-3 - 1.17e-3) / 4
    assert 0.0 < waits[-1].wait < 11.8e-3


def busy(count: int, output: int = 80) -> list[WorkloadRequest]:
    return [ask(HOT, 0.02 * n, 60 + n, output) for n in range(count)]


def test_a_hot_unit_short_of_room_answers_sooner_with_a_loan() -> None:
    """Its pool holds four of these."""
    alone, found = (played(units(woven(share), hot=100), busy(16)) for share in (0.0, 0.5))
    last, sooner = (max(one.end or 0.0 for one in some.values()) for some in (alone, found))
    assert sooner < 0.8 * last


@virtually
async def test_what_a_cold_unit_lacks_comes_back_and_is_lent_again_later() -> None:
    crowd = [ask(COLD, 0.6, 100, 100) for _ in range(6)]  # the pool holds two of them
    lent, kept = list[int](), list[bool]()  # kept: by the hot unit, what is not lent any more
    async with run_fleet(units(woven(1.0)), load_program("data_parallel")) as fleet:
        await asyncio.sleep(1.0)
        hot, cold = fleet.engines[HOT], fleet.engines[COLD]

        async def look() -> None:
            while True:
                lent.append(cold.pool.lent)
                kept.append(not lent[-1] and hot.borrower.loan(HOT) is not None)
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        found = await results(fleet.server, [*busy(6, 160), *crowd])
        await asyncio.sleep(20.0)
        looking.cancel()
    assert lent[0] > 0 == min(lent) < lent[-1]
    assert not any(one and other for one, other in pairwise(kept))  # a step takes 30 ms
    assert all(not one.error and one.tokens == one.request.output for one in found.values())
    check_whole([cold])


@virtually
async def test_a_cold_unit_has_back_the_part_that_it_lacks_and_the_loan_goes_on() -> None:
    """Its pool holds four of these without the loan, and two with it."""
    crowd = [ask(COLD, 0.6, 100, 100) for _ in range(3)]
    async with run_fleet(units(woven(1.0)), load_program("data_parallel")) as fleet:
        await asyncio.sleep(1.0)
        hot, cold = fleet.engines[HOT], fleet.engines[COLD]
        loan, lent = hot.borrower.loan(HOT), cold.pool.lent
        assert loan is not None
        found = await results(fleet.server, [*busy(6, 160), *crowd])
        assert hot.borrower.loan(HOT) is loan
        assert 0 < cold.pool.lent < lent
        assert cold.pool.lent == loan.pool.available == loan.pool.total - loan.pool.lent
    assert all(not one.error and one.tokens == one.request.output for one in found.values())
    check_whole([cold])


@virtually
async def test_of_several_cold_units_the_freest_lends() -> None:
    """The first lends until it needs all of its blocks; then the third does, for the second is busy."""
    hot, cold = units(WeaveSpec(COLD, 1.0, 0.3, others=("second", "third")))
    others = [
        replace(cold, spec=msgspec.structs.replace(cold.spec, unit=name)) for name in ("second", "third")
    ]
    async with run_fleet([hot, cold, *others], load_program("data_parallel")) as fleet:
        first, second, third = (fleet.engines[name] for name in (COLD, "second", "third"))
        await asyncio.sleep(1.0)
        assert [one.pool.lent > 0 for one in (first, second, third)] == [True, False, False]
        hots = asyncio.create_task(results(fleet.server, busy(6, 160)))
        steady = asyncio.create_task(one_after_the_other(second, 5))
        await asyncio.sleep(0.6)
        crowd = (answered(first, body(COLD, [n] * 100, max_tokens=99)) for n in range(6))
        own = [asyncio.create_task(one) for one in crowd]
        for _ in range(100):
            await asyncio.sleep(0.05)
            if third.pool.lent:
                break
        assert [one.pool.lent > 0 for one in (first, second, third)] == [False, False, True]
        assert all(not one.error and one.tokens == one.request.output for one in (await hots).values())
        assert all(len(one.tokens[0]) == 99 for one in await asyncio.gather(*own))
        await steady
    check_whole([first, second, third])


async def one_after_the_other(engine: Engine, count: int) -> None:
    for n in range(count):
        await answered(engine, body(COLD, [n] * 100, max_tokens=300))


@virtually
async def test_a_lender_that_dies_in_a_step_has_not_answered() -> None:
    """What was away is computed again at home, and every token comes."""
    given, plane = units(woven(1.0)), ModelledPlane()
    offloading, clock = OffloadingUnits(one.spec for one in given), LoopClock(asyncio.get_running_loop())
    engines, transports = list[Engine](), list[ModelledTransport]()
    for one in given:
        executor = modelled_executor(one)
        transports.append(plane.join(one.spec.unit, executor.blocks, timed_link(one)))
        backend = offloading.backend(one, executor, transports[-1])
        engines.append(Engine(executor, transports[-1], one.spec, clock, backend))
    hot, cold = engines
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(engine.run())
        terms = hot.borrower.terms(HOT, 20)
        hot.borrower.borrow(terms, cold.lender.lend(terms), 1.0)
        answer = group.create_task(answered(hot, body(HOT, [1, 2, 3], max_tokens=60)))
        await clock.sleep(0.2)
        loan = hot.borrower.loan(HOT)
        assert loan is not None
        assert loan.count == 1
        plane.kill(transports[1])
        offloading.forget(transports[1])
        await clock.sleep(0.02)
        assert hot.borrower.loan(HOT) is None
        assert len((await answer).tokens[0]) == 60
        for engine in engines:
            engine.stop()
    assert hot.pool.available == hot.pool.total


@virtually
async def test_what_came_back_in_two_parts_is_out_of_reach() -> None:
    """A number that was handed back first names no block that was handed back later."""
    given, plane = units(woven(1.0)), ModelledPlane()
    offloading = OffloadingUnits(one.spec for one in given)
    backends = list[SimulatedOffloadBackend]()
    for one in given:
        executor = modelled_executor(one)
        transport = plane.join(one.spec.unit, executor.blocks, timed_link(one))
        made = offloading.backend(one, executor, transport)
        assert made is not None
        backends.append(made)
    hot, cold = backends
    form = KVForm.of(hot.executor.geometries[HOT], "float32")
    per_page = form.layers * form.kv_heads
    terms = Borrow(model=HOT, pid=1, form=form, heads=hot.heads(HOT), rows=4, width=4, pages=2)
    blocks = np.arange(100, 100 + 2 * per_page, dtype=np.int32)
    hot.borrow(terms, cold.lend(terms, blocks, lambda why: None))
    for part in np.split(np.arange(per_page), 2):
        cold.take_back(part)
    found = hot.lent_blocks(HOT)
    assert found is not None
    assert set(found[1].tolist()) <= set(blocks[per_page:].tolist())


def test_a_share_that_adapts_rises_in_need_and_falls_as_the_cold_unit_suffers() -> None:
    shares = list[float]()

    async def run(bound: float, after: float) -> None:
        given = units(WeaveSpec(COLD, "auto", 0.3, bound), hot=100)
        hot = [ask(HOT, 1.0 + 0.05 * n, 60, 80) for n in range(40)]
        cold = [ask(COLD, 2.0 * n, 20, 200) for n in range(4)]
        asks = sorted([*hot, *cold], key=lambda one: one.at)
        async with run_fleet(given, load_program("data_parallel")) as fleet:
            await asyncio.sleep(1.0)

            async def look() -> None:
                while True:
                    loan = fleet.engines[HOT].borrower.loan(HOT)
                    shares.append(loan.share if loan else 0.0)
                    await asyncio.sleep(0.25)

            looking = asyncio.create_task(look())
            await results(fleet.server, asks)
            await asyncio.sleep(after)
            looking.cancel()

    run_virtual(run(10.0, 60.0))
    most = shares.index(max(shares))
    assert shares[most] >= 0.5
    assert shares[:most] == sorted(shares[:most])
    assert shares[most:] == sorted(shares[most:], reverse=True)  # once the need is over
    assert shares[-1] == 0.0
    shares.clear()
    run_virtual(run(0.05, 0.0))
    assert any(after < before for before, after in pairwise(shares))


def test_a_config_weaves_on_a_machine_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = []
    for config in ("woven.yaml", "apart.yaml"):
        words = ["--profile", "with_overheads.json", "--workload", "measured.yaml", "--json", "out.json"]
        assert main(["simulate", config, *words]) == 0
        found.append(read_results(Path("out.json")))
        assert (found[-1].total.requests, found[-1].total.errors) == (40, 0)
    assert found[0].models["one"].per_token != found[1].models["one"].per_token


def test_a_device_without_operators_cannot_weave() -> None:
    given = [replace(one, cost=Plain()) for one in units(woven(0.5))]
    offloading = OffloadingUnits(one.spec for one in given)
    executor = modelled_executor(given[0])
    transport = ModelledPlane().join(HOT, executor.blocks, timed_link(given[0]))
    with pytest.raises(ConfigError, match="small: weave: operators of its device are not known"):
        offloading.backend(given[0], executor, transport)

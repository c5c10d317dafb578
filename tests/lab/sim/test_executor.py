"""A modelled device: when its jobs end, and when their layers are there. All times are worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvloom.lab.sim.content import JobFailed
from kvloom.lab.sim.executor import ModelledExecutor
from kvloom.lab.sim.unit import simulated_card
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Work
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import Geometry
from kvloom.types.job import ForwardPlan, Job, JobResult, Phase, SampleRow
from kvloom.types.request import SamplingParams
from kvloom.types.transfer import BlockCopies, PageCopies, Transfer
from tests.lab.sim.fleets import now, virtually

LAYERS = 4
SHAPE = ModelShape(layers=LAYERS, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=100)
CARD = simulated_card("m", SHAPE, 256)
GEOMETRY: Geometry = SHAPE.geometry(1024)


class Simple:
    """Satisfies `CostModel`: 1 s a token computed and 0.1 s a token read, on the whole device; beside others
    longer by their shares."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        alone = (work.tokens + 0.1 * work.context) / work.share
        return alone * (1.0 + sum(other.share for other in beside))


@dataclass
class Noted:
    """Satisfies `Content`: notes when layers are put and written."""

    put_at: list[tuple[float, list[int]]] = field(default_factory=list)
    wrote: list[tuple[float, range]] = field(default_factory=list)
    failing: int | None = None  # the layer at which the job fails

    def begin(self, job: Job) -> None:
        self.wrote.append((now(), range(0)))

    def write(self, job: Job, layers: range) -> None:
        self.wrote.append((now(), layers))
        if self.failing in layers:
            raise JobFailed("layer")

    def draw(self, job: Job, step: int) -> list[int]:
        return [step for _ in job.samples]


def device(
    content: Noted | None = None, engine_gap: Callable[[Work], float] | None = None
) -> ModelledExecutor:
    return ModelledExecutor(
        {"m": CARD},
        {"m": GEOMETRY},
        blocks=100,
        compute=4,
        cost=Simple(),
        content=content,
        engine_gap=engine_gap,
    )


def job(
    *, share: int = 4, tokens: int = 1, context: int = 0, steps: int = 1, sends: tuple[PageCopies, ...] = ()
) -> Job:
    """One sequence. Its page has blocks 2 × layer + head."""
    plan = ForwardPlan(
        model="m",
        sequences=(0,),
        appends=np.array([tokens]),
        starts=np.array([context]),
        page_map=np.arange(2 * LAYERS, dtype=np.int32).reshape(1, LAYERS, 2),
        tables=np.zeros((1, 1), np.int32),
        positions=np.arange(context, context + tokens),
        slot_page=np.zeros(tokens, np.int32),
        slot_offset=np.zeros(tokens, np.int32),
        sends=sends,
    )
    phase = Phase.PREFILL if steps == 1 else Phase.DECODE
    drawn = (SampleRow(row=tokens - 1, key=1, index=0, params=SamplingParams(max_tokens=1, seed=0)),)
    return Job("m", phase, share, plan, np.zeros(tokens, np.int64), drawn, steps=steps)


class Sent(Transfer):
    """Tells `noted` what is put."""

    def __init__(self, noted: Noted) -> None:
        form = KVForm.of(GEOMETRY, "float32")
        address = KVAddress(model="m", form=form, begin=0, end=1, blocks=b"", ticket=Ticket(0, 1))
        super().__init__(Endpoint(unit="peer", kind="modelled", where=b""), address, 0, 1)
        self._noted = noted

    def put(self, copies: BlockCopies) -> None:
        self._noted.put_at.append((now(), copies.own.tolist()))

    async def arrived(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        raise NotImplementedError


def send(noted: Noted) -> PageCopies:
    one = np.ones(1, np.int32)
    return PageCopies(Sent(noted), 0 * one, np.zeros((1, LAYERS, 2), np.int32), 0 * one, one)


async def ended(future: asyncio.Future[JobResult]) -> list[float]:
    """When it ends, and how long it says it took."""
    seconds = (await future).seconds
    return [now(), seconds]


@virtually
async def test_jobs_side_by_side_slow_each_other_for_as_long_as_they_overlap() -> None:
    executor = device()
    first = asyncio.create_task(ended(executor.launch(job(share=2, tokens=2))))  # 4 s alone
    await asyncio.sleep(1)
    second = asyncio.create_task(ended(executor.launch(job(share=1, tokens=1))))  # 4 s alone
    # The first has 3/4 left, in which it takes 4 × 1.25 = 5 s: until 1 + 3.75. The second takes 4 × 1.5 =
    # 6 s and has 6 - 3.75 of them left, which are 3/8 of it: 1.5 s alone.
    assert await first == pytest.approx([4.75, 4.75])
    assert await second == pytest.approx([6.25, 5.25])


@virtually
async def test_two_come_beside_a_third() -> None:
    executor = device()
    long = asyncio.create_task(ended(executor.launch(job(share=2, tokens=5))))  # 10 s alone
    await asyncio.sleep(1)
    two = [executor.launch(job(share=1, tokens=1)) for _ in range(2)]
    # each of the two takes 4 × 1.75 = 7 s; the long one, with 0.9 left, 10 × 1.5 = 15 s, so that after
    # them 0.9 - 7/15 of it is left
    for future in two:
        assert await ended(future) == pytest.approx([8.0, 7.0])
    assert await long == pytest.approx([8.0 + 10 * (0.9 - 7 / 15), 8.0 + 10 * (0.9 - 7 / 15)])


@virtually
async def test_overhead_comes_on_top() -> None:
    executor = device(engine_gap=lambda work: 0.25 * work.batch)
    assert await ended(executor.launch(job(tokens=3))) == pytest.approx([3.25, 3.25])


@virtually
async def test_layers_that_a_peer_waits_for_are_put_as_they_are_computed() -> None:
    noted = Noted()
    executor = device(noted)
    future = executor.launch(job(share=2, tokens=2, sends=(send(noted),)))  # 1 s a layer alone
    await asyncio.sleep(1.5)
    executor.launch(job(share=2, tokens=1))  # 2 × 1.5 s; the first takes 1.5 s a layer beside it
    assert await ended(future) == pytest.approx([5.0, 5.0])
    # layer 1 is half done at 1.5 and takes 0.75 s more; layer 2 until 3.75; then half of layer 3 by 4.5, when
    # the other has gone, and the rest in half a second
    assert [at for at, _ in noted.put_at] == pytest.approx([1.0, 2.25, 3.75, 5.0])
    assert [blocks for _, blocks in noted.put_at] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@virtually
async def test_without_a_peer_all_layers_are_written_at_the_end() -> None:
    noted = Noted()
    await device(noted).launch(job(tokens=2))
    assert noted.wrote == [(0.0, range(0)), (2.0, range(LAYERS))]
    assert noted.put_at == []


def test_each_step_reads_what_the_last_one_wrote() -> None:
    noted = Noted()

    async def main() -> JobResult:
        return await device(noted).launch(job(context=10, steps=3))

    result = run_virtual(main())
    assert result.seconds == pytest.approx(2.0 + 2.1 + 2.2)
    assert result.tokens == [0, 1, 2]
    assert [layers for _, layers in noted.wrote[1:]] == [range(LAYERS)] * 3


@virtually
async def test_cut_ends_with_the_step_under_way() -> None:
    executor = device(Noted())
    running = job(context=10, steps=50)
    future = executor.launch(running)
    assert executor.steps_begun(running) == 1
    await asyncio.sleep(4.5)  # steps end at 2.0, 4.1, 6.3
    assert executor.steps_begun(running) == 3
    executor.cut(running)
    assert await ended(future) == pytest.approx([6.3, 6.3])
    assert future.result().tokens == [0, 1, 2]
    executor.cut(running)  # too late, and of no effect
    assert executor.steps_begun(running) == 50


@virtually
async def test_who_comes_slows_a_job_of_many_steps_from_that_moment() -> None:
    executor = device(Noted())
    future = executor.launch(job(share=2, steps=2))  # 2.0 and 2.2 s alone
    await asyncio.sleep(1)
    executor.launch(job(share=4, tokens=100))  # twice as long beside it
    assert await ended(future) == pytest.approx([1 + 2.0 + 4.4, 7.4])


@virtually
async def test_a_job_that_fails_half_way_lets_the_others_go_on() -> None:
    noted = Noted(failing=1)
    executor = device(noted)
    failing = executor.launch(job(share=2, tokens=2, sends=(send(noted),)))
    with pytest.raises(JobFailed):
        await failing
    assert now() == pytest.approx(2.0)
    noted.failing = None
    assert await ended(executor.launch(job())) == pytest.approx([3.0, 1.0])
    assert [at for at, _ in noted.put_at] == pytest.approx([1.0])


@virtually
async def test_a_device_that_is_halted_ends_no_job() -> None:
    executor = device(Noted())
    future = executor.launch(job(tokens=2))
    await asyncio.sleep(1)
    executor.halt()
    await asyncio.sleep(100)
    assert not future.done()

"""An executor that takes several steps in one job and tells their tokens late: everyone's tokens are those of
a lone run, wherever it is cut and whoever ends meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.engine.engine import Engine
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.request import StartGenerate
from kvloom.types.spec import Policy
from tests.engine.plays import MOST_JOBS, check, order
from tests.engines import Answer
from tests.modelled import ModelledExecutor, ask, engine_over, expected, finish, modelled, turns


@dataclass(eq=False)
class _Run:
    """begun: steps. done: those whose tokens are known, all in `tokens`."""

    job: Job
    future: asyncio.Future[JobResult]
    most: int
    begun: int = 1
    done: int = 0
    tokens: list[int] = field(default_factory=list)


class AheadExecutor(ModelledExecutor):
    """One step has always begun beside the one whose tokens come next; it has written its K and V by then.
    longest: steps of a job. beside: jobs of several steps that have begun while a prefill ran."""

    def __init__(self, blocks: int, stride: int, seed: int) -> None:
        super().__init__(blocks, seed=seed)
        self.max_steps, self.lookahead = stride, 1
        self.longest = self.beside = self._prefills = 0
        self._order = random.Random(seed)
        self._runs: list[_Run] = []

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        if job.steps == 1:
            future, prefill = super().launch(job), job.phase is Phase.PREFILL
            self._prefills += prefill
            future.add_done_callback(lambda _: self._ended(prefill))
            return future
        self.beside += self._prefills > 0
        assert job.plan.ahead >= job.steps
        assert not job.plan.copies
        self.jobs.append(job)
        self.idle -= job.share
        assert self.idle >= 0
        run = _Run(job, asyncio.get_running_loop().create_future(), job.steps)
        self._runs.append(run)
        self._write(job)
        self._soon(run)
        return run.future

    def _ended(self, prefill: bool) -> None:
        self._prefills -= prefill

    def steps_begun(self, job: Job) -> int:
        return self._run(job).begun

    def cut(self, job: Job) -> None:
        """Another may have begun since `taken` was asked."""
        run = self._run(job)
        if run.begun < min(run.most, run.done + 2) and self._order.random() < 0.5:
            run.begun += 1
        run.most = run.begun

    def _run(self, job: Job) -> _Run:
        return next(run for run in self._runs if run.job is job)

    def _soon(self, run: _Run) -> None:
        def wait(turns: int) -> None:
            if turns:
                asyncio.get_running_loop().call_soon(wait, turns - 1)
            else:
                self._go_on(run)

        wait(self._order.randint(1, 4))

    def _go_on(self, run: _Run) -> None:
        """The device is asked for another step, or one has ended."""
        if run.begun < min(run.most, run.done + 2):
            run.begun += 1
            self._soon(run)
            return
        drawn = self.witness.draw(self._step(run), 0)
        run.tokens += drawn
        run.done += 1
        if run.done == run.begun:
            self.longest = max(self.longest, run.done)
            self.idle += run.job.share
            run.future.set_result(JobResult(run.tokens, [None] * len(run.tokens), [], 0.0))
            return
        self._write(self._step(run))
        assert run.job.on_step is not None
        run.job.on_step(run.job, drawn)
        self._soon(run)

    def _step(self, run: _Run) -> Job:
        """The job's next step by itself."""
        job, plan, each = run.job, run.job.plan, len(run.job.samples)
        if not run.done:
            return job
        positions = plan.positions + run.done
        edge, offset = divmod(positions, self.geometries[job.model].tokens_per_block)
        made = [[*one.output.tolist(), *run.tokens[i::each]] for i, one in enumerate(job.samples)]
        samples = [
            replace(one, index=one.index + run.done, output=np.asarray(own, dtype=np.int64))
            for one, own in zip(job.samples, made, strict=True)
        ]
        plan = replace(
            plan,
            starts=plan.starts + run.done,
            positions=positions,
            slot_page=plan.tables[np.arange(each), edge],
            slot_offset=offset.astype(np.int32),
        )
        return replace(job, plan=plan, tokens=np.asarray(run.tokens[-each:]), samples=tuple(samples))


@st.composite
def _bodies(draw: st.DrawFn, number: int) -> StartGenerate:
    """Some of which end by a token; every hundredth does."""
    model = draw(st.sampled_from(["wide", "tall", "thin"]))
    stops = tuple(range(draw(st.integers(0, 99)), 1000, 100)) if draw(st.booleans()) else ()
    return order(
        f"r{number}", model, draw(st.integers(1, 30)), n=draw(st.integers(1, 2)),
        max_tokens=draw(st.integers(1, 40)), temperature=draw(st.sampled_from([0.0, 1.0])),
        logprobs=draw(st.sampled_from([None, None, None, 0])), stop_token_ids=stops,
    )  # fmt: skip


@dataclass(frozen=True)
class Play:
    """waits: turns of the loop before each request. leaves: those that are aborted after so many turns.
    looks: turns between questions for the unit's load."""

    bodies: list[StartGenerate]
    waits: list[int]
    leaves: dict[int, int]
    looks: int
    blocks: int
    stride: int
    seed: int


@st.composite
def _plays(draw: st.DrawFn) -> Play:
    count = draw(st.integers(1, 5))
    return Play(
        [draw(_bodies(i)) for i in range(count)],
        [draw(st.integers(0, 60)) for _ in range(count)],
        draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 80), max_size=2)),
        draw(st.integers(1, 30)),
        draw(st.sampled_from([90, 120, 400])),
        draw(st.sampled_from([2, 3, 7, 32])),
        draw(st.integers(0, 99)),
    )


async def _visit(engine: Engine, play: Play, number: int) -> Answer:
    asked = asyncio.create_task(ask(engine, play.bodies[number]))
    if number in play.leaves:
        await turns(play.leaves[number])
        await engine.abort(play.bodies[number].request)
    return await asked


async def _play(play: Play) -> tuple[list[Answer], AheadExecutor]:
    executor = AheadExecutor(play.blocks, play.stride, play.seed)
    engine = engine_over(executor)

    async def look() -> None:
        while True:
            await turns(play.looks)
            await engine.load()
            engine.pool.check()

    async with modelled(engine, executor):
        looking = asyncio.create_task(look())
        tasks: list[asyncio.Task[Answer]] = []
        for i, wait in enumerate(play.waits):
            await turns(wait)
            tasks.append(asyncio.create_task(_visit(engine, play, i)))
        await finish(executor, tasks, most_jobs=MOST_JOBS)
        looking.cancel()
        return [task.result() for task in tasks], executor


@settings(max_examples=40, deadline=None, derandomize=True)
@given(_plays())
def test_everyone_has_the_tokens_of_a_lone_run(play: Play) -> None:
    answers, executor = asyncio.run(_play(play))
    for i, (body, answer) in enumerate(zip(play.bodies, answers, strict=True)):
        check(executor, body, answer, whole=i not in play.leaves)


def test_a_lone_request_takes_few_jobs_and_its_frames_come_step_by_step() -> None:
    body = order("r", "wide", 5, max_tokens=33)
    play = Play([body], [0], {}, 1000, 400, 8, 0)

    async def main() -> tuple[list[int], AheadExecutor]:
        executor = AheadExecutor(play.blocks, play.stride, play.seed)
        engine = engine_over(executor)
        async with modelled(engine, executor):
            return [len(frame) async for frame in engine.start_generate(body)], executor

    frames, executor = asyncio.run(main())
    assert len(executor.jobs) == 1 + 4
    assert executor.longest == 8
    assert max(frames[:-1]) == 1  # but for its last token, which comes with the end
    assert sum(frames) == 34


def test_what_ends_a_sequence_ends_the_job_one_step_later() -> None:
    wanted = order("r", "wide", 5, max_tokens=33)
    executor = AheadExecutor(400, 32, 0)
    stop = expected(executor, wanted)[0][9]
    body = order("r", "wide", 5, max_tokens=33, stop_token_ids=(stop,))
    answers, executor = asyncio.run(_play(Play([body], [0], {}, 1000, 400, 32, 0)))
    check(executor, body, answers[0], whole=True)
    assert len(answers[0].tokens[0]) == 10
    assert executor.longest == 10  # the prompt's own token, nine, and one or two that nobody sees


def test_steps_go_on_beside_a_prefill() -> None:
    bodies = [order("r", "wide", 5, max_tokens=60), order("other", "tall", 80, max_tokens=2)]
    answers, executor = asyncio.run(_play(Play(bodies, [0, 60], {}, 1000, 400, 32, 0)))
    for body, answer in zip(bodies, answers, strict=True):
        check(executor, body, answer, whole=True)
    assert executor.beside > 0


@pytest.mark.parametrize("policy", ["adbs", "slack"])
@pytest.mark.parametrize("waiting", ["tall", "thin", "wide"])
def test_steps_go_on_beside_a_prefill_while_others_wait(policy: Policy, waiting: str) -> None:
    """Of any model. Their prompts come next, whatever steps are under way."""
    bodies = [
        *(order(f"r{i}", "wide", 5, max_tokens=90) for i in range(6)),
        order("long", "tall" if waiting != "wide" else "wide", 80, max_tokens=2),
        *(order(f"next {i}", waiting, 60, max_tokens=2) for i in range(3)),
    ]
    executor = AheadExecutor(3000, 32, 0)
    engine = engine_over(executor, policy=policy, share=0.5)

    async def main() -> tuple[list[Answer], int]:
        async with modelled(engine, executor):
            first = [asyncio.create_task(ask(engine, body)) for body in bodies[:6]]
            await turns(90)
            before = len(executor.jobs)
            rest = [asyncio.create_task(ask(engine, body)) for body in bodies[6:]]
            return list(await asyncio.gather(*first, *rest)), before

    answers, before = asyncio.run(main())
    for body, answer in zip(bodies, answers, strict=True):
        check(executor, body, answer, whole=True)
    later = executor.jobs[before:]
    prefills = [i for i, job in enumerate(later) if job.phase is Phase.PREFILL]
    between = [job for job in later[: prefills[-2]] if job.phase is Phase.DECODE]
    assert max(job.steps for job in between) > 1, "prompts wait all the while"
    assert max(b - a for a, b in pairwise(prefills)) <= 4, "no prompt waits for many jobs"


def test_walls_hold_for_the_blocks_of_steps_to_come() -> None:
    """Two sequences that together outgrow their model's share of the pool, while the rest of it is free."""
    bodies = [order("r", "wide", 8, max_tokens=20), order("other", "wide", 8, max_tokens=20)]
    executor = AheadExecutor(120, 32, 0)
    most: list[int] = []

    async def main() -> list[Answer]:
        engine = engine_over(executor, quotas="fixed")

        async def look() -> None:
            while True:
                await turns(1)
                wide = (await engine.load()).models["wide"]
                most.append(wide.used_blocks - wide.quota_blocks)

        async with modelled(engine, executor):
            looking = asyncio.create_task(look())
            answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
            looking.cancel()
            return answers

    for body, answer in zip(bodies, asyncio.run(main()), strict=True):
        check(executor, body, answer, whole=True)
    assert executor.longest > 1
    assert max(most) <= 0


def test_a_cut_gives_the_blocks_of_steps_to_come_back_at_once() -> None:
    body = order("r", "wide", 5, max_tokens=40)
    executor = AheadExecutor(400, 32, 0)

    async def main() -> tuple[int, int, Answer]:
        engine = engine_over(executor)
        async with modelled(engine, executor):
            asked = asyncio.create_task(ask(engine, body))
            while not executor.jobs or executor.jobs[-1].steps == 1:
                await turns(1)
            before = engine.pool.available
            await engine.abort("nobody")
            after = engine.pool.available
            engine.pool.check()
            return before, after, await asked

    before, after, answer = asyncio.run(main())
    check(executor, body, answer, whole=True)
    assert 400 - before == 4 * 10  # ten pages: five tokens, and 32 to come
    assert 400 - after == 4 * 2

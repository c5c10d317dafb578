"""A device that is only known by its cost: jobs take as long as a cost model says."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from kvloom.lab.sim.content import Content, JobFailed, NoContent
from kvloom.lab.sim.cpu import EngineCpu
from kvloom.lab.workload.summary import Histogram
from kvloom.plan.cost.loading import wake_seconds
from kvloom.plan.cost.work import CostModel, Work
from kvloom.types.geometry import I32, Geometry
from kvloom.types.job import Job, JobResult, SampleRow
from kvloom.types.request import ModelCard, TokenLogprob

NO_VECTOR: Final = bytes(4)  # the one number that a modelled device makes of a text
_FORESEEN: Final = 16  # steps of a job that runs alone, of which only the last has a timer
_ROUNDING: Final = 1e-9  # seconds by which equal times may differ


class Loans(Protocol):
    """The effects of lending and borrowing on jobs."""

    def begin(self, job: Job, then: Callable[[], None]) -> None:
        """Does what comes before the job, and calls `then`."""

    def seconds(self, job: Job, work: Work, alone: float) -> float:
        """Returns the job's seconds with loans, from its seconds without (`alone`). Stalls are not in it: see
        `exchange` and `ModelledExecutor.stand_still`."""

    def exchanges(self, job: Job) -> int:
        """Returns how often a step of the job asks another unit for attention, evenly over the step."""

    def exchange(self, job: Job) -> float:
        """Asks now. Returns the seconds by which that holds the job up."""

    def finish(self, job: Job) -> str | None:
        """Ends the job. Returns why what was offloaded of it does not count."""


class Progress(NamedTuple):
    """How far a job has come with its step."""

    work: Work
    seconds: float
    """The time of the whole step."""
    part: float
    """The part of it that is done."""
    still: float
    """Seconds for which the job stands still from now on."""
    age: float
    """Seconds since the step's begin, in which the job may have stood still."""


@dataclass(slots=True, eq=False)
class _Running:
    """A job at one of its steps."""

    job: Job
    work: Work
    """The work of the present step."""
    draft_work: list[Work]
    """The work of the steps of a draft model, which are a part of the job's own step."""
    future: asyncio.Future[JobResult]
    started: float
    """The time at which the job was launched."""
    since: float
    """The time at which `left` was true; it is in the future while the job stands still."""
    left: float = 1.0
    """The part of the step that is still to do at `since`."""
    seconds: float = 0.0
    """Seconds of the whole step, at the present load."""
    layers: int = 0
    """Layers of the step that are written."""
    step: int = 0
    """The number of the present step."""
    steps: int = 1
    """Steps that the job will take."""
    begun: float = 0.0
    """The time at which the step began."""
    exchanges: int = 0
    """How often the step asks another unit for attention."""
    asked: int = 0
    """How often it has asked."""
    lost: str | None = None
    """Why what was offloaded does not count; None if it does."""
    tokens: list[int] = field(default_factory=list)
    """The tokens of the steps that have ended."""
    timer: asyncio.TimerHandle | None = None
    """The timer for the next exchange, the end of the next layer that a peer waits for, or the end of the
    last step that is foreseen."""
    ends: list[float] = field(default_factory=list)
    """The times at which the foreseen steps end, from the present one on."""
    paces: list[float] = field(default_factory=list)
    """The seconds of each of these steps."""

    @property
    def all_layers(self) -> int:
        return int(self.job.plan.page_map.shape[1])

    def take(self, steps: int) -> None:
        """Takes so many of the steps that are foreseen, the present one first."""
        self.since, self.seconds = self.ends[steps - 1], self.paces[steps]
        self.ends, self.paces = self.ends[steps:], self.paces[steps:]
        self.work, self.left = self.work.next(steps), 1.0
        self.step += steps


class ModelledWeights:
    """Satisfies `WeightMemory`: a model's weights come in `PARTS` parts, at so many bytes a second."""

    PARTS = 4

    def __init__(self, sizes: Mapping[str, int], block_bytes: int, bandwidth: float) -> None:
        """sizes: bytes of each model's weights."""
        self.blocks = {name: -(-size // block_bytes) for name, size in sizes.items()}
        self._seconds = {name: wake_seconds(size, bandwidth) / self.PARTS for name, size in sizes.items()}
        self._parts = dict.fromkeys(sizes, 0)
        self._asked: dict[str, list[float]] = {name: [] for name in sizes}
        self.awake: set[str] = set()
        """Models of which a part at least has been read."""
        self.on_loss: Callable[[I32], None] | None = None
        """Called with blocks that lose what they hold."""
        self.wakes = self.sleeps = 0
        self.waits = Histogram()
        """Seconds that requests waited which came while their model slept."""

    def asked(self, model: str) -> None:
        """Notes that a request for a model has come."""
        if model in self._asked and model not in self.awake:
            self._asked[model].append(asyncio.get_running_loop().time())

    def make_room(self, blocks: I32) -> None:
        if self.on_loss is not None:
            self.on_loss(blocks)

    def take_back(self, blocks: I32) -> None:
        """Does nothing: nothing is kept of memory."""

    def wake(self, model: str) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        read: asyncio.Future[bool] = loop.create_future()
        self.wakes += self._parts[model] == 0
        self._parts[model] += 1
        whole = self._parts[model] == self.PARTS
        loop.call_later(self._seconds[model], self._on_read, model, read, whole)
        return read

    def _on_read(self, model: str, read: asyncio.Future[bool], whole: bool) -> None:
        self.awake.add(model)
        now, asked = asyncio.get_running_loop().time(), self._asked[model]
        while asked:
            self.waits.add(now - asked.pop())
        if not read.done():
            read.set_result(whole)

    def sleep(self, model: str) -> None:
        self.sleeps += 1
        self.awake.discard(model)
        self._parts[model] = 0


class ModelledExecutor:
    """Satisfies `Executor`. Jobs that run at the same time slow each other down as the cost model says,
    each for as long as they do. A job whose plan has sends puts each layer when it is computed.

    compute: units to share out. blocks: in the arena. engine_gap: seconds of the engine's own work for
    a job. max_steps: steps that a decode job may take. cpu: what slows jobs, and comes
    between a job's end and its result. acceptance: the probability that a draft is right, by model.
    """

    def __init__(
        self,
        cards: dict[str, ModelCard],
        geometries: dict[str, Geometry],
        *,
        blocks: int,
        compute: int,
        cost: CostModel,
        content: Content | None = None,
        engine_gap: Callable[[Work], float] | None = None,
        max_steps: int = 4096,
        cpu: EngineCpu | None = None,
        weights: ModelledWeights | None = None,
        acceptance: Mapping[str, float] | None = None,
    ) -> None:
        self.cards = cards
        self.geometries = geometries
        self.blocks = blocks
        self.compute = compute
        self.max_steps, self.lookahead = max_steps, 0
        self._cost = cost
        self._engine_gap = engine_gap or (lambda _: 0.0)
        self._text = NoContent({name: card.vocab_size for name, card in cards.items()}, acceptance)
        self._content = content or self._text
        self._foresees = content is None and cpu is None  # nobody looks at each step
        self._running: list[_Running] = []
        self._cpu = cpu
        self.loans: Loans | None = None
        self.weights = weights
        self.adapters = None
        if cpu is not None:
            cpu.join(self.reschedule_ends)

    @property
    def works(self) -> list[Work]:
        """Returns the work of the jobs that run."""
        return [running.work for running in self._running]

    def progress(self) -> list[Progress]:
        """Returns how far each job has come that runs."""
        now = asyncio.get_running_loop().time()
        return [self._progress(running, now) for running in self._running if running.seconds]

    def _progress(self, running: _Running, now: float) -> Progress:
        passed = max(0.0, now - running.since) / running.seconds
        part, still = min(1.0, 1.0 - running.left + passed), max(0.0, running.since - now)
        return Progress(running.work, running.seconds, part, still, now - running.begun)

    def stand_still(self, seconds: float) -> None:
        """Lets all jobs that run end later by so much."""
        for running in self._running:
            running.since += seconds

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        loop = asyncio.get_running_loop()
        running = _Running(
            *(
                job,
                self._work(job),
                self._run_draft_steps(job),
                loop.create_future(),
                loop.time(),
                loop.time(),
            ),
            steps=job.steps,
        )
        if self.loans is None:
            self._begin(running)
        else:
            self.loans.begin(job, lambda: self._begin(running))
        return running.future

    def _work(self, job: Job) -> Work:
        """Counts of offloaded rows only what is done here: all but their attention."""
        plan, share = job.plan, min(1.0, job.share / self.compute)
        work = Work.of(job.model, job.phase, share, plan.appends, plan.starts, len(job.samples), job.rows)
        held = dict(zip(reversed(plan.sequences), plan.starts[::-1].tolist(), strict=True))
        if len(held) < len(plan.sequences):  # rows of one sequence read what it holds once
            work = replace(work, context=sum(held.values()))
        rows = len(job.offloaded.plan.sequences) if job.offloaded else 0
        return replace(work, batch=work.batch + rows, tokens=work.tokens + rows) if rows else work

    def _run_draft_steps(self, job: Job) -> list[Work]:
        """Runs the steps of the job's draft model, if it has one. Returns their work."""
        draft_steps, found = job.draft_steps, list[Work]()
        if draft_steps is None:
            return found
        samples: dict[int, list[SampleRow]] = {}
        for sample in job.samples:
            samples.setdefault(job.plan.sequences[sample.row], []).append(sample)
        for number in range(draft_steps.steps):
            step, ends = draft_steps.step(number, job.share)
            work = self._work(step)
            found.append(replace(work, drawn=len(ends)))
            after = [samples[one.sequence][number] for one in draft_steps.sequences if one.count > number]
            drafts = [self._text.draft(job.model, sample.key, sample.index) for sample in after]
            draft_steps.take(number, np.array(drafts, np.int64))
        return found

    def _begin(self, running: _Running) -> None:
        running.since = running.begun = asyncio.get_running_loop().time()
        self._catch_up(running.since)
        self._running.append(running)
        self._content.begin(running.job)
        self._changed()

    def _changed(self) -> None:
        """Tells all whom it concerns that other jobs run than before."""
        if self._cpu is not None:
            self._cpu.running([(running.work, running.job.share) for running in self._running])
        if self._cpu is None:
            self.reschedule_ends()

    def reschedule_ends(self) -> None:
        """Finds the time that each job still takes, now that other jobs run beside it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for running in self._running:
            if running.seconds:
                running.left = max(0.0, running.left - max(0.0, now - running.since) / running.seconds)
            running.since = max(now, running.since)
            beside = [other.work for other in self._running if other is not running]
            running.seconds = self._cost.seconds(running.work, beside) + self._engine_gap(running.work)
            running.seconds += sum(self._cost.seconds(work, beside) for work in running.draft_work)
            if self._cpu is not None:
                running.seconds = self._cpu.seconds(running.work, running.job.share, running.seconds)
            if self.loans is not None:
                running.seconds = self.loans.seconds(running.job, running.work, running.seconds)
                running.exchanges = self.loans.exchanges(running.job)
            self._wait(running, loop)

    def _wait(self, running: _Running, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the timer for the next layer that a peer waits for, for the next exchange, or for the end."""
        if running.timer is not None:
            running.timer.cancel()
        layer = running.layers + 1 if running.job.plan.sends else running.all_layers
        running.ends, running.paces = [self._due(running, layer / running.all_layers)], [running.seconds]
        if running.asked < running.exchanges:
            asks = self._due(running, running.asked / running.exchanges)
            if asks <= running.ends[0]:
                running.timer = loop.call_at(asks, self._exchange, running)
                return
        if self._foresees and self.loans is None and len(self._running) == 1 and not running.job.plan.sends:
            self._foresee(running)
        running.timer = loop.call_at(running.ends[-1], self._computed, running, layer)

    def _foresee(self, running: _Running) -> None:
        """Finds when the next steps end if nothing comes between. Nobody needs a timer for each."""
        work = running.work
        for _ in range(min(_FORESEEN, running.steps - running.step) - 1):
            work = work.next()
            seconds = self._cost.seconds(work) + self._engine_gap(work)
            running.ends.append(running.ends[-1] + seconds)
            running.paces.append(seconds)

    def _catch_up(self, now: float) -> None:
        """Takes the steps that have ended by now without anybody being told."""
        for running in self._running:
            steps = bisect_right(running.ends, now, hi=len(running.ends) - 1)
            for step in range(running.step, running.step + steps):
                running.tokens += self._content.draw(running.job, step)
            if steps:
                running.take(steps)

    def _due(self, running: _Running, part: float) -> float:
        """Returns the time when that part of the step is done."""
        return running.since + max(0.0, running.left - (1.0 - part)) * running.seconds

    def _exchange(self, running: _Running) -> None:
        assert self.loans is not None
        running.asked += 1
        running.since += self.loans.exchange(running.job)
        self._wait(running, asyncio.get_running_loop())

    def _computed(self, running: _Running, layer: int) -> None:
        loop = asyncio.get_running_loop()
        self._catch_up(loop.time())
        if (
            self.loans is not None
            and self._due(running, layer / running.all_layers) > loop.time() + _ROUNDING
        ):
            self._wait(running, loop)  # the job has stood still meanwhile
            return
        try:
            self._write(running, layer)
            if layer < running.all_layers:
                self._wait(running, loop)
                return
            running.tokens += self._content.draw(running.job, running.step)
        except JobFailed as error:
            self._remove(running)
            self._changed()
            running.future.set_exception(error)
            return
        running.step += 1
        if running.step < running.steps:
            running.work = running.work.next()
            running.left, running.layers = 1.0, 0
            running.since = running.begun = loop.time()
            running.seconds, running.asked = 0.0, 0
        else:
            self._remove(running)
        self._changed()
        if running.step == running.steps:
            self._land(running, self._result(running, loop.time()))

    def _remove(self, running: _Running) -> None:
        self._running.remove(running)
        if self.loans is not None:
            running.lost = self.loans.finish(running.job)

    def _land(self, running: _Running, result: JobResult) -> None:
        if self._cpu is None:
            running.future.set_result(result)
        else:
            drawn = len(running.job.samples)
            self._cpu.landed(running.work, drawn, lambda: running.future.set_result(result))

    def _write(self, running: _Running, layer: int) -> None:
        """Writes the layers up to `layer`, and sends them to peers that wait for them."""
        job = running.job
        self._content.write(job, range(running.layers, layer))
        for at in range(running.layers, layer if job.plan.sends else 0):
            for send in job.plan.sends:
                send.put(job.plan.page_map, at)
        running.layers = layer

    def _result(self, running: _Running, now: float) -> JobResult:
        prompts = [TokenLogprob(0.0) for _ in running.job.prompts]
        seconds = now - running.started
        logprobs: list[TokenLogprob | None] = [None] * len(running.tokens)
        vectors = [NO_VECTOR] * len(running.job.pairs)
        draft_seconds = sum(map(self._cost.seconds, running.draft_work))
        if draft_seconds:
            draft_seconds *= seconds / (draft_seconds + self._cost.seconds(running.work))
        return JobResult(running.tokens, logprobs, prompts, seconds, running.lost, vectors, draft_seconds)

    def halt(self) -> None:
        """Takes the device away: no job ends any more."""
        for running in self._running:
            if running.timer is not None:
                running.timer.cancel()
        self._running = []

    def steps_begun(self, job: Job) -> int:
        running = self._find(job)
        return running.step + 1 if running else job.steps

    def cut(self, job: Job) -> None:
        running = self._find(job)
        if running:
            running.steps = running.step + 1
            if running.timer is not None and len(running.ends) > 1:
                running.timer.cancel()
                running.ends, running.paces = running.ends[:1], running.paces[:1]
                loop = asyncio.get_running_loop()
                running.timer = loop.call_at(running.ends[0], self._computed, running, running.all_layers)

    def _find(self, job: Job) -> _Running | None:
        """Returns the job's state as it is now."""
        self._catch_up(asyncio.get_running_loop().time())
        return next((running for running in self._running if running.job is job), None)

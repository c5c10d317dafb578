"""The scheduler of a unit: it starts the jobs that the policy wants, and processes those that end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvloom.engine.batching import BY_DEADLINES, POLICIES
from kvloom.engine.batching.view import Mixed, Preempt, Prefill, UnitView, same_turn
from kvloom.engine.decoding.multistep import MultiStepDecode
from kvloom.engine.decoding.speculation import Speculation
from kvloom.engine.inflight import InflightBatch, OutputProcessor, Proposal, compose
from kvloom.engine.model_queue import BusyModels, ModelQueue
from kvloom.engine.quotas import QuotaTuner
from kvloom.engine.requests import Requests
from kvloom.engine.reservations import Arrivals
from kvloom.engine.sequence import Sequence
from kvloom.kv.pool import Pool
from kvloom.types.clock import Clock
from kvloom.types.job import Executor, Job, JobResult, Phase
from kvloom.types.spec import EngineSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """Tells what jobs need of the pool at one moment."""

    next_jobs: int
    """Blocks that the next jobs of all models that are awake take."""
    starving: str | None
    """The model of which a prompt has lacked blocks for too long, or stands still because it lacks them."""
    stuck: bool
    """No job is under way, and the policy starts none."""


class Scheduler:
    """Starts jobs as the batching policy says, and passes on what they have computed."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        pool: Pool,
        executor: Executor,
        requests: Requests,
        tuner: QuotaTuner,
        arrivals: Arrivals,
        spec: EngineSpec,
        clock: Clock,
        *,
        wake: Callable[[], None],
    ) -> None:
        """wake: called when a job or a step has ended, so that `process_outputs` is due."""
        self.jobs = 0
        """Jobs that have begun so far, each step of a longer one counted."""
        self._queues = queues
        self._busy = BusyModels(queues.values())
        self._pool = pool
        self._executor = executor
        self._outputs = OutputProcessor(queues, requests)
        self._tuner = tuner
        self._arrivals = arrivals
        self._spec = spec
        generates = any(queue.card.task == "generate" for queue in queues.values())
        self._chunk = spec.chunk_tokens if generates else spec.vector_tokens or spec.chunk_tokens
        self._clock = clock
        self._policy = POLICIES[spec.policy]
        self._mixes = spec.abilities.mixes
        self._by_deadlines = spec.policy in BY_DEADLINES
        self._multistep = MultiStepDecode(queues, pool, executor, self._policy)
        self._speculation = Speculation(queues, spec)
        self._wake = wake
        self._ended: deque[tuple[InflightBatch, asyncio.Future[JobResult]]] = deque()
        self._long: set[InflightBatch] = set()  # jobs of many steps that are under way
        self._steps: deque[tuple[Job, list[int]]] = deque()  # their steps that are to be processed
        self._settling: list[asyncio.Future[None]] = []  # callers that wait until these have ended
        self._idle = executor.compute
        self._last_phase = Phase.DECODE

    @property
    def is_idle(self) -> bool:
        """True while no job is under way."""
        return self._idle == self._executor.compute

    @property
    def has_ended(self) -> bool:
        """True while an ended job is to be processed."""
        return bool(self._ended)

    def cut(self) -> None:
        """Ends decode jobs of many steps after the steps that are under way, because something is to be
        decided. Other jobs go on."""
        self.jobs += self._multistep.cut()

    def sync(self) -> None:
        """Counts the steps that have begun. All jobs go on."""
        self.jobs += self._multistep.sync()

    async def settled(self) -> None:
        """Ends jobs of many steps, and waits until their sequences have all tokens."""
        self.cut()
        if self._long:
            settling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settling.append(settling)
            await settling

    def lacks(self, blocks: int) -> bool:
        """Returns whether the policy would do something else if there were `blocks` more: a sequence waits
        for them, or is about to be preempted."""
        view = self._view()
        richer = structs.replace(view, free_blocks=view.free_blocks + blocks)
        return not same_turn(self._policy(view), self._policy(richer))

    def needs(self) -> BlockNeeds:
        """Returns what jobs need of the pool now."""
        view = self._view()
        prompts = [model for model in view.models if model.wants_prefill]
        alone = min(prompts, key=lambda m: m.head, default=None) if self.is_idle else None
        first = view.urgent or alone
        return BlockNeeds(
            next_jobs=view.next_blocks,
            starving=first.name if first and first.head_blocks > view.free_blocks else None,
            stuck=self.is_idle and self._policy(view) is None,
        )

    def start_next(self, *, watched: bool = False) -> bool:
        """Does what the policy says. Returns False if nothing began: the policy says nothing, what it says
        needs a running job's end first, or the decode step waits for a sequence that is about to arrive.

        watched: the unit's lender decides anew after each step, so a decode job has one step.
        """
        view = self._view()
        action = self._policy(view)
        if action is None:
            return False
        queue = self._queues[action.model]
        if isinstance(action, Preempt):
            return queue.preempt(self.jobs, action.reason, kept=action.kept)
        if isinstance(action, Prefill | Mixed):
            return self._start_prompts(queue, action)
        ready = queue.decodable()
        if queue.relieve(ready, self.jobs):
            return True
        if self._arrivals.waits(queue):
            return False
        own = next(model for model in view.models if model.name == action.model)
        drafts = self._speculation.drafts(queue, ready, view, view.free(own) - self._multistep.claimed)
        tried = drafts.tokens if drafts else {}
        batch = [(sequence, 1 + len(tried.get(sequence.id, ()))) for sequence in ready]
        # By deadlines a prompt may be let in because time has passed, so one step is taken, and it is asked
        # again. While a prefill runs nobody is let in anyway.
        timed = self._by_deadlines and queue.waiting and not view.prefill_runs
        single = drafts or self._settling or watched or timed
        steps = 1 if single else self._multistep.steps(view, action, batch)
        steps = self._speculation.take_steps(queue, steps)
        return self._start(queue, Phase.DECODE, action.share, batch, steps, drafts)

    def _start_prompts(self, queue: ModelQueue, action: Prefill | Mixed) -> bool:
        """Starts a prefill or a mixed job. The latter is a prefill, too, if the decode step waits for a
        sequence that is about to arrive, and a decode step if the prompts that it admits need no prefill."""
        running, tokens = len(queue.running), self._chunk
        if action.tokens is not None:
            tokens = min(tokens, action.tokens)
        ready: list[Sequence] = []
        if isinstance(action, Mixed):
            ready = [] if self._arrivals.waits(queue) else queue.decodable()
        whole = isinstance(action, Prefill) and action.whole
        chunks = queue.prefill_batch(action.blocks, tokens, self.jobs, whole=whole)
        phase = Phase.PREFILL if not ready else Phase.MIXED if chunks else Phase.DECODE
        batch = [(sequence, 1) for sequence in ready] + chunks
        return self._start(queue, phase, action.share, batch) or len(queue.running) > running

    def _start(
        self,
        queue: ModelQueue,
        phase: Phase,
        share: int,
        batch: list[tuple[Sequence, int]],
        steps: int = 1,
        drafts: Proposal | None = None,
    ) -> bool:
        if not batch:
            return False
        self._outputs.begin(batch)
        on_step = self._on_step if steps > 1 and self._executor.lookahead else None
        inflight = compose(queue, phase, share, batch, steps, on_step, drafts)
        self.jobs += 1
        self._idle -= share
        self._last_phase = phase
        queue.stats.started(phase, self.jobs)
        self.jobs += self._multistep.started(inflight)
        if steps > 1:
            self._long.add(inflight)
        self._executor.launch(inflight.job).add_done_callback(lambda future: self._on_end(inflight, future))
        return True

    def _on_step(self, job: Job, tokens: list[int]) -> None:
        self._steps.append((job, tokens))
        self._wake()

    def _on_end(self, inflight: InflightBatch, future: asyncio.Future[JobResult]) -> None:
        self._ended.append((inflight, future))
        self._wake()

    def process_outputs(self) -> None:
        """Passes the tokens of ended steps and jobs on to their sequences and streams."""
        while self._steps:
            job, tokens = self._steps.popleft()
            inflight = next(inflight for inflight in self._long if inflight.job is job)
            if self._outputs.process_step(inflight, tokens):
                self.cut()
        while self._ended:
            inflight, future = self._ended.popleft()
            queue = self._queues[inflight.job.model]
            self._idle += inflight.job.share
            self._long.discard(inflight)
            error = future.exception()
            steps = 1
            if error is None:
                result, running = future.result(), len(queue.running)
                steps = inflight.steps(result)
                self.jobs += self._multistep.ended(inflight, steps)
                computed = inflight.tokens
                tried, (inflight, result, counted) = inflight, inflight.accepted_only(result)
                self._speculation.note_verified(tried, counted, result)
                void, gone = queue.planner.finish(inflight.job, result.lost, counted)
                if void:
                    whole = inflight
                    inflight, result = inflight.without(void, result)
                    self._outputs.lose(whole, inflight, gone, self.jobs)
                prompt, phase = inflight.prompt_tokens, inflight.job.phase
                queue.deadlines.times.note(inflight.job.phase, computed, result.seconds / steps)
                if phase is Phase.DECODE:  # a mixed job's time is neither a step's nor a prefill's
                    queue.step_time.note(result.seconds / steps)
                elif phase is Phase.PREFILL:
                    queue.prefill_speed.note(prompt, result.seconds)
                queue.served(inflight.drawers, steps)
                queue.stats.finished(inflight.job, prompt, inflight.drawn(result), steps, self.jobs)
                self._outputs.process(inflight, result, self.jobs)
                if len(queue.running) < running or prompt:
                    self.cut()
            else:
                self._multistep.failed(inflight)
                self._speculation.failed(inflight)
                gone = queue.planner.fail(inflight.job)
                queue.stats.failed(inflight.job)
                failed = {sequence.id for sequence, _ in inflight.batch}
                for sequence in gone:
                    if sequence.id not in failed:
                        queue.put_back(sequence, self.jobs, "its K and V were lost with a job that failed")
                _log.error("a %s job of %s failed", inflight.job.phase, inflight.job.model, exc_info=error)
                self._outputs.fail(inflight, error, self.jobs)
                self.cut()
            self._tuner.observe(steps)
        self._settle()

    def _settle(self) -> None:
        if not self._long:
            settling, self._settling = self._settling, []
            for future in settling:
                if not future.done():
                    future.set_result(None)

    def _view(self) -> UnitView:
        now = self._clock.now()
        if self._by_deadlines:
            for queue in self._queues.values():
                queue.put_late_behind(now)
        return UnitView(
            models=self._busy.views(),
            served=len(self._queues),
            compute=self._executor.compute,
            idle=self._idle,
            free_blocks=self._pool.available,
            total_blocks=self._pool.total,
            last_was_prefill=self._last_phase is not Phase.DECODE,
            jobs=self.jobs,
            overload=round(self._spec.overload * self._executor.compute),
            walls=self._spec.quotas == "fixed",
            mixes=self._mixes,
            now=now,
        )

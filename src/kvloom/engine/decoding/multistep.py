"""Multi-step decode: jobs of many steps, while there is nothing to decide between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from kvloom.engine.batching import Policy
from kvloom.engine.batching.view import Decode, UnitView
from kvloom.engine.inflight import InflightBatch
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence
from kvloom.kv.pool import Pool
from kvloom.types.job import Executor, Phase


@dataclass(slots=True, eq=False)
class _LongBatch:
    """A decode job of many steps."""

    inflight: InflightBatch
    room: int
    """Blocks that all its steps may take."""
    steps: int = 1
    """Steps that are known to have begun."""


class MultiStepDecode:
    """Decides how many steps a decode job takes, and ends running ones early.

    Several steps may be one job as long as the policy would decode the same batch again after each: no
    sequence ends, no admissible request waits (if the unit has several models, none at all), and every other
    model is idle or running. A caller that comes meanwhile cuts them short, and finds the unit as if they had
    been many jobs.

    If the executor has lookahead, two more cases are cut short when they end: a token may end a sequence, and
    requests of any model may wait while a prefill runs, if the policy would decode again.
    """

    def __init__(
        self, queues: Mapping[str, ModelQueue], pool: Pool, executor: Executor, policy: Policy
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._executor = executor
        self._policy = policy
        self._running: list[_LongBatch] = []
        self._ending: list[_LongBatch] = []  # cut short

    @property
    def claimed(self) -> int:
        """Blocks that running jobs of many steps may take."""
        return sum(long.room for long in self._running)

    def steps(self, view: UnitView, action: Decode, batch: list[tuple[Sequence, int]]) -> int:
        """Returns the number of steps of the decode job that the policy wants for `view`."""
        most, queue = self._executor.max_steps, self._queues[action.model]
        if most == 1 or not batch or not queue.planner.multi_step or not self._takes_all(queue, len(batch)):
            return 1
        others = [self._queues[model.name] for model in view.models if model.name != action.model]
        if not all(map(self._settled, others)):
            return 1
        if any(one.waiting for one in (queue, *others)) and not self._goes_on(view, action):
            return 1
        if queue.cache.shares_a_tail([sequence.id for sequence, _ in batch]):
            return 1  # the page that is copied is held until this job has ended
        limit = queue.card.context_length
        step_by_step = self._executor.lookahead > 0
        steps = min(most, *(sequence.max_steps(limit, step_by_step=step_by_step) for sequence, _ in batch))
        steps = min(steps, max(sequence.remaining for sequence, _ in batch))
        room = queue.cache.blocks_for_each([sequence.id for sequence, _ in batch], steps)
        own = next(model for model in view.models if model.name == action.model)
        # With lookahead all blocks are taken now, and must be the model's to take; else step by step.
        free = view.free(own) if step_by_step else self._pool.available
        return steps if room + self.claimed <= free else 1

    def _takes_all(self, queue: ModelQueue, count: int) -> bool:
        """Returns whether a decode job of `count` sequences takes all the sequences that it could. A job of
        many steps ends some time after a prefill that runs beside it, which only an executor with lookahead
        allows: it has little time between steps."""
        if not self._executor.lookahead:
            return count == len(queue.running)
        return count == sum(not sequence.in_job for sequence in queue.running)

    def _settled(self, queue: ModelQueue) -> bool:
        """Returns whether nothing of the model runs, or its jobs take all its sequences that do."""
        if queue.stats.active[Phase.PREFILL] and not self._executor.lookahead:
            return False
        return all(sequence.in_job for sequence in queue.running)

    def _goes_on(self, view: UnitView, action: Decode) -> bool:
        """Returns whether the policy would decode again while requests wait. With one model it would: a
        request that does not fit now fits less and less. With several models it would for as long as a
        prefill runs."""
        if view.served > 1 and not (view.prefill_runs and self._executor.lookahead):
            return False
        jobs = view.jobs + 1
        models = tuple(
            structs.replace(model, last_decode=jobs) if model.name == action.model else model
            for model in view.models
        )
        return self._policy(structs.replace(view, models=models, last_was_prefill=False, jobs=jobs)) == action

    def started(self, inflight: InflightBatch) -> int:
        """Notes that a job begins. If it has a single step, running jobs are cut short. Returns what `cut`
        does."""
        if inflight.job.steps == 1:
            return self.cut()
        cache = self._queues[inflight.job.model].cache
        room = cache.blocks_for_each([sequence.id for sequence, _ in inflight.batch], inflight.job.steps)
        self._running.append(_LongBatch(inflight, room))
        return 0

    def ended(self, inflight: InflightBatch, steps: int) -> int:
        """Notes that a job has ended after `steps` steps. Returns the number of steps, of all jobs, that have
        begun since the last such answer."""
        ended = [long for long in (*self._running, *self._ending) if long.inflight is inflight]
        self.failed(inflight)
        return sum(self._reach(long, steps) for long in ended) + self.sync()

    def failed(self, inflight: InflightBatch) -> None:
        """Notes that a job has failed, as if it had taken no step."""
        self._running = [long for long in self._running if long.inflight is not inflight]
        self._ending = [long for long in self._ending if long.inflight is not inflight]

    def cut(self) -> int:
        """Ends jobs of many steps after the steps that are under way. Returns what `ended` does."""
        for long in self._running:
            self._executor.cut(long.inflight.job)
        more = self.sync()
        for long in self._running:
            job = long.inflight.job
            self._queues[job.model].cache.shorten_forward(job.plan)
        self._ending += self._running
        self._running = []
        return more

    def sync(self) -> int:
        """Takes the blocks for the steps that have begun. Returns what `ended` does."""
        return sum(self._reach(long, self._executor.steps_begun(long.inflight.job)) for long in self._running)

    def _reach(self, long: _LongBatch, steps: int) -> int:
        more, long.steps = steps - long.steps, steps
        if more:
            job = long.inflight.job
            self._queues[job.model].cache.extend_forward(job.plan, steps)
        return more

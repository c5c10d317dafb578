"""Decode jobs of many steps, for as long as nothing can have to be decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvloom.engine.batching import Policy
from kvloom.engine.batching.view import Decode, UnitView
from kvloom.engine.inflight import Flight
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence
from kvloom.kv.pool import Pool
from kvloom.types.job import Executor, Phase


@dataclass(slots=True, eq=False)
class _Stride:
    """room: blocks that all its steps may take. steps: that have begun, as far as is known."""

    flight: Flight
    room: int
    steps: int = 1


class Strides:
    """What a policy would answer after a step is what it answered before it, while each model that could
    decode does so, no sequence ends, and nobody waits, or, where the unit has one model, nobody who could be
    let in. So such steps may be one job, if the executor can take several in one. Who calls meanwhile cuts
    them short, and finds the unit as if they had been many jobs. Where the executor is ahead of the tokens
    that it tells, one of them may end a sequence, which cuts them short as well.
    """

    def __init__(
        self, queues: Mapping[str, ModelQueue], pool: Pool, executor: Executor, policy: Policy
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._executor = executor
        self._policy = policy
        self._running: list[_Stride] = []
        self._ending: list[_Stride] = []  # cut short

    def steps(self, view: UnitView, action: Decode, batch: list[tuple[Sequence, int]]) -> int:
        """For the decode job that the policy wants, having seen `view`."""
        most, queue = self._executor.stride, self._queues[action.model]
        if most == 1 or not batch or not queue.planner.multi_step or not self._takes_all(queue, len(batch)):
            return 1
        if not all(self._settled(other) for other in self._queues.values() if other is not queue):
            return 1
        if queue.waiting and not self._goes_on(view, action):
            return 1
        if queue.cache.shares_a_tail([sequence.id for sequence, _ in batch]):
            return 1  # the page that is copied is held until this job has ended
        limit = queue.card.context_length
        told = self._executor.ahead > 0
        steps = min(most, *(sequence.strides(limit, told=told) for sequence, _ in batch))
        steps = min(steps, max(sequence.remaining for sequence, _ in batch))
        room = queue.cache.blocks_for_each([sequence.id for sequence, _ in batch], steps)
        claimed = sum(stride.room for stride in self._running)
        own = next(model for model in view.models if model.name == action.model)
        free = view.free(own) if told else self._pool.available  # where all are taken now, not step by step
        return steps if room + claimed <= free else 1

    def _takes_all(self, queue: ModelQueue, count: int) -> bool:
        """Whether a decode job of so many sequences takes all that it could. Beside a prefill that runs one
        of many steps ends some time after it, which is for an executor that has little time between steps."""
        if not self._executor.ahead:
            return count == len(queue.running)
        return count == sum(not sequence.in_job for sequence in queue.running)

    def _settled(self, queue: ModelQueue) -> bool:
        """It has nothing to do, or its jobs run and take all it has."""
        if queue.waiting or (queue.tally.active[Phase.PREFILL] and not self._executor.ahead):
            return False
        return all(sequence.in_job for sequence in queue.running)

    def _goes_on(self, view: UnitView, action: Decode) -> bool:
        """Whether the policy would decode again. With one model, who does not fit now fits less and less."""
        if len(view.models) > 1:
            return False
        jobs = view.jobs + 1
        model = replace(view.models[0], last_decode=jobs, waited=view.models[0].waited + 1)
        return self._policy(replace(view, models=(model,), last_was_prefill=False, jobs=jobs)) == action

    def took_off(self, flight: Flight) -> int:
        """A job begins; where it is a single step, so are those that follow. Returns what `cut` does."""
        if flight.job.steps == 1:
            return self.cut()
        cache = self._queues[flight.job.model].cache
        room = cache.blocks_for_each([sequence.id for sequence, _ in flight.batch], flight.job.steps)
        self._running.append(_Stride(flight, room))
        return 0

    def landed(self, flight: Flight, steps: int) -> int:
        """It has taken so many steps. Returns how many have begun anywhere, since this was last told."""
        ended = [stride for stride in (*self._running, *self._ending) if stride.flight is flight]
        self.failed(flight)
        return sum(self._reach(stride, steps) for stride in ended) + self.sync()

    def failed(self, flight: Flight) -> None:
        """It is over, and has taken no step."""
        self._running = [stride for stride in self._running if stride.flight is not flight]
        self._ending = [stride for stride in self._ending if stride.flight is not flight]

    def cut(self) -> int:
        """Something has happened: whatever runs ends with the steps that are under way. Returns what `landed`
        does."""
        for stride in self._running:
            self._executor.cut(stride.flight.job)
        more = self.sync()
        for stride in self._running:
            job = stride.flight.job
            self._queues[job.model].cache.shorten_forward(job.plan)
        self._ending += self._running
        self._running = []
        return more

    def sync(self) -> int:
        """Take the blocks for the steps that have begun. Returns what `landed` does."""
        return sum(self._reach(stride, self._executor.taken(stride.flight.job)) for stride in self._running)

    def _reach(self, stride: _Stride, steps: int) -> int:
        more, stride.steps = steps - stride.steps, steps
        if more:
            job = stride.flight.job
            self._queues[job.model].cache.extend_forward(job.plan, steps)
        return more

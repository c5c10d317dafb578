"""The queue of one model: the sequences that wait and run, and the blocks that its next job of each kind
would take."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from msgspec import structs

from kvloom.engine.batching.deadlines import Deadlines
from kvloom.engine.batching.fair_queue import INPUT_COST, OUTPUT_COST, FairQueue
from kvloom.engine.batching.job_times import ArrivalRate, PrefillSpeed, StepTime
from kvloom.engine.batching.view import ModelView
from kvloom.engine.sequence import Sequence, Status, StreamId
from kvloom.journal.records import Preempted, Recorder, nobody
from kvloom.kv.cache import ModelCache
from kvloom.offload.planner import DecodePlanner
from kvloom.types.address import KVForm
from kvloom.types.clock import Clock, WallClock
from kvloom.types.job import Job, Phase
from kvloom.types.request import ModelCard
from kvloom.types.spec import Slo


class ModelStats:
    """Counts one model's tokens, preemptions, jobs and the like since the start. A mixed job counts as one
    prefill and one decode job."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """changed: called when `active` or `last` has changed."""
        self._changed = changed
        self.jobs: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.active: dict[Phase, int] = dict.fromkeys(Phase, 0)  # jobs that run now
        self.last: dict[Phase, int] = dict.fromkeys(Phase, 0)  # the unit's count when a job began or ended
        self.mixed = 0  # jobs of both phases
        self.prompt_tokens = self.cached_tokens = self.received_tokens = 0
        self.restored_tokens = 0  # whose K and V came back from a store
        self.output_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.preemptions = 0
        self.ended = 0  # sequences
        self.displaced = 0  # requests that gave their place in a full queue to another
        self.unread = 0  # times that a sequence stood still because nobody read its stream
        self.unread_blocks = 0  # blocks that those gave back

    def started(self, phase: Phase, jobs: int) -> None:
        """Counts a job that has started. jobs: how many the unit has started, with this one."""
        self._changed()
        for part in phase.parts:
            self.jobs[part] += 1
            self.active[part] += 1
            self.last[part] = jobs
        self.mixed += phase is Phase.MIXED

    def finished(self, job: Job, prompt: int, drawn: int, steps: int, jobs: int) -> None:
        """Counts a job that has ended well, with the tokens of prompts that it computed and those that it
        drew; each of its steps counts as a job. jobs: how many the unit has started."""
        self._changed()
        for part in job.phase.parts:
            self.active[part] -= 1
            self.jobs[part] += steps - 1
            self.last[part] = jobs
        self.output_tokens += drawn
        self.prompt_tokens += prompt

    def failed(self, job: Job) -> None:
        """Forgets a job that has failed."""
        self._changed()
        for part in job.phase.parts:
            self.active[part] -= 1


_ORDER = attrgetter("order")
FEW: Final = 2  # sequences that a tenant may go on running, whoever else waits


class ModelQueue:
    """The sequences of one model that wait or run."""

    def __init__(
        self,
        card: ModelCard,
        cache: ModelCache,
        max_running: int,
        max_waiting: int,
        shares: tuple[int, int] = (0, 0),
        slo: Slo = Slo(),  # noqa: B008  (frozen)
        clock: Clock | None = None,
        rate: float = 0.0,
        record: Recorder = nobody,
    ) -> None:
        """shares: of a prefill and of a decode job, in units of compute; 0 if the policy is to say. rate:
        requests a second, as planned; record: takes preemptions to the journal."""
        self._clock = clock = clock or WallClock()
        self.form = KVForm.of(cache.geometry, card.kv_dtype or card.dtype)
        self._record = record
        self.card = structs.replace(card, form=self.form)
        self.watchers: list[set[ModelQueue]] = []
        """Sets that the queue joins when something has changed that a policy sees."""
        cache.pages.on_change = self.changed
        self.cache = cache
        self.quota = 0  # set by the tuner
        self.awake = True
        """Its weights are in memory, so that jobs may run."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.shares = shares
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []  # all that have blocks, in the order of admission
        self._run_of: Counter[str] = Counter()  # how many of them are a tenant's
        self.planner: DecodePlanner[Sequence] = DecodePlanner(cache)
        """Plans which sequences a decode step takes, and where; a borrower's offloads some of them."""
        self.stats = ModelStats(self.changed)
        self.step_time = StepTime()
        self.prefill_speed = PrefillSpeed()
        self.deadlines = Deadlines(slo, clock)
        self.arrivals = ArrivalRate(clock, rate)

    def changed(self) -> None:
        """Tells the watchers that something has changed."""
        for watcher in self.watchers:
            watcher.add(self)

    def wake(self) -> None:
        """Lets jobs run."""
        self.awake = True
        self.changed()

    def sleep(self) -> None:
        """Lets no job begin. Sequences that run keep their K and V."""
        self.awake = False
        self.changed()

    @property
    def is_busy(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def in_job(self) -> bool:
        """True while a job of the model is under way."""
        return any(self.stats.active.values())

    @property
    def last_job(self) -> int:
        """The unit's count of jobs when one of the model last began or ended."""
        return max(self.stats.last.values())

    @property
    def priority(self) -> int:
        """The priority of the most urgent sequence; 0 if there is none."""
        first = self.waiting.first
        orders = [s.order for s in self.running] + ([first.order] if first else [])
        return min(orders, default=_NOBODY)[0]

    def begin_by(self, now: float) -> float:
        """Returns the earliest time by which a job of the model must begin so that no sequence misses an
        objective that it can still meet: the next one, or one that runs. It is -inf if there is none."""
        first = self.waiting.first
        times = map(self.deadlines.begin_by, [*self.running, *([first] if first else [])])
        return min((time for time in times if time >= now), default=-math.inf)

    def has_any_of(self, model: str) -> bool:
        """Returns whether sequences of a model, or of an adapter, wait or run here."""
        return any(one.model == model for some in (self.waiting, self.running) for one in some)

    def requests(self) -> set[StreamId]:
        """Returns the requests of all sequences that wait or run."""
        return {sequence.request for some in (self.waiting, self.running) for sequence in some}

    @property
    def waiting_full(self) -> bool:
        """Whether no more may wait."""
        return len(self.waiting) >= self.max_waiting

    @property
    def oldest_wait(self) -> float:
        """The seconds for which the sequence that waits longest has waited; 0 if none does."""
        now = self._clock.now()
        return max((now - sequence.queued_at for sequence in self.waiting), default=0.0)

    @property
    def blocks_of_longest(self) -> int:
        """Blocks that hold all tokens of the longest sequence which waits or runs."""
        tokens = max((s.tokens.length for some in (self.waiting, self.running) for s in some), default=0)
        return self.cache.geometry.blocks(tokens)

    def enqueue(self, sequence: Sequence, jobs: int) -> None:
        """Lets a sequence wait. jobs: how many the unit has started."""
        self.changed()
        sequence.waiting_since, sequence.queued_at = jobs, self._clock.now()
        if sequence.came is None:
            self.arrivals.note()
        for one in (sequence, *sequence.siblings):
            self.deadlines.came(one)
        self.waiting.add(sequence)

    def put_late_behind(self, now: float) -> None:
        """Lets waiting sequences that cannot be in time any more go after those that can."""
        if self.waiting and self.waiting.put_behind(lambda one: self._is_late(one, now)):
            self.changed()

    def _is_late(self, sequence: Sequence, now: float) -> bool:
        """Returns whether a waiting sequence cannot be in time any more. Its cached tokens are looked up only
        if they matter."""
        if not self.deadlines.is_late(sequence, now):
            return False
        tokens, most = sequence.tokens.list(), sequence.cacheable
        found = self.cache.prefixes.length(tokens, most, sequence.salt)
        if found > sequence.found:
            sequence.found = found
            self.changed()
        return self.deadlines.is_late(sequence, now)

    def admit(self, sequence: Sequence) -> None:
        """Moves a waiting sequence to the running ones, with what is cached of its tokens. A sequence that
        sends takes whole pages: it would have to keep a page of which it has sent a part, beside its copy.
        Its tenant is charged for the tokens that are to be computed, unless it ran here before."""
        self.changed()
        self.waiting.went(sequence)
        new, whole = sequence.cached is None, sequence.transfer is not None
        tokens, most = sequence.tokens.list(), sequence.cacheable
        found = self.cache.adopt(sequence.id, tokens, most, salt=sequence.salt, whole_pages=whole)
        sequence.adopted(found)
        if new:
            self.waiting.charge(sequence, INPUT_COST * sequence.pending)
        sequence.become(Status.RUNNING)
        self.run(sequence)
        self.stats.cached_tokens += sequence.hits
        if sequence.transfer:
            self.cache.sends.begin(sequence.id, sequence.transfer, sequence.computed)

    def release(self, sequence: Sequence, status: Status) -> None:
        """Takes a sequence out of the queue. Its blocks stay cached while nobody needs them."""
        self.changed()
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._run_of[sequence.tenant] -= 1
            if not self._run_of[sequence.tenant]:
                del self._run_of[sequence.tenant]
            if sequence.transfer:
                self.cache.sends.leave(sequence.id, sequence.transfer)
            self.planner.release(sequence)
            sequence.computed = 0
        else:
            self.waiting.discard(sequence)  # a sibling that has not forked does not wait here
        self.stats.ended += status is Status.ENDED
        sequence.become(status)

    def stand_still(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue until its stream is read."""
        held = self.cache.used_blocks
        self.release(sequence, Status.UNREAD)
        self.stats.unread += 1
        self.stats.unread_blocks += held - self.cache.used_blocks

    def served(self, sequences: Iterable[Sequence], tokens: int) -> None:
        """Charges the sequences' tenants for so many tokens of each that were made, and notes when."""
        for sequence in sequences:
            self.waiting.charge(sequence, OUTPUT_COST * tokens)
            self.deadlines.drawn(sequence)

    def fork(self, parent: Sequence, child: Sequence, jobs: int) -> None:
        """Lets `child` go on from the parent's tokens, in shared pages; later if no more sequences may run
        now."""
        if len(self.running) >= self.max_running:
            self.enqueue(child, jobs)
            return
        self.changed()
        self.cache.fork_sequence(parent.id, child.id)
        child.computed = parent.computed
        child.become(Status.RUNNING)
        self.run(child)

    def run(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self._run_of[sequence.tenant] += 1

    def preempt(self, jobs: int, reason: str, *, kept: bool = True) -> bool:
        """Takes the blocks of one sequence, which stay cached if `kept`. It waits again and is computed again
        later, unless it can move to a loan and others give way instead. Returns False if all are in jobs."""
        victim = self.victim()
        for sequence in [] if victim is None else self.planner.givers(victim):
            self.put_back(sequence, jobs, reason)
            if not kept:
                self.cache.prefixes.evict(sequence.tokens.list(), sequence.salt)
        return victim is not None

    def put_back(self, sequence: Sequence, jobs: int, reason: str) -> None:
        """Lets a running sequence wait again, without K and V. reason: for the journal."""
        self.stats.preemptions += 1
        self._record(Preempted(model=sequence.model, request=str(sequence.request), reason=reason))
        sequence.preempted_at = jobs
        self.release(sequence, Status.WAITING)
        sequence.waiting_since, sequence.queued_at = jobs, self._clock.now()
        self.waiting.put_back(sequence)

    def relieve(self, ready: list[Sequence], jobs: int) -> bool:
        """Preempts one sequence if some of `ready` find no room for their next token: the last of those, or
        the last of all running ones if its priority is lower. Returns False if all find room."""
        crowded = self.planner.crowded(ready)
        if crowded:
            last, victim = crowded[-1], max((s for s in self.running if not s.in_job), key=_ORDER)
            giver = victim if victim.order[0] > last.order[0] else last
            self.put_back(
                giver, jobs, f"the lender has no room for the next token of {len(crowded)} sequences"
            )
        return bool(crowded)

    def decodable(self) -> list[Sequence]:
        """Returns the sequences of the next decode step."""
        return self.planner.ready([s for s in self.running if not s.in_job and s.decodes])

    @property
    def decoding(self) -> bool:
        """A decode job of the model is under way."""
        return self.stats.active[Phase.DECODE] > 0

    def victim(self) -> Sequence | None:
        """Returns the sequence that is preempted next: of those with the lowest priority, and of these of the
        tenant with most running sequences, the latest. A sequence in a job, or without blocks of this unit,
        is never preempted."""
        held = (s for s in self.running if not s.in_job and self.planner.is_home(s))
        return max(held, key=lambda s: (s.order[0], self._run_of[s.tenant], s.order), default=None)

    def outnumbered(self, sequence: Sequence) -> bool:
        """Returns whether the next victim is to give way to the sequence: only if nothing else of the
        sequence's tenant runs, and the victim is less urgent, or its tenant runs more than `FEW` sequences
        and has been served at least as much."""
        others = self._run_of[sequence.tenant] - (sequence.status is Status.RUNNING)
        victim = None if others or len(self.running) <= FEW else self.victim()
        if victim is None or victim.order[0] != sequence.order[0]:
            return victim is not None and victim.order[0] > sequence.order[0]
        return self._run_of[victim.tenant] > FEW and self.waiting.has_had_less(sequence, victim)

    def blocks(self, sequences: Iterable[Sequence], *, to_end: bool = False) -> int:
        """Returns the blocks that the sequences' next token, or all they have pending, would take."""
        cache = self.cache
        return sum(cache.blocks_for(s.id, s.pending if to_end else 1) for s in sequences)

    @property
    def page_blocks(self) -> int:
        """The blocks that a sequence may need at a step to grow."""
        return self.cache.geometry.blocks_per_page

    @property
    def next_in(self) -> Sequence | None:
        """The waiting sequence that is admitted next; None if none waits, or no more may run."""
        return self.waiting.first if len(self.running) < self.max_running else None

    def prefill_batch(
        self, budget: int, tokens: int, jobs: int, *, whole: bool = False
    ) -> list[tuple[Sequence, int]]:
        """Returns the sequences for one prefill job, each with the tokens that it takes: begun ones first,
        then admissions, while `budget` blocks and `tokens` tokens last; if `whole`, none in parts.

        It admits the sequences that it takes, and those that need no prefill. A sequence that needs none is
        not admitted twice while no job starts, or it could be admitted and preempted for ever. jobs: how many
        the unit has started."""
        batch: list[tuple[Sequence, int]] = []
        begun = deque(s for s in self.running if not s.in_job and not s.decodes)
        while tokens > 0 and (sequence := begun.popleft() if begun else self.next_in):
            need = self.blocks([sequence], to_end=True)
            if need > budget or (whole and batch and sequence.pending > tokens):
                break
            if sequence.status is Status.WAITING:
                self.admit(sequence)
            budget -= need
            if sequence.decodes and sequence.preempted_at != jobs:  # the next decode step takes it along
                continue
            count = sequence.pending if whole else min(tokens, sequence.pending)
            batch.append((sequence, count))
            tokens -= count
        return batch


_NOBODY: Final = (0, 0, 0)


class BusyModels:
    """The views of the models with requests that wait or run. A view is made anew only if something has
    changed: policies are asked several times a job, and there may be hundreds of sequences and models."""

    def __init__(self, queues: Iterable[ModelQueue]) -> None:
        self.places = {queue: i for i, queue in enumerate(queues)}
        """The places of all models, as the unit's configuration has them."""
        self._changed = set(self.places)
        self._views: dict[ModelQueue, ModelView] = {}
        for queue in self.places:
            queue.watchers.append(self._changed)

    def views(self) -> tuple[ModelView, ...]:
        """Returns the views, in the order of the places."""
        for queue in self._changed:
            if not queue.is_busy:
                self._views.pop(queue, None)
            elif queue in self._views:
                self._views[queue] = model_view(queue)
            else:
                self._views[queue] = model_view(queue)
                self._views = dict(sorted(self._views.items(), key=lambda item: self.places[item[0]]))
        self._changed.clear()
        return tuple(self._views.values())


def model_view(queue: ModelQueue) -> ModelView:
    """Returns what policies see of the model."""
    idle = [s for s in queue.running if not s.in_job]
    here = [s for s in idle if queue.planner.is_home(s)]
    ready = queue.decodable()
    deadlines, hopeful = queue.deadlines, [s for s in ready if not s.missed]
    begun = [s for s in idle if not s.decodes]
    head = begun[0] if begun else queue.waiting.first
    outnumbered = head is not None and queue.outnumbered(head)
    full = len(queue.running) >= queue.max_running
    if full and not begun:
        head = None
    stats = queue.stats
    return ModelView(
        name=queue.card.name,
        waiting=0 if full else len(queue.waiting),
        partial=len(begun),
        head_blocks=queue.blocks([head], to_end=True) if head else 0,
        head=head.order if head else _NOBODY,
        head_since=head.waiting_since if head else 0,
        outnumbered=outnumbered,
        running_full=full,
        decodable=len(ready),
        decode_blocks=queue.cache.blocks_for_each(queue.planner.takers(ready), 1),
        held=len(here),
        victim=max(map(_ORDER, here), default=_NOBODY),
        running=len(queue.running),
        prefilling=stats.active[Phase.PREFILL] > 0,
        decoding=queue.decoding,
        used=queue.cache.used_blocks,
        quota=queue.quota,
        page_blocks=queue.page_blocks,
        last_prefill=stats.last[Phase.PREFILL],
        last_decode=stats.last[Phase.DECODE],
        prefill_share=queue.shares[0],
        decode_share=queue.shares[1],
        mixes=queue.planner.mixes,
        awake=queue.awake,
        head_latest=deadlines.latest(head) if head else math.inf,
        head_tokens=deadlines.left(head) if head else 0,
        step_due=min(map(deadlines.step_due, hopeful), default=math.inf),
        step_order=min(map(_ORDER, ready), default=_NOBODY),
        step_seconds=deadlines.times.step(len(ready)),
        token_seconds=deadlines.times.token,
        tpot=deadlines.slo.tpot,
    )

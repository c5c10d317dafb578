"""One model's sequences in the engine: who waits, who runs, and what the next job of each kind would take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import Final

from msgspec import structs

from kvloom.engine.batching.view import ModelView
from kvloom.engine.sequence import Sequence, Status
from kvloom.engine.woven import Woven
from kvloom.kv.cache import ModelCache
from kvloom.types.job import Job, Phase
from kvloom.types.request import ModelCard
from kvloom.types.transfer import KVForm

WINDOW: Final = 16  # steps


class Pace:
    """The running median, which one slow step does not move."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def note(self, seconds: float) -> None:
        """Of one more step."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """Of a step; 0 where there was none yet."""
        return median(self._last) if self._last else 0.0

    @property
    def least(self) -> float:
        """Of the next step, as far as is known: no more than of the last one, which may have been of fewer
        sequences. 0 before there were `WINDOW`: first ones take longer."""
        return min(self.seconds, self._last[-1]) if len(self._last) == WINDOW else 0.0


class Tally:
    """Tokens, preemptions and jobs since the start. active: jobs that run now. last: the unit's count when a
    job last began or ended. changes: how often one of these two has changed."""

    def __init__(self) -> None:
        self.jobs: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.active: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.last: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.received_tokens = 0
        self.output_tokens = 0
        self.away_tokens = 0
        self.preemptions = 0
        self.changes = 0

    def started(self, phase: Phase, now: int) -> None:
        """A job has started, the unit's `now`-th."""
        self.changes += 1
        self.jobs[phase] += 1
        self.active[phase] += 1
        self.last[phase] = now

    def finished(self, job: Job, drawn: int, steps: int, now: int) -> None:
        """A job has ended well: it drew `drawn` tokens in `steps` steps, each as good as a job. now: jobs
        that the unit has started."""
        self.changes += 1
        self.active[job.phase] -= 1
        self.jobs[job.phase] += steps - 1
        self.last[job.phase] = now
        self.output_tokens += drawn
        if job.phase is Phase.PREFILL:
            self.prompt_tokens += job.tokens.size

    def failed(self, job: Job) -> None:
        """A job has ended as if it had never been."""
        self.changes += 1
        self.active[job.phase] -= 1


_ORDER = attrgetter("order")


class ModelQueue:
    """waiting is sorted by order; running holds every sequence with blocks, in order of admission. shares:
    of a prefill and of a decode job, in units of compute; 0 where the policy is to say."""

    def __init__(
        self,
        card: ModelCard,
        cache: ModelCache,
        max_running: int,
        max_waiting: int,
        shares: tuple[int, int] = (0, 0),
    ) -> None:
        self.form = KVForm.of(cache.geometry, card.dtype)
        self.card = structs.replace(card, form=self.form)
        self.cache = cache
        self.quota = 0  # set by the tuner
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.shares = shares
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.woven: Woven | None = None  # while it has a loan
        self.tally = Tally()
        self.pace = Pace()
        self.changes = 0  # of who waits and who runs

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self.max_waiting

    @property
    def longest_here(self) -> int:
        """Blocks that hold all tokens of the longest sequence which waits or runs."""
        tokens = max((s.tokens.length for some in (self.waiting, self.running) for s in some), default=0)
        return self.cache.geometry.blocks(tokens)

    def enqueue(self, sequence: Sequence, now: int) -> None:
        """now: jobs that the unit has started."""
        self.changes += 1
        sequence.waiting_since = now
        insort(self.waiting, sequence, key=_ORDER)

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence its place, and what is cached of its tokens. One that sends takes whole
        pages: it would have to keep a page that it has sent a part of and then copied, beside the copy."""
        self.changes += 1
        self.waiting.remove(sequence)
        whole = sequence.transfer is not None
        tokens, most = sequence.tokens.list(), sequence.cacheable
        sequence.adopted(self.cache.adopt(sequence.id, tokens, most, whole_pages=whole))
        sequence.become(Status.RUNNING)
        self.running.append(sequence)
        self.tally.cached_tokens += sequence.hits
        if sequence.transfer:
            self.cache.sends.begin(sequence.id, sequence.transfer, sequence.computed)

    def release(self, sequence: Sequence, status: Status) -> None:
        """Take a sequence's place and its blocks, which stay cached while nobody needs them."""
        self.changes += 1
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            if self.woven is not None:
                self.woven.remove(sequence)
            if sequence.transfer:
                self.cache.sends.leave(sequence.id, sequence.transfer)
            self.cache.keep(sequence.id, sequence.tokens.list(), tail=True)
            self.cache.remove_sequence(sequence.id)
            sequence.computed = 0
        else:
            at = bisect_left(self.waiting, sequence.order, key=_ORDER)
            if self.waiting[at : at + 1] == [
                sequence
            ]:  # a sibling that has not forked yet is in neither list
                del self.waiting[at]
        sequence.become(status)

    def fork(self, parent: Sequence, child: Sequence, now: int) -> None:
        """`child` goes on from the parent's tokens: sharing its pages, or, where no more may run, later."""
        if len(self.running) >= self.max_running:
            self.enqueue(child, now)
            return
        self.changes += 1
        self.cache.fork_sequence(parent.id, child.id)
        child.computed = parent.computed
        child.become(Status.RUNNING)
        self.running.append(child)

    def preempt(self, now: int) -> bool:
        """Send one sequence back; its tokens are computed again later. Where there is room away it goes there
        instead, or takes the place of some with a lower priority, which go back. False where all are in
        jobs."""
        victim = self.victim()
        if victim is None:
            return False
        others = self.woven.places.displaced(victim) if self.woven else None
        for sequence in [victim] if others is None else others:
            self.put_back(sequence, now)
        if self.woven and others is not None:
            self.woven.places.urge(victim)
        return True

    def put_back(self, sequence: Sequence, now: int) -> None:
        """A running sequence waits again, and has no K and V."""
        self.tally.preemptions += 1
        sequence.preempted_at = now
        self.release(sequence, Status.WAITING)
        self.enqueue(sequence, now)

    def relieve(self, now: int) -> bool:
        """Where some away have no room for their next token, neither there nor at home, send one back: the
        last of them, or the last of all that have a lower priority. False where there are none."""
        if self.woven is None:
            return False
        crowded = self.woven.crowded((s for s, _ in self.decode_batch()), self.spare)
        if crowded:
            last, victim = crowded[-1], max((s for s in self.running if not s.in_job), key=_ORDER)
            self.put_back(victim if victim.order[0] > last.order[0] else last, now)
        return bool(crowded)

    def decode_batch(self) -> list[tuple[Sequence, int]]:
        """Those of the next step. Where some go out with it to make room for others, these wait for that."""
        ready = [s for s in self.running if not s.in_job and s.decodes]
        leaving = self._leaving(ready)
        if not leaving:
            return [(s, 1) for s in ready]
        room, late = self.cache.pages.available * self.cache.geometry.blocks_per_page, set[int]()
        for sequence in sorted(ready, key=_ORDER):
            if self.is_here(sequence) and sequence not in leaving:
                need = self.blocks([sequence])
                if need <= room:
                    room -= need
                else:
                    late.add(sequence.id)
        return [(s, 1) for s in ready if s.id not in late]

    def _leaving(self, ready: list[Sequence]) -> list[Sequence]:
        """Those at home that take nothing there for their next token."""
        return self.woven.places.urged(ready) if self.woven else []

    def takers(self, ready: list[Sequence]) -> list[int]:
        """Those at home that take blocks there for their next token."""
        leaving = self._leaving(ready)
        return [s.id for s in ready if self.is_here(s) and s not in leaving]

    def victim(self) -> Sequence | None:
        """Who is preempted next: lowest priority, then latest; never one in a job, nor one that is away."""
        return max((s for s in self.running if not s.in_job and self.is_here(s)), key=_ORDER, default=None)

    def is_here(self, sequence: Sequence) -> bool:
        """Its K and V, as far as it has any, are this unit's."""
        return self.woven is None or not self.woven.has(sequence)

    @property
    def spare(self) -> int:
        """Blocks that are left once each who is here, and ready, has those for the next token."""
        here = self.takers([s for s, _ in self.decode_batch()])
        available = self.cache.pages.available * self.cache.geometry.blocks_per_page
        return available - self.cache.blocks_for_each(here, 1)

    def blocks(self, sequences: Iterable[Sequence], *, to_end: bool = False) -> int:
        """Blocks that the sequences' next token, or all they have pending, would take."""
        cache = self.cache
        return sum(cache.blocks_for(s.id, s.pending if to_end else 1) for s in sequences)

    def prefill_batch(self, budget: int, tokens: int, now: int) -> list[tuple[Sequence, int]]:
        """Sequences for one prefill job with the tokens each takes: begun ones first, then admissions, while
        `budget` blocks and `tokens` tokens last. Admits what it takes, and what needs no
        prefill; not twice while no job starts, or preempting it could go on for ever."""
        batch: list[tuple[Sequence, int]] = []
        begun = [s for s in self.running if not s.in_job and not s.decodes]
        for sequence in [*begun, *self.waiting]:
            if tokens == 0 or (sequence.status is Status.WAITING and len(self.running) >= self.max_running):
                break
            need = self.blocks([sequence], to_end=True)
            if need > budget:
                break
            if sequence.status is Status.WAITING:
                self.admit(sequence)
            budget -= need
            if sequence.decodes and sequence.preempted_at != now:  # the next decode step takes it along
                continue
            count = min(tokens, sequence.pending)
            batch.append((sequence, count))
            tokens -= count
        return batch


_NOBODY: Final = (0, 0, 0)


class View:
    """Of one model. Looked at anew only where something has changed: policies are asked several times a job,
    and there may be hundreds of sequences."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue
        self._seen: tuple[tuple[object, ...], ModelView, int | None] | None = None

    def at(self, now: int) -> ModelView:
        """now: jobs that the unit has started."""
        queue = self._queue
        places = queue.woven and queue.woven.places.mark
        mark = queue.changes, queue.tally.changes, queue.cache.changes, queue.quota, places
        if self._seen is None or self._seen[0] != mark:
            self._seen = mark, *look(queue)
        _, view, since = self._seen
        waited = 0 if since is None else now - since
        return view if waited == view.waited else replace(view, waited=waited)


def look(queue: ModelQueue) -> tuple[ModelView, int | None]:
    """The view, and since when its head has waited."""
    idle = [s for s in queue.running if not s.in_job]
    here = [s for s in idle if queue.is_here(s)]
    ready = [s for s, _ in queue.decode_batch()]
    begun = [s for s in idle if not s.decodes]
    room = len(queue.running) < queue.max_running
    head = begun[0] if begun else queue.waiting[0] if queue.waiting and room else None
    tally = queue.tally
    view = ModelView(
        name=queue.card.name,
        waiting=len(queue.waiting) if room else 0,
        partial=len(begun),
        head_blocks=queue.blocks([head], to_end=True) if head else 0,
        head=head.order if head else _NOBODY,
        decodable=len(ready),
        decode_blocks=queue.cache.blocks_for_each(queue.takers(ready), 1),
        held=len(here),
        victim=max(map(_ORDER, here), default=_NOBODY),
        running=len(queue.running),
        prefilling=tally.active[Phase.PREFILL] > 0,
        decoding=tally.active[Phase.DECODE] > 0,
        used=queue.cache.used_blocks,
        quota=queue.quota,
        page_blocks=queue.cache.geometry.blocks_per_page,
        last_prefill=tally.last[Phase.PREFILL],
        last_decode=tally.last[Phase.DECODE],
        waited=0,
        prefill_share=queue.shares[0],
        decode_share=queue.shares[1],
    )
    return view, head.waiting_since if head else None

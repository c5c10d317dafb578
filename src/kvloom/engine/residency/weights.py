"""The weights of a unit's models, which sleep and wake: the state of each, and the blocks whose memory it
has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import inf

import numpy as np

from kvloom.engine.batching import BY_DEADLINES
from kvloom.engine.batching.view import LASTING
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.quotas import QuotaTuner
from kvloom.engine.requests import Requests
from kvloom.engine.residency.adapters import AdapterResidency
from kvloom.engine.residency.policy import (
    Move,
    Residency,
    ResidencyView,
    Sleep,
    Wake,
    next_due,
    next_move,
    next_waking,
    protected,
    turn_of,
)
from kvloom.engine.scheduler import Scheduler
from kvloom.journal.records import Awake, Recorder, Slept, Woken, nobody, short
from kvloom.kv.pool import Pool
from kvloom.types.clock import Clock
from kvloom.types.geometry import I32
from kvloom.types.job import WeightMemory
from kvloom.types.load import WeightLoad
from kvloom.types.spec import EngineSpec

_log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Tells whether a model's weights are in memory, or on their way."""

    ASLEEP = "asleep"  # blocks may be kept for them already
    WAKING = "waking"  # the first part is being read; no job may run yet
    AWAKE = "awake"  # jobs may run; the rest may still be read
    LEAVING = "leaving"  # no new job; asleep as soon as none runs and nothing is being read


@dataclass(slots=True, eq=False)
class _ModelState:
    """One model's weights."""

    queue: ModelQueue
    size: int  # blocks
    phase: Phase = Phase.ASLEEP
    blocks: list[I32] = field(default_factory=list)
    """The blocks whose memory the weights have, or are about to have."""
    woken_at: float = 0.0
    """The time at which the weights were last woken."""
    wanted_since: float = 0.0
    """The time since which the weights have been wanted, if `waiting`."""
    waiting: bool = False
    """Whether the weights are wanted and not awake."""
    wakes: int = 0
    wake_seconds: float = 0.0  # of the last time; 0 if there was none
    lost: int = 0
    """Wakings of other models for which its K and V have given way since a request of it last ended."""
    yields_to: str = ""
    """The model for whose weights its K and V are giving way."""
    unreadable: bool = False
    """Whether the weights could not be read the last time."""
    ended: int = 0
    """How many requests of the model had ended at the last look."""
    heir: str | None = None
    """The model for whose weights the blocks are kept, if they are leaving."""
    reading: bool = False
    """A part of them is being read."""
    why: str = ""
    """The reason why the weights are leaving."""

    @property
    def gathered(self) -> int:
        return sum(blocks.size for blocks in self.blocks)


class WeightResidency:
    """Carries out what the policy (`policy.py`) says about which weights are in memory."""

    def __init__(
        self,
        memory: WeightMemory,
        queues: Mapping[str, ModelQueue],
        pool: Pool,
        scheduler: Scheduler,
        requests: Requests,
        tuner: QuotaTuner,
        spec: EngineSpec,
        clock: Clock,
        *,
        adapters: AdapterResidency,
        notify: Callable[[], None],
        record: Recorder = nobody,
    ) -> None:
        """adapters: the unit's adapters, one of which may lack blocks too. notify: called when a part has
        been read, so that `review` is due. record: takes wakes and sleeps to the journal."""
        self._record = record
        self._memory = memory
        self._models = {name: _ModelState(queue, memory.blocks[name]) for name, queue in queues.items()}
        self._by_deadlines = spec.policy in BY_DEADLINES
        self._pace = 0.0
        """Seconds that a block took to be read the last time; 0 if none was."""
        self._pool = pool
        self._scheduler = scheduler
        self._requests = requests
        self._tuner = tuner
        self._clock = clock
        self._adapters = adapters
        self._notify = notify
        self._due: float | None = None
        for queue in queues.values():
            queue.sleep()

    @property
    def left(self) -> float | None:
        """Seconds until `review` is due, if nothing happens before; None if it is not."""
        return None if self._due is None else max(0.0, self._due - self._clock.now())

    @property
    def is_moving(self) -> bool:
        """True while jobs may follow by themselves: weights are being read, or a turn is about to be over."""
        return self._due is not None or any(
            one.phase in (Phase.WAKING, Phase.LEAVING) for one in self._models.values()
        )

    def review(self) -> None:
        """Does what the policy says, until it says nothing more."""
        for one in self._models.values():
            self._let_leave(one)
        moves = True
        while moves:
            view = self._view()
            if self._give_up_gathered(view):
                view = self._view()
            move = next_move(view)
            moves = move is not None and self._do(move)
        self._due = next_due(view)

    def sleep_all(self) -> None:
        """Gives all blocks back, when no job runs any more."""
        for one in self._models.values():
            self._fall_asleep(one)

    def loads(self) -> dict[str, WeightLoad]:
        """Returns the report of each model's weights."""
        return {
            name: WeightLoad(
                awake=one.phase is Phase.AWAKE,
                blocks=one.gathered,
                wakes_total=one.wakes,
                wake_seconds=one.wake_seconds,
            )
            for name, one in self._models.items()
        }

    # -- moves ----------------------------------------------------------------------------------------

    def _do(self, move: Move) -> bool:
        """Carries out one move of the policy. Returns False if a running job must end first."""
        one = self._models[move.model]
        if isinstance(move, Wake):
            self._gather(one)
            self._begin_to_wake(one, move.reason)
            return True
        if isinstance(move, Sleep):
            one.phase, one.heir, one.why = Phase.LEAVING, move.heir, move.reason
            one.queue.sleep()
            self._scheduler.cut()
            self._let_leave(one)
            return True
        given = one.queue.preempt(self._scheduler.jobs, move.reason)
        if given and one.yields_to != move.heir:
            one.lost, one.yields_to = one.lost + 1, move.heir
        self._gather(self._models[move.heir])
        return given

    def _gather(self, one: _ModelState) -> None:
        """Takes as many blocks as there are for weights that are to be woken."""
        count = min(one.size - one.gathered, self._pool.available)
        if count > 0:
            one.blocks.append(self._pool.yield_to_weights(count))
            self._memory.make_room(one.blocks[-1])
            self._tuner.resize()

    def _begin_to_wake(self, one: _ModelState, reason: str) -> None:
        one.phase, one.woken_at, one.waiting = Phase.WAKING, self._clock.now(), False
        one.wakes += 1
        self._record(Woken(model=one.queue.card.name, reason=reason))
        for other in self._models.values():
            if other.yields_to == one.queue.card.name:
                other.yields_to = ""
        self._read(one)

    def _read(self, one: _ModelState) -> None:
        one.reading = True
        self._memory.wake(one.queue.card.name).add_done_callback(partial(self._on_read, one))

    def _on_read(self, one: _ModelState, future: asyncio.Future[bool]) -> None:
        one.reading = False
        if future.cancelled() or (error := future.exception()) is not None:
            self._on_unreadable(one, "cancelled" if future.cancelled() else str(error))
            return
        one.unreadable = False
        if one.phase is Phase.WAKING:
            one.phase = Phase.AWAKE
            one.queue.wake()
        if future.result():
            one.wake_seconds = self._clock.now() - one.woken_at
            self._pace = one.wake_seconds / max(1, one.size)
            self._record(Awake(model=one.queue.card.name, seconds=round(one.wake_seconds, 6)))
        elif one.phase is Phase.AWAKE:
            self._read(one)
        self._notify()

    def _on_unreadable(self, one: _ModelState, reason: str) -> None:
        """Ends the model's requests; the next one tries again. All other models serve on."""
        name = one.queue.card.name
        _log.error("the weights of %s cannot be read: %s", name, reason)
        one.queue.sleep()
        one.phase, one.unreadable = Phase.LEAVING, True
        one.why = short(f"they cannot be read: {reason}")
        for request in one.queue.requests():
            self._requests.cancel(request, "error", f"the weights of {name} cannot be read: {reason}")
        self._notify()

    def _let_leave(self, one: _ModelState) -> None:
        """Lets weights that are to leave fall asleep, if no job runs and nothing is being read."""
        if one.phase is Phase.LEAVING and not one.reading and not one.queue.in_job:
            heir, one.heir = one.heir, None
            self._fall_asleep(one)
            if heir is not None and self._models[heir].queue.is_busy:
                self._gather(self._models[heir])

    def _give_up_gathered(self, view: ResidencyView) -> bool:
        """Gives back what is kept for weights that are to be woken, but are not next any more, or while a
        model that is awake needs it more. Returns whether there was something."""
        first = None if protected(view) else next_waking(view)
        others = [
            one
            for one in self._models.values()
            if one.phase is Phase.ASLEEP and one.blocks and one.queue.card.name != first
        ]
        for one in others:
            self._fall_asleep(one)
        return bool(others)

    def _fall_asleep(self, one: _ModelState) -> None:
        if one.phase is not Phase.ASLEEP:
            self._memory.sleep(one.queue.card.name)
            self._record(Slept(model=one.queue.card.name, reason=one.why or "the unit stops"))
            one.why = ""
        one.phase = Phase.ASLEEP
        if one.blocks:
            blocks = np.concatenate(one.blocks)
            self._memory.take_back(blocks)
            self._pool.take_from_weights(blocks)
            one.blocks = []
            self._tuner.resize()

    # -- what the policy sees -------------------------------------------------------------------------

    def _view(self) -> ResidencyView:
        unwanted = sum(
            one.gathered
            for one in self._models.values()
            if one.phase is Phase.AWAKE and not one.queue.is_busy
        )
        needs, adapter = self._scheduler.needs(), self._adapters.shortage
        late = adapter.base if adapter is not None and adapter.late else None
        now = self._clock.now()
        return ResidencyView(
            models=tuple(self._residency(one, now) for one in self._models.values()),
            total=self._pool.total,
            free=self._pool.free,
            available=max(0, self._pool.available - needs.next_jobs),
            now=now,
            moving=any(one.phase in (Phase.WAKING, Phase.LEAVING) for one in self._models.values()),
            short=unwanted > 0 and (adapter is not None or self._scheduler.lacks(unwanted)),
            starving=needs.starving or late,
            stuck=needs.stuck,
        )

    def _residency(self, one: _ModelState, now: float) -> Residency:
        queue = one.queue
        wanted, awake = queue.is_busy, one.phase is Phase.AWAKE
        if wanted and not awake and not one.waiting:
            one.wanted_since, one.waiting = now, True
        one.waiting = one.waiting and wanted and not awake
        if queue.stats.ended != one.ended:
            one.ended, one.lost = queue.stats.ended, 0
        can_give = wanted and queue.victim() is not None
        lasts = len(queue.running) > 1 or self._scheduler.jobs - queue.last_job > LASTING
        kv_blocks, waking = queue.cache.used_blocks, one.wake_seconds or one.size * self._pace
        chooses = self._by_deadlines and wanted and not awake
        return Residency(
            name=queue.card.name,
            blocks=one.size,
            awake=awake,
            wanted=wanted,
            priority=queue.priority,
            since=one.woken_at if awake else one.wanted_since,
            turn=turn_of(one.wake_seconds, one.lost),
            last_job=queue.last_job,
            rate=queue.arrivals.a_second,
            gathered=0 if awake else one.gathered,
            excess=max(0, kv_blocks - queue.quota) if can_give and lasts else 0,
            held=kv_blocks if can_give else 0,
            unreadable=one.unreadable,
            begin_by=queue.begin_by(now + waking) if chooses else inf,
            waking=waking,
        )

"""The adapters of a unit: their weights take the place of blocks of the pool while they are in memory, are
read when a request of theirs comes, and give way once nobody uses them, after cached prefixes and the least
recently used first (S-LoRA, Sheng et al., MLSys 2024, section 5)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Final

from msgspec.structs import replace

from kvloom.engine.queues import ModelQueues, ServedAdapter
from kvloom.engine.quotas import QuotaTuner
from kvloom.engine.residency.policy import AGED
from kvloom.journal.records import AdapterIn, AdapterOut, Recorder, nobody
from kvloom.kv.pool import Pool
from kvloom.kv.prefix_feed import adapter_salt
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, ConfigError, Conflict, Unavailable, UnknownModel
from kvloom.types.geometry import I32
from kvloom.types.job import AdapterMemory, ProvenAdapter
from kvloom.types.spec import AdapterSpec

PREEMPTS_AFTER: Final = 1.0
"""Seconds that an adapter waits for blocks before K and V give way to it."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """One adapter."""

    served: ServedAdapter
    blocks: I32 | None = None
    """The blocks whose memory it has; None if it is not in memory."""
    users: list[int] = field(default_factory=list)
    """The priorities of the requests and sends that need it, or wait for it."""
    entered: bool = False
    """Whether its users may use it: it is in memory, or about to be, and does not give way."""
    coming: asyncio.Task[None] | None = None
    """The task that brings it into memory; None if none does."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """An adapter that waits until it may be used."""

    one: _Held
    since: float
    room: asyncio.Future[I32 | None]
    """The blocks for it; None if it is in memory already, or nobody waits for it any more."""
    first: float | None = None
    """The time since which it is the next one; None if it is not."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """An adapter of `base` waits for blocks; late: for longer than its patience."""

    base: str
    late: bool


class AdapterResidency:
    """The adapters that the unit serves. It is `Reclaimable`: `blocks` are those of adapters that nobody
    uses."""

    def __init__(
        self,
        memory: AdapterMemory | None,
        queues: ModelQueues,
        pool: Pool,
        tuner: QuotaTuner,
        clock: Clock,
        *,
        whole: bool,
        weights: Mapping[str, int],
        jobs: Callable[[], int],
        notify: Callable[[], None],
        record: Recorder = nobody,
    ) -> None:
        """memory: None if the unit serves none. whole: whether the pool keeps all its memory, because peers
        know it by its pages; then adapters lie beside the pool. weights: the blocks of the models whose
        weights can sleep. jobs: says how many the unit has started. notify: called when `review` is due.
        record: takes to the journal which adapters come into memory and leave it."""
        self._record = record
        self._memory = memory
        self._queues = queues
        self._pool = pool
        self._tuner = tuner
        self._clock = clock
        self._whole = whole
        self._jobs = jobs
        self._notify = notify
        self._held: dict[str, _Held] = {}
        self._idle: OrderedDict[str, _Held] = OrderedDict()  # in memory, least recently used first
        self._line: list[_Waiting] = []  # of which only the next one is made room for
        self._loads = asyncio.Lock()
        self._closed = False
        self.blocks = 0
        self.most = pool.total - max(
            weights.get(name, 0) + queue.cache.geometry.blocks(queue.card.context_length)
            for name, queue in queues.items()
        )
        """Blocks that adapters may have while requests use them: what the longest request leaves."""
        pool.reclaim_from(self)
        for served in queues.adapters.values():
            self._admit(_Held(served))

    # -- requests -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, models: Iterable[str], priority: int) -> AsyncIterator[None]:
        """Keeps the adapters among the models in memory, once they are there; those that are waited for by
        more urgent priorities (the smaller) come first. Raises Unavailable if one cannot be read."""
        names = dict.fromkeys(models)
        while (
            any(name in self._held for name in names)
            and (aged := self._next) is not None
            and self._is_late(aged, AGED)
        ):
            await asyncio.wait([aged.room])  # so that those in use come to their end
        some = [one for name in names if (one := self._held.get(name)) is not None]
        for one in some:
            one.users.append(priority)
        try:
            for one in some:
                await self._enter(one)
            yield
        finally:
            for one in some:
                one.users.remove(priority)
                self._leave_line(one)
                self._let_idle(one)

    async def _enter(self, one: _Held) -> None:
        """Waits until the adapter may be used. All wait for one reading of it, which goes on if nobody waits
        any more."""
        if not one.entered and one.blocks is not None and not self._line and self._fits(one):
            self._begin_use(one)
        while not one.entered or one.coming is not None:
            if self._closed:
                raise Unavailable("the engine is stopping")
            if one.coming is None:
                one.coming = asyncio.create_task(self._bring(one))
                one.coming.add_done_callback(_note)
            coming = one.coming
            await asyncio.wait([coming])
            if coming.cancelled():
                raise Unavailable("the engine is stopping")
            coming.result()

    async def _bring(self, one: _Held) -> None:
        """Brings an adapter into memory, for all that wait for it."""
        served, memory = one.served, self._memory
        assert memory is not None
        blocks: I32 | None = None
        try:
            blocks = await self._room(one)
            if blocks is not None:
                proven = await memory.read(served.base, served.spec)
                if proven.digest != served.digest:
                    memory.drop(served.spec.name)
                    raise ConfigError(
                        f"{served.spec.path} holds other weights than when it was loaded; unload it and load "
                        "it again"
                    )
                self._take_place(one, blocks)
        except ConfigError as error:
            _log.error("the adapter %s cannot be read: %s", served.spec.name, error.message)
            raise Unavailable(
                f"the adapter {served.spec.name} cannot be read: {error.message}", param="model"
            ) from error
        finally:
            one.coming = None
            if blocks is not None and one.blocks is None:
                self._give_back(blocks)
            one.entered = one.blocks is not None and one.entered
            self._let_idle(one)

    def close(self) -> None:
        """Lets nothing more come into memory."""
        self._closed = True
        for one in self._held.values():
            if one.coming is not None:
                one.coming.cancel()

    # -- blocks ---------------------------------------------------------------------------------------

    async def _room(self, one: _Held) -> I32 | None:
        """Waits until the adapter may be used. Returns the blocks for it, unless it is in memory already, or
        nobody waits for it any more."""
        waiting = _Waiting(one, self._clock.now(), asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        try:
            self.review()
            self._notify()
            return await waiting.room
        finally:
            self._line.remove(waiting)
            self._notify()

    @property
    def _next(self) -> _Waiting | None:
        """The adapter that is let in next: one that has waited for `AGED` seconds, or else the one of the
        most urgent request; of several the one that has waited longest."""
        now = self._clock.now()

        def rank(waiting: _Waiting) -> tuple[float, float]:
            aged = now >= waiting.since + AGED
            return -inf if aged else min(waiting.one.users, default=inf), waiting.since

        return min((one for one in self._line if not one.room.done()), key=rank, default=None)

    def _leave_line(self, one: _Held) -> None:
        """Lets an adapter wait no more if nobody waits for it."""
        for waiting in self._line:
            if waiting.one is one and not one.users and not waiting.room.done():
                waiting.room.set_result(None)

    def review(self) -> None:
        """Lets the adapters that wait be used, one after the other, if they may be and there are enough
        blocks. K and V give way to one that has been next for its time. Adapters that were unloaded go once
        no request of theirs is left."""
        for one in [*self._held.values()]:
            self._let_leave(one)
        while (waiting := self._next) is not None:
            for other in self._line:
                other.first = None if other is not waiting else other.first
            if waiting.first is None:
                waiting.first = self._clock.now()
            if not self._let_in(waiting):
                return

    def _let_in(self, waiting: _Waiting) -> bool:
        """Lets an adapter be used. Returns False if it cannot be yet."""
        one, size = waiting.one, waiting.one.served.blocks
        if not self._fits(one):
            return False
        if one.blocks is not None:
            self._begin_use(one)
            waiting.room.set_result(None)
            return True
        if self._is_late(waiting):
            self._preempt(one, size)
        if self._pool.available < size:
            return False
        one.entered = True
        waiting.room.set_result(self._pool.yield_to_weights(size))
        self._tuner.resize()
        return True

    @property
    def left(self) -> float | None:
        """Seconds until `review` is due, if nothing happens before; None if it is not due: K and V that can
        give way do so as jobs end."""
        waiting = self._next
        if waiting is None or waiting.first is None or self._is_late(waiting):
            return None
        return waiting.first + PREEMPTS_AFTER - self._clock.now()

    @property
    def shortage(self) -> Shortage | None:
        """The shortage of the adapter that waits; None if none waits for blocks alone."""
        waiting = self._next
        if waiting is None or waiting.one.blocks is not None or not self._fits(waiting.one):
            return None
        served = waiting.one.served
        lacks = served.blocks > self._pool.available
        return Shortage(served.base, self._is_late(waiting)) if lacks else None

    def _is_late(self, waiting: _Waiting, seconds: float = PREEMPTS_AFTER) -> bool:
        """Returns whether an adapter has been next for so long."""
        return waiting.first is not None and self._clock.now() >= waiting.first + seconds

    def _fits(self, one: _Held) -> bool:
        """Returns whether the adapter may be used beside those that are."""
        used = sum(other.served.blocks for other in self._held.values() if other.entered)
        return used + one.served.blocks <= self.most

    def _preempt(self, one: _Held, size: int) -> None:
        """Preempts K and V until there is room, if there can be."""
        if self._pool.available + sum(queue.cache.used_blocks for queue in self._queues.values()) < size:
            return
        queues = sorted(self._queues.values(), key=lambda queue: -queue.cache.used_blocks)
        why = f"gave way to the adapter {one.served.spec.name}, which has waited for its {size} blocks"
        for queue in queues:
            while self._pool.available < size and queue.preempt(self._jobs(), why):
                pass

    def reclaim(self, count: int) -> None:
        """Gives back at least `count` blocks of adapters that nobody uses, or all of them."""
        left = max(0, self.blocks - count)
        while self.blocks > left:
            self._drop(next(iter(self._idle.values())), f"nobody uses it, and {count} blocks are needed")

    def _take_place(self, one: _Held, blocks: I32) -> None:
        assert self._memory is not None
        one.blocks = blocks
        if not self._whole:
            self._memory.make_room(blocks)
        served, why = one.served, f"{blocks.size} blocks; {self._pool.available} are still available"
        self._record(AdapterIn(model=served.spec.name, base=served.base, reason=why))

    def _begin_use(self, one: _Held) -> None:
        """Lets an adapter that is in memory be used."""
        one.entered = True
        self._leave_idle(one)

    def _leave_idle(self, one: _Held) -> None:
        if self._idle.pop(one.served.spec.name, None) is not None and one.blocks is not None:
            self.blocks -= one.blocks.size

    def _let_idle(self, one: _Held) -> None:
        """Lets an adapter that nobody uses give way from now on; one that was unloaded goes at once."""
        if one.users or one.coming is not None:
            return
        one.entered = False
        if one.blocks is not None and one.served.spec.name not in self._idle:
            self._idle[one.served.spec.name] = one
            self.blocks += one.blocks.size
        self._notify()
        self._let_leave(one)

    def _let_leave(self, one: _Held) -> None:
        """Forgets an adapter that was unloaded, once nothing of it is left."""
        if one.served.leaving and not self._is_in_use(one):
            self._forget(one)

    def _is_in_use(self, one: _Held) -> bool:
        """Returns whether a request or send needs the adapter, or a sequence of it is in its base's queue."""
        queue = self._queues[one.served.base]
        return bool(one.users) or one.coming is not None or queue.has_any_of(one.served.spec.name)

    def _drop(self, one: _Held, reason: str) -> None:
        """Lets go of the weights of an adapter that nobody uses."""
        self._leave_idle(one)
        blocks, one.blocks = one.blocks, None
        if blocks is not None:
            assert self._memory is not None
            self._memory.drop(one.served.spec.name)
            self._give_back(blocks)
            self._record(AdapterOut(model=one.served.spec.name, base=one.served.base, reason=reason))

    def _give_back(self, blocks: I32) -> None:
        self._pool.take_from_weights(blocks)
        self._tuner.resize()

    # -- which there are ------------------------------------------------------------------------------

    async def load(self, base: str, adapter: AdapterSpec) -> None:
        """Serves another adapter from now on, once it is proven. One that is served already, with the weights
        that its folder holds, is fine; other weights take its place if nothing uses it. Raises UnknownModel
        for a base that is not served, Conflict for a name that is taken, and BadRequest for what cannot be
        served."""
        memory, name = self._memory, adapter.name
        if base not in self._queues or base in self._queues.adapters:
            raise UnknownModel(f"the base `{base}` is not served here", param="base_model_name")
        if memory is None:
            raise BadRequest("adapters are served by units of one rank on `cpu` that neither lend nor borrow")
        async with self._loads:
            try:
                found = await memory.check(base, adapter)
                if self._is_served_as(name, base, adapter, found):
                    return
                if (one := self._held.get(name)) is not None:
                    self._forget(one)
                proven = await memory.read(base, adapter)
            except ConfigError as error:
                raise BadRequest(error.message, param="lora_path") from error
            served = ServedAdapter(base, adapter, proven.digest, proven.blocks)
            self._queues.adapters[name] = served
            self._admit(_Held(served))

    def _is_served_as(self, name: str, base: str, adapter: AdapterSpec, found: ProvenAdapter) -> bool:
        """Returns whether an adapter is served with the weights that its folder holds. Raises Conflict if the
        name is taken or other weights of it are in use, and BadRequest if it would leave too little room."""
        known = self._queues.adapters.get(name)
        if known is not None and known.leaving:
            raise Conflict(
                f"requests of the adapter {name}, which was unloaded, still run; load it again once they "
                "have ended"
            )
        if name in self._queues and (known is None or (known.base, known.spec) != (base, adapter)):
            raise Conflict(f"{name} is served already; another name is right")
        if known is not None and known.digest == found.digest:
            return True
        if known is not None and self._is_in_use(self._held[name]):
            raise Conflict(
                f"requests of the adapter {name} run, whose folder had other weights; load it again once "
                "they have ended"
            )
        if found.blocks > self.most:
            raise BadRequest(
                f"models.{name}: its weights take {found.blocks} blocks, and of the pool's "
                f"{self._pool.total} the longest request leaves {max(0, self.most)}; a smaller max_context "
                "or more kv_memory is right",
                param="lora_path",
            )
        return False

    def _admit(self, one: _Held) -> None:
        """Takes in an adapter, which stays in memory if cached prefixes make room for it."""
        name, size = one.served.spec.name, one.served.blocks
        self._held[name] = one
        if self._memory is None or name not in self._memory.here:
            return
        if size <= self.most and self._pool.available - self.blocks >= size:
            self._take_place(one, self._pool.yield_to_weights(size))
            self._tuner.resize()
            self._let_idle(one)
        else:
            self._memory.drop(name)

    def unload(self, name: str) -> None:
        """Serves no new request of an adapter; those that are here run to their end, and then it is gone.
        Raises UnknownModel."""
        one = self._held.get(name)
        if one is None:
            raise UnknownModel(f"the adapter {name} is not served here", param="lora_name")
        if not one.served.leaving:
            one.served = self._queues.adapters[name] = replace(one.served, leaving=True)
            self._let_idle(one)

    def _forget(self, one: _Held) -> None:
        served = one.served
        name = served.spec.name
        self._drop(one, "it was unloaded")
        del self._held[name], self._queues.adapters[name]
        self._queues[served.base].cache.prefixes.evict([], adapter_salt(name, served.digest, ""))


def _note(coming: asyncio.Task[None]) -> None:
    """Retrieves the task's error, so that asyncio does not report one that nobody waits for any more."""
    if not coming.cancelled():
        coming.exception()

"""The engine of one unit: several models, one pool, one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Final

from kvloom.engine.guide import Guides, GuideTrial, no_trial
from kvloom.engine.leases import Leases, Pins, Promises
from kvloom.engine.migration import Llumlet, Pauses
from kvloom.engine.queues import make_pool_and_queues
from kvloom.engine.quotas import quota_tuner
from kvloom.engine.report import unit_load
from kvloom.engine.requests import Requests, RequestStream
from kvloom.engine.reservations import MOST_RESERVATIONS, Arrivals, Reservations
from kvloom.engine.residency.adapters import AdapterResidency
from kvloom.engine.residency.weights import WeightResidency
from kvloom.engine.scheduler import Scheduler
from kvloom.engine.transfers import Transfers
from kvloom.journal.records import Recorder, nobody
from kvloom.kv.kept import KeptPrefixes
from kvloom.offload.loans import Borrower, Lender
from kvloom.offload.terms import Borrow, HandBack, Loan, OffloadBackend
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.job import Executor
from kvloom.types.load import UnitLoad
from kvloom.types.prefix_store import PrefixStore
from kvloom.types.request import EndEvent, Event, ModelCard, StartGenerate
from kvloom.types.spec import AdapterSpec, EngineSpec, ModelSpec
from kvloom.types.transfer import Transport
from kvloom.types.verbs import (
    CacheChanges,
    CachedSince,
    CheckModel,
    Evicted,
    Held,
    Lease,
    LoadAdapter,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Sent,
    Standing,
    UnloadAdapter,
)

MAX_RESERVED: Final = MOST_RESERVATIONS + 1
"""Rows of a cache beyond those that run: reservations, and one for a send."""


class Engine:
    """The engine of one unit. It satisfies `EngineClient`, and lives on one event loop and one thread."""

    def __init__(
        self,
        executor: Executor,
        transport: Transport,
        spec: EngineSpec,
        clock: Clock,
        offload: OffloadBackend | None = None,
        trial: GuideTrial = no_trial,
        store: PrefixStore | None = None,
        check: Callable[[ModelSpec], None] = lambda _: None,
        record: Recorder = nobody,
    ) -> None:
        """check: raises ConfigError for a model whose files cannot be served; called in a thread. record:
        takes what the unit decides to the journal."""
        self._spec = spec
        self._check = check
        self._began = clock.now()
        self._stopping = False
        self._wake = asyncio.Event()
        self.pool, queues = make_pool_and_queues(executor, spec, clock, reserved=MAX_RESERVED, record=record)
        self._queues = queues

        # The requests, and what is kept for them.
        requests = self._requests = Requests(queues)
        self._guides = Guides({name: queue.card for name, queue in queues.items()}, trial)
        weights = executor.weights
        sizes = {} if weights is None else weights.blocks
        promises = Promises(queues, self.pool.total - max(sizes.values(), default=0))
        self._pins = Pins(queues, promises, clock, spec.lease)
        self._reservations = Reservations(
            queues, promises, transport, clock, spec.lease, new_id=requests.new_id
        )
        self._arrivals = Arrivals(queues, self._reservations, clock)
        self._kept = None if store is None else KeptPrefixes(self.pool, store, clock, requests.new_id)

        # What runs next.
        pool = self.pool
        self._tuner = quota_tuner(queues, spec, pool, clock)
        self._scheduler = Scheduler(
            queues, pool, executor, requests, self._tuner, self._arrivals, spec, clock, wake=self._wake.set
        )
        self._adapters = AdapterResidency(
            *(executor.adapters, queues, pool, self._tuner, clock),
            whole=spec.transport in ("nixl", "auto"),
            weights=sizes,
            jobs=self._jobs,
            notify=self._wake.set,
            record=record,
        )
        self._residency: WeightResidency | None = None
        if weights is not None:
            self._residency = WeightResidency(
                *(weights, queues, pool, self._scheduler, requests, self._tuner, spec, clock),
                adapters=self._adapters,
                notify=self._wake.set,
                record=record,
            )

        # What leaves the unit, and what it lends and borrows.
        self._transport = transport
        self._transfers = Transfers(queues, transport, requests, wake=self._interrupt, jobs=self._jobs)
        self._pauses = Pauses(queues, requests, clock, spec.lease, jobs=self._jobs)
        self._llumlet = Llumlet(queues, pool, requests, spec)
        first = next(iter(queues.values()))
        self.lender = Lender(first, pool, promises, offload, clock, wake=self._interrupt, record=record)
        self.borrower = Borrower(queues, pool.total, offload, wake=self._interrupt)
        leased = (self._reservations, self._pins, self._pauses, self.lender, self._arrivals)
        self._leases = Leases(leased, clock)

    # -- the loop -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs jobs until `stop`, and then until the last one has ended."""
        while True:
            self._scheduler.process_outputs()
            await self._requests.deferred.let_callers_run()
            self._expire_leases()
            if self._has_stopped:
                break
            self._tuner.adapt()
            if not self._stopping:
                self._review_loans()
                self._adapters.review()
                if self._residency is not None:
                    self._residency.review()
                self._start_jobs()
            await self._rest()
        self.borrower.give_back_all()
        if self._kept is not None:
            await self._kept.save_hottest()
        if self._residency is not None:
            self._residency.sleep_all()

    @property
    def _has_stopped(self) -> bool:
        return self._stopping and self._scheduler.is_idle and self.lender.due is None

    def _expire_leases(self) -> None:
        """Gives up everything whose lease nobody has renewed."""
        if self._leases.left == 0:
            self._scheduler.cut()
            self._leases.expire()

    def _review_loans(self) -> None:
        for side in (self.lender, self.borrower):
            side.review(self._scheduler.lacks, self._scheduler.jobs)

    def _start_jobs(self) -> None:
        while self._scheduler.start_next(watched=self.lender.watching):
            pass

    async def _rest(self) -> None:
        """Waits until a job ends, a caller comes, or a lease runs out."""
        if not self._scheduler.has_ended:
            moving = self._residency is not None and self._residency.is_moving
            if self._scheduler.is_idle and self._arrivals.due is None and not moving:
                self._transfers.give_way()
                self.lender.give_way()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._longest_rest):
                    await self._wake.wait()
        self._wake.clear()

    @property
    def _longest_rest(self) -> float | None:
        """Seconds until a lease runs out, a model's turn to be in memory is over, or an adapter has waited
        for its time."""
        turn = None if self._residency is None else self._residency.left
        lefts = [left for left in (self._leases.left, turn, self._adapters.left) if left is not None]
        return min(lefts, default=None)

    def _interrupt(self) -> None:
        """Ends decode jobs of many steps after the steps that are under way, because something is to be
        decided. Other jobs go on."""
        self._scheduler.cut()
        self._wake.set()

    def _jobs(self) -> int:
        """Returns the number of jobs that the unit has started."""
        return self._scheduler.jobs

    def stop(self) -> None:
        """Refuses new requests, ends every stream, and lets the loop end once running jobs have."""
        self._stopping = True
        for request in self._requests.ids:
            self._requests.cancel(request, "error", "the engine is stopping")
            self._pauses.let_go(str(request))
        self._reservations.release_all()
        self._pins.unpin_all()
        self.lender.recall()
        self._transfers.stop()
        self._adapters.close()
        self._interrupt()

    async def _bring_back(self, model: str, tokens: list[int], salt: str) -> None:
        """Caches what the store of prefixes has of the tokens, if there is one."""
        if self._kept is not None:
            queue = self._queues[model]
            speed = queue.prefill_speed.tokens_a_second
            brought = await self._kept.bring_back(queue.card.name, tokens, salt, speed)
            queue.stats.restored_tokens += brought

    # -- what others call -----------------------------------------------------------------------------

    async def models(self) -> list[ModelCard]:
        if self._stopping:
            raise Unavailable("the engine is stopping")
        return [*self._queues.cards.values()]

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        """Yields an empty frame once the request is let in, another one each time that a job begins to
        compute its prompt, unless a token is there as soon, and then frames of its events. See
        `EngineClient`."""
        self._requests.check(body)
        body = self._queues.salted(body)
        stream = self._requests.open(body)
        try:
            guides = await self._guides.compiled(self._queues.of_base(body), wanted=lambda: not stream.ended)
            async with self._adapters.using([body.model], body.priority):
                try:
                    if body.task == "generate" and not self._reservations.has(body.request):
                        first = stream.sequences[0]
                        await self._bring_back(first.model, first.prefix, first.salt)
                    if self._stopping:
                        raise Unavailable("the engine is stopping")
                    self._interrupt()
                    if not stream.ended:
                        received = self._reservations.take(body)
                        self._requests.begin(stream, guides, self._scheduler.jobs, received)
                    yield []
                    while True:
                        frame, over = await stream.frame()
                        if stream.full:
                            self._requests.go_on(stream, self._scheduler.jobs)
                            self._interrupt()
                        if self._stopping and any(map(_failed, frame)):
                            yield [event for event in frame if not _failed(event)]
                            raise Unavailable("the engine is stopping")  # another process may go on with it
                        yield frame
                        if over:
                            return
                finally:
                    self._leave(stream, body.request)  # while its adapter is kept for it
        finally:
            self._leave(stream, body.request)

    def _leave(self, stream: RequestStream, request: str) -> None:
        """Ends a request whose caller has gone, if it has not ended."""
        self._pauses.let_go(request)
        if not stream.ended:
            self._requests.close(stream, "abort")
            self._interrupt()

    async def abort(self, request: str, choice: int | None = None) -> None:
        self._requests.cancel(request, "abort", choice=choice)
        if choice is None:
            self._reservations.release(request)
            self._transfers.abort(request)
            self._pins.unpin(request)
            self._pauses.let_go(request)
        self._interrupt()

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        self._requests.check_prompt(body.model, body.prompt)
        if self._stopping:
            raise Unavailable("the engine is stopping")
        self._interrupt()  # the loop must rest no longer than until the new lease runs out
        return self._reservations.prepare(self._queues.salted(body))

    async def remote_send(self, body: RemoteSend) -> Sent:
        self._requests.check_prompt(body.model, body.prompt)
        self._interrupt()
        await self._pauses.publish(body.request)
        salted = self._queues.salted(body)
        async with self._adapters.using([body.model], body.priority):
            await self._bring_back(salted.model, salted.prompt, salted.salt)
            return await self._transfers.send(salted)

    async def renew(self, request: str) -> Lease:
        asked = self._reservations.renew(request), self._pins.renew(request)
        leases = [lease for lease in asked if lease is not None]
        if not leases:
            raise BadRequest(
                f"nothing is reserved or pinned for request {request}: it never was, or its lease ran out",
                param="request",
            )
        return Lease(lease=min(leases))

    async def pin(self, body: Pin) -> Pinned:
        self._requests.check_prompt(body.model, body.prompt)
        if self._stopping:
            raise Unavailable("the engine is stopping")
        self._interrupt()  # as for prep_recv
        return self._pins.pin(self._queues.salted(body))

    async def unpin(self, request: str) -> Held:
        self._interrupt()
        return Held(tokens=self._pins.unpin(request))

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        for body in sends:
            self._requests.check_prompt(body.model, body.prompt)
        self._interrupt()
        salted = [self._queues.salted(body) for body in sends]
        urgent = min((body.priority for body in sends), default=0)
        async with self._adapters.using((body.model for body in sends), urgent):  # nothing is paused before
            made = await self._pauses.pause(request)
            return Standing(made=made, sent=await self._transfers.send_what_is_here(salted))

    async def resume(self, request: str) -> None:
        self._interrupt()
        await self._pauses.resume(request)
        self._interrupt()

    async def offer(self, body: Offer) -> Offered:
        await self._scheduler.settled()
        return self._llumlet.select_migration(body)

    async def lend(self, body: Borrow) -> Loan:
        """Lends blocks to another unit. The borrower's unit asks for them itself; the router does not."""
        if self._stopping:
            raise Unavailable("the engine is stopping")
        self._interrupt()
        return self.lender.lend(body)

    async def take_back(self, body: HandBack) -> None:
        """Takes back a part of what is lent, which the borrower's unit hands over."""
        self._interrupt()
        self.lender.take_back(body)

    async def evict(self, body: Prefix) -> Evicted:
        self._requests.check_prompt(body.model, body.prompt)
        body = self._queues.salted(body)
        tree = self._queues[body.model].cache.prefixes
        dropped = tree.evict(body.prompt, body.salt)
        if self._kept is not None:
            self._kept.forget(self._queues[body.model].card.name, body.prompt, body.salt)
        return Evicted(tokens=dropped, pinned=tree.pinned(body.prompt, body.salt))

    async def contents(self, body: CachedSince) -> CacheChanges:
        return self.pool.feed.changes(body)

    async def load_adapter(self, body: LoadAdapter) -> None:
        if self._stopping:
            raise Unavailable("the engine is stopping")
        await self._adapters.load(body.base, AdapterSpec(body.name, body.path))

    async def unload_adapter(self, body: UnloadAdapter) -> None:
        self._adapters.unload(body.name)

    async def check_model(self, body: CheckModel) -> None:
        try:
            await asyncio.to_thread(self._check, body.model)
        except ConfigError as error:
            raise BadRequest(error.message, param="model") from error

    async def load(self) -> UnitLoad:
        return self.load_now()

    def load_now(self) -> UnitLoad:
        self._scheduler.sync()
        waits = self.lender.waits()
        return unit_load(
            self._spec,
            self.pool,
            self._queues,
            waits,
            self.lender.recalled,
            self._transport,
            self._began,
            draining=self._stopping,
            weights={} if self._residency is None else self._residency.loads(),
            bases=self._queues.bases,
        )


def _failed(event: Event) -> bool:
    """Returns whether the event ends a request in such a way that another engine may go on with it."""
    return isinstance(event, EndEvent) and event.reason == "error" and not event.code

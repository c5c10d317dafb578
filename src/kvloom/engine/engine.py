"""The engine of one unit: several models, one pool, one loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

from kvloom.core.clock import Clock
from kvloom.core.errors import BadRequest, Unavailable
from kvloom.core.job import Executor, JobResult, Phase
from kvloom.core.load import UnitLoad
from kvloom.core.request import Event, ModelCard, StartGenerate
from kvloom.core.spec import EngineSpec
from kvloom.core.transport import Transport
from kvloom.core.verbs import Held, Lease, Pin, Pinned, Prefix, Prepared, PrepRecv, RemoteSend, Sent
from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import Preempt, Prefill, UnitView
from kvloom.engine.fitting import fitted, planned_shares, tell_waste
from kvloom.engine.flight import Flight, compose
from kvloom.engine.guide import Guides
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.pins import Pins
from kvloom.engine.promises import Promises
from kvloom.engine.requests import Requests
from kvloom.engine.reservations import MOST, Reservations
from kvloom.engine.sequence import Sequence
from kvloom.engine.shipping import Shipping
from kvloom.engine.strides import Strides
from kvloom.engine.tuner import QuotaTuner
from kvloom.kv.pool import Pool

_log = logging.getLogger(__name__)

MAX_RESERVED: Final = MOST + 1  # a cache's rows beyond those that run: reservations, and one for a send


class Engine:
    """Satisfies `EngineClient`; `run` is its loop. All of it lives on one event loop and one thread."""

    def __init__(self, executor: Executor, transport: Transport, spec: EngineSpec, clock: Clock) -> None:
        self._executor = executor
        self._spec = spec
        self._policy = POLICIES[spec.policy]
        tell_waste(executor.geometries)
        cards = {
            name: fitted(card, executor.geometries[name], executor.blocks)
            for name, card in executor.cards.items()
        }
        self.pool = Pool(
            executor.blocks,
            executor.geometries,
            max_sequences=spec.max_running + MAX_RESERVED,
            max_tokens={name: card.context_length for name, card in cards.items()},
        )
        shares = {model.name: planned_shares(model, executor.compute) for model in spec.models}
        self._queues = {
            name: ModelQueue(
                card, self.pool.caches[name], spec.max_running, spec.max_waiting, shares.get(name, (0, 0))
            )
            for name, card in cards.items()
        }
        self._tuner = QuotaTuner(self._queues, spec, self.pool.total, clock)
        self._clock = clock
        self._wake = asyncio.Event()
        self._requests = Requests(self._queues)
        self._guides = Guides(cards)
        promises = Promises(self._queues, self.pool.total)
        self._pins = Pins(self._queues, promises, clock, spec.lease)
        self._reservations = Reservations(
            self._queues, promises, transport, clock, spec.lease, new_id=self._requests.new_id
        )
        self._shipping = Shipping(
            self._queues, transport, self._requests, wake=self._called, jobs=lambda: self._jobs
        )
        self._strides = Strides(self._queues, self.pool, executor, self._policy)
        self._ended: deque[tuple[Flight, asyncio.Future[JobResult]]] = deque()
        self._jobs = 0
        self._idle = executor.compute
        self._last_phase = Phase.DECODE
        self._stopping = False

    # -- the loop -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`, and then until the last job has ended."""
        while True:
            self._take_in()
            self._expire()
            if self._stopping and self._idle == self._executor.compute:
                return
            self._tuner.adapt()
            while not self._stopping and self._apply(self._view()):
                pass
            if not self._ended:
                if self._idle == self._executor.compute:
                    self._shipping.give_way()
                await self._rest()
            self._wake.clear()

    async def _rest(self) -> None:
        """Until a job ends, a caller comes, or a lease runs out."""
        due = self._due
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._clock.now())):
                await self._wake.wait()

    @property
    def _due(self) -> float | None:
        """When the next lease runs out."""
        dues = [due for due in (self._reservations.due, self._pins.due) if due is not None]
        return min(dues, default=None)

    def _expire(self) -> None:
        """Give up what nobody has renewed."""
        due = self._due
        if due is not None and due <= self._clock.now():
            self._cut()
            self._reservations.expire()
            self._pins.expire()

    async def stop(self) -> None:
        """Refuse new requests, end every stream, and let the loop end when running jobs have."""
        self._stopping = True
        for request in self._requests.ids:
            self._requests.cancel(request, "error", "the engine is stopping")
        self._reservations.release_all()
        self._pins.unpin_all()
        self._shipping.stop()
        self._called()

    def _view(self) -> UnitView:
        return UnitView(
            models=tuple(queue.view(self._jobs) for queue in self._queues.values()),
            compute=self._executor.compute,
            idle=self._idle,
            free_blocks=self.pool.available,
            last_was_prefill=self._last_phase is Phase.PREFILL,
            jobs=self._jobs,
            overload=round(self._spec.overload * self._executor.compute),
            walls=self._spec.quotas == "fixed",
        )

    def _apply(self, view: UnitView) -> bool:
        """Do as the policy says. False where that is nothing, or needs a running job's end first."""
        action = self._policy(view)
        if action is None:
            return False
        queue = self._queues[action.model]
        if isinstance(action, Preempt):
            return queue.preempt(self._jobs)
        if isinstance(action, Prefill):
            batch = queue.prefill_batch(action.blocks, self._spec.chunk_tokens)
            return self._start(queue, Phase.PREFILL, action.share, batch)
        batch = queue.decode_batch()
        steps = self._strides.steps(view, action, batch)
        return self._start(queue, Phase.DECODE, action.share, batch, steps)

    def _start(
        self,
        queue: ModelQueue,
        phase: Phase,
        share: int,
        batch: list[tuple[Sequence, int]],
        steps: int = 1,
    ) -> bool:
        if not batch:
            return False
        flight = compose(queue, phase, share, batch, steps)
        self._jobs += 1
        self._idle -= share
        self._last_phase = phase
        queue.started(phase, self._jobs)
        self._jobs += self._strides.took_off(flight)
        self._executor.launch(flight.job).add_done_callback(lambda future: self._landed(flight, future))
        return True

    def _landed(self, flight: Flight, future: asyncio.Future[JobResult]) -> None:
        self._ended.append((flight, future))
        self._wake.set()

    def _take_in(self) -> None:
        """Every ended job's tokens go to their sequences and streams."""
        while self._ended:
            flight, future = self._ended.popleft()
            queue = self._queues[flight.job.model]
            self._idle += flight.job.share
            error = future.exception()
            steps = 1
            if error is None:
                result, running = future.result(), len(queue.running)
                steps = flight.steps(result)
                self._jobs += self._strides.landed(flight, steps)
                queue.cache.end_forward(flight.job.plan)
                queue.finished(flight.job, len(result.tokens), steps, self._jobs)
                self._requests.land(flight, result, self._jobs)
                if len(queue.running) < running:
                    self._cut()
            else:
                self._strides.failed(flight)
                queue.cache.abort_forward(flight.job.plan)
                queue.failed(flight.job)
                _log.error("a %s job of %s failed", flight.job.phase, flight.job.model, exc_info=error)
                self._requests.fail(flight, error)
                self._cut()
            self._tuner.observe(steps)

    def _called(self) -> None:
        """Something has to be decided, after the steps that are under way."""
        self._cut()
        self._wake.set()

    def _cut(self) -> None:
        self._jobs += self._strides.cut()

    # -- what others call -----------------------------------------------------------------------------

    async def models(self) -> list[ModelCard]:
        return [queue.card for queue in self._queues.values()]

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        """First an empty frame, once the request is let in; then its events. See `EngineClient`."""
        self._requests.check(body)
        stream = self._requests.open(body)
        try:
            guides = await self._guides.compiled(body, wanted=lambda: not stream.ended)
            if self._stopping:
                raise Unavailable("the engine is stopping")
            self._called()
            if not stream.ended:
                received = self._reservations.take(body)
                self._requests.begin(stream, guides, self._jobs, received)
            yield []
            while True:
                frame, over = await stream.frame()
                yield frame
                if over:
                    return
        finally:
            if not stream.ended:
                self._requests.close(stream, "abort")
                self._called()

    async def abort(self, request: str, choice: int | None = None) -> None:
        self._requests.cancel(request, "abort", choice=choice)
        if choice is None:
            self._reservations.release(request)
            self._shipping.abort(request)
            self._pins.unpin(request)
        self._called()

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        self._requests.check_prompt(body.model, body.prompt)
        if self._stopping:
            raise Unavailable("the engine is stopping")
        self._called()  # the loop rests until the lease runs out, at most
        return self._reservations.prepare(body)

    async def remote_send(self, body: RemoteSend) -> Sent:
        self._requests.check_prompt(body.model, body.prompt)
        self._called()
        return await self._shipping.send(body)

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
        self._called()  # as for prep_recv
        return self._pins.pin(body)

    async def unpin(self, request: str) -> Held:
        self._called()
        return Held(tokens=self._pins.unpin(request))

    async def evict(self, body: Prefix) -> Held:
        self._requests.check_prompt(body.model, body.prompt)
        return Held(tokens=self.pool.caches[body.model].prefixes.evict(body.prompt))

    async def load(self) -> UnitLoad:
        self._cut()
        return UnitLoad(
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            block_bytes=self._spec.block_bytes,
            policy=self._spec.policy,
            models={name: queue.load() for name, queue in self._queues.items()},
        )

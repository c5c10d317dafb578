"""The engine of one unit: several models, one pool, one loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

from kvloom.core.clock import Clock
from kvloom.core.errors import Unavailable
from kvloom.core.job import Executor, JobResult, Phase
from kvloom.core.load import UnitLoad
from kvloom.core.request import Event, ModelCard, StartGenerate
from kvloom.core.spec import EngineSpec
from kvloom.core.transport import Transport
from kvloom.core.verbs import Held, Lease, Prefix, Prepared, PrepRecv, RemoteSend, Sent
from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import Action, Preempt, Prefill, UnitView
from kvloom.engine.fitting import fitted, tell_waste
from kvloom.engine.flight import Flight, compose
from kvloom.engine.guide import GuideState
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.pins import Pins
from kvloom.engine.requests import Requests
from kvloom.engine.reservations import MOST, Reservations
from kvloom.engine.sequence import Sequence
from kvloom.engine.shipping import Shipping
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
        self._queues = {
            name: ModelQueue(card, self.pool.caches[name], spec.max_running, spec.max_waiting)
            for name, card in cards.items()
        }
        self._pins = Pins(self._queues, self.pool.total)
        self._tuner = QuotaTuner(self._queues, {m.name: m.rate for m in spec.models}, self.pool.total, clock)
        self._clock = clock
        self._wake = asyncio.Event()
        self._requests = Requests(self._queues)
        self._reservations = Reservations(
            self._queues, transport, clock, spec.lease, new_id=self._requests.new_id
        )
        self._shipping = Shipping(
            self._queues, transport, self._requests, wake=self._wake.set, jobs=lambda: self._jobs
        )
        self._ended: deque[tuple[Flight, asyncio.Future[JobResult]]] = deque()
        self._compiling = asyncio.Semaphore(1)
        self._jobs = 0
        self._idle = executor.compute
        self._last_phase = Phase.DECODE
        self._stopping = False

    # -- the loop -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`, and then until the last job has ended."""
        while True:
            self._take_in()
            self._reservations.expire()
            if self._stopping and self._idle == self._executor.compute:
                return
            self._tuner.adapt()
            while not self._stopping and (action := self._policy(self._view())) and self._apply(action):
                pass
            if not self._ended:
                await self._rest()
            self._wake.clear()

    async def _rest(self) -> None:
        """Until a job ends, a caller comes, or a lease runs out."""
        due = self._reservations.due
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._clock.now())):
                await self._wake.wait()

    async def stop(self) -> None:
        """Refuse new requests, end every stream, and let the loop end when running jobs have."""
        self._stopping = True
        for request in self._requests.ids:
            self._requests.cancel(request, "error", "the engine is stopping")
        self._reservations.release_all()
        self._shipping.stop()
        self._wake.set()

    def _view(self) -> UnitView:
        return UnitView(
            models=tuple(queue.view(self._jobs) for queue in self._queues.values()),
            compute=self._executor.compute,
            idle=self._idle,
            free_blocks=self.pool.available,
            last_was_prefill=self._last_phase is Phase.PREFILL,
            jobs=self._jobs,
        )

    def _apply(self, action: Action) -> bool:
        """Do as the policy says. False where that needs a running job's end first."""
        queue = self._queues[action.model]
        if isinstance(action, Preempt):
            return queue.preempt(self._jobs)
        if isinstance(action, Prefill):
            batch = queue.prefill_batch(action.blocks, self._spec.chunk_tokens)
            return self._start(queue, Phase.PREFILL, action.share, batch)
        return self._start(queue, Phase.DECODE, action.share, queue.decode_batch())

    def _start(self, queue: ModelQueue, phase: Phase, share: int, batch: list[tuple[Sequence, int]]) -> bool:
        if not batch:
            return False
        flight = compose(queue, phase, share, batch)
        self._jobs += 1
        self._idle -= share
        self._last_phase = phase
        queue.started(phase, self._jobs)
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
            if error is None:
                queue.cache.end_forward(flight.job.plan)
                queue.finished(flight.job.tokens.size, len(flight.drawers), flight.job.phase)
                self._requests.land(flight, future.result(), self._jobs)
            else:
                queue.cache.abort_forward(flight.job.plan)
                queue.active[flight.job.phase] -= 1
                _log.error("a %s job of %s failed", flight.job.phase, flight.job.model, exc_info=error)
                self._requests.fail(flight, error)
            self._tuner.observe()

    # -- what others call -----------------------------------------------------------------------------

    async def models(self) -> list[ModelCard]:
        return [queue.card for queue in self._queues.values()]

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        """First an empty frame, once the request is let in; then its events. See `EngineClient`."""
        self._requests.check(body)
        guides = await self._compile(body)
        if self._stopping:
            raise Unavailable("the engine is stopping")
        self._reservations.take(body)
        stream = self._requests.open(body, guides, self._jobs)
        self._wake.set()
        try:
            yield []
            while True:
                frame, over = await stream.frame()
                yield frame
                if over:
                    return
        finally:
            self._requests.close(stream, "abort")
            self._wake.set()

    async def _compile(self, body: StartGenerate) -> list[GuideState | None]:
        """The request's guides. A large grammar takes a while, and so one at a time, beside the loop."""
        if body.sampling.guide is None:
            return self._requests.guides(body)
        async with self._compiling:
            return await asyncio.to_thread(self._requests.guides, body)

    async def abort(self, request: str, choice: int | None = None) -> None:
        self._requests.cancel(request, "abort", choice=choice)
        if choice is None:
            self._reservations.release(request)
            self._shipping.abort(request)
        self._wake.set()

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        self._requests.check_prompt(body.model, body.prompt)
        if self._stopping:
            raise Unavailable("the engine is stopping")
        prepared = self._reservations.prepare(body)
        self._wake.set()  # the loop rests until the lease runs out, at most
        return prepared

    async def remote_send(self, body: RemoteSend) -> Sent:
        self._requests.check_prompt(body.model, body.prompt)
        return await self._shipping.send(body)

    async def renew(self, request: str) -> Lease:
        return self._reservations.renew(request)

    async def pin(self, body: Prefix) -> Held:
        self._requests.check_prompt(body.model, body.prompt)
        return self._pins.pin(body)

    async def unpin(self, body: Prefix) -> Held:
        self._requests.check_prompt(body.model, body.prompt)
        return self._pins.unpin(body)

    async def evict(self, body: Prefix) -> Held:
        self._requests.check_prompt(body.model, body.prompt)
        return self._pins.evict(body)

    async def load(self) -> UnitLoad:
        return UnitLoad(
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            block_bytes=self._spec.block_bytes,
            policy=self._spec.policy,
            models={name: queue.load() for name, queue in self._queues.items()},
        )

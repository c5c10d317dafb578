"""Requests that stand still between two steps: to be sent from, or to go on elsewhere.

What they have computed is kept for them meanwhile: a unit that gives requests away is short of blocks, and
would have to compute it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.requests import Requests
from kvloom.engine.sequence import Status
from kvloom.engine.stream import Stream
from kvloom.kv.prefix import PinnedPath, PrefixTree
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest
from kvloom.types.request import Made


class Holds:
    """The verbs hold and resume. lease: seconds after which one that nobody has resumed goes on by itself.
    jobs: says how many the unit has started."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        requests: Requests,
        clock: Clock,
        lease: float,
        *,
        jobs: Callable[[], int],
    ) -> None:
        self._queues = queues
        self._requests = requests
        self._clock = clock
        self._lease = lease
        self._jobs = jobs
        self._due: dict[str, float] = {}  # by request, those that have ended meanwhile too
        self._kept: dict[str, list[tuple[PrefixTree, PinnedPath]]] = {}

    @property
    def due(self) -> float | None:
        """When `expire` has something to do, or earlier."""
        return min(self._due.values(), default=None)

    def expire(self) -> None:
        """Those whose lease has run out go on."""
        now = self._clock.now()
        for request in [request for request, due in self._due.items() if due <= now]:
            del self._due[request]
            stream = self._requests.stream(request)
            self.let_go(request)
            if stream is not None:
                self._go_on(stream)

    def let_go(self, request: str) -> None:
        """It is over, or goes on: nothing is kept for it."""
        for tree, path in self._kept.pop(request, ()):
            tree.unpin(path)

    async def hold(self, request: str) -> list[Made]:
        """All tokens of the choices that have not ended. Raises BadRequest where the request is not here, or
        has ended, or a choice has yet to begin."""
        stream = self._requests.stream(request)
        if stream is None:
            raise BadRequest(f"no request {request} is here: it never was, or it has ended", param="request")
        return await self._requests.errands.do(stream, lambda: self._stand_still(stream))

    def _stand_still(self, stream: Stream) -> list[Made]:
        live = stream.live
        if not live or not all(sequence.output_length for sequence in live):
            problem = "has a choice without a token; ask once each has one" if live else "has ended"
            raise BadRequest(f"request {stream.id} {problem}", param="request")
        kept = self._kept.setdefault(stream.body.request, [])
        for sequence in live:
            if sequence.status is not Status.HELD:
                self._queues[sequence.model].release(sequence, Status.HELD)
                tree = self._queues[sequence.model].cache.prefixes
                if path := tree.pin(sequence.tokens.list()):
                    kept.append((tree, path))
        self._due[stream.body.request] = self._clock.now() + self._lease
        return [Made(sequence.choice, sequence.tokens.output.tolist()) for sequence in live]

    async def resume(self, request: str) -> None:
        """Requests that do not stand still, and unknown ones, are fine. A hold that waits for the step under
        way comes first."""
        self._due.pop(request, None)
        stream = self._requests.stream(request)
        if stream is not None:
            await self._requests.errands.do(stream, lambda: self._go_on(stream))

    def _go_on(self, stream: Stream) -> None:
        self.let_go(stream.body.request)
        for sequence in stream.live:
            if sequence.status is Status.HELD:
                sequence.become(Status.WAITING)
                self._queues[sequence.model].enqueue(sequence, self._jobs())

    async def publish(self, request: str) -> None:
        """What a running request has computed counts as cached, as far as it fills pages."""
        stream = self._requests.stream(request)
        if stream is not None:
            await self._requests.errands.do(stream, lambda: self._publish(stream))

    def _publish(self, stream: Stream) -> None:
        for sequence in stream.live:
            queue = self._queues[sequence.model]
            if sequence.status is Status.RUNNING and queue.planner.is_home(sequence):
                queue.cache.keep(sequence.id, sequence.tokens.list())

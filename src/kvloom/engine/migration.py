"""How requests leave a unit: which request goes, and how it stands still between two steps until it has
gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvloom.engine.batching import IN_ORDER
from kvloom.engine.batching.view import kept_to_grow
from kvloom.engine.freeness import after, freeness
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.requests import Requests, RequestStream
from kvloom.engine.sequence import Sequence, Status
from kvloom.kv.pool import Pool
from kvloom.kv.prefix import PinnedPath, PrefixTree
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.request import Level, Made, level_of
from kvloom.types.spec import EngineSpec
from kvloom.types.verbs import Offer, Offered

LEAST_LEFT: Final = 16  # tokens: two stages of a move take some steps, and a move is work for both sides


@dataclass(frozen=True, slots=True)
class MigrationCandidate:
    """A request with all its choices, as it could move."""

    request: str
    model: str
    lengths: tuple[int, ...]
    """Tokens of each choice, the prompt included."""
    left: int
    """Tokens that the choice with most to do may still make, by max_tokens and the longest context; nobody
    knows whether a stop token comes before."""
    level: Level | None = None
    """The level of its execution priority."""
    shared: int = 0
    """Tokens with which all choices begin, and which are held once for all of them."""

    @property
    def tokens(self) -> int:
        """Tokens that are held for the request."""
        return sum(self.lengths) - (len(self.lengths) - 1) * self.shared

    def blocks(self, model: ModelLoad) -> int:
        """Returns the blocks that hold the request at a unit that reports `model`. Pages are shared whole."""
        whole = self.shared - self.shared % model.page_tokens
        return sum(map(model.blocks, self.lengths)) - (len(self.lengths) - 1) * model.blocks(whole)


def choose(
    candidates: Iterable[MigrationCandidate],
    destination: UnitLoad,
    *,
    floor: float = 0.0,
) -> MigrationCandidate | None:
    """Returns the request to move to `destination`; None if there is none. A request that is about to end
    stays, and so does one that would bring the destination's freeness below `floor`, in decode steps. At 0
    the destination just holds it; at the threshold of sources it need not give it away at once. A destination
    that drains holds nothing."""
    best, rank = None, (math.inf, math.inf)
    for one in candidates:
        own = one.level.headroom if one.level else 0, one.tokens
        if own < rank and one.left >= LEAST_LEFT and has_room(destination, one, floor):
            best, rank = one, own
    return best


def has_room(destination: UnitLoad, one: MigrationCandidate, floor: float) -> bool:
    """Returns whether the destination keeps at least `floor` with this request."""
    model = destination.model(one.model)
    if model is None:
        return False
    there = after(destination, destination.base_of(one.model), len(one.lengths), one.blocks(model), one.level)
    return freeness(there) >= floor


class Pauses:
    """The verbs hold and resume: requests that stand still between two steps, to be sent from, or to go on
    elsewhere.

    What they have computed is kept for them meanwhile: a unit that gives requests away is short of blocks,
    and would have to compute it anew."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        requests: Requests,
        clock: Clock,
        lease: float,
        *,
        jobs: Callable[[], int],
    ) -> None:
        """lease: seconds after which a paused request goes on by itself. jobs: says how many the unit has
        started."""
        self._queues = queues
        self._requests = requests
        self._clock = clock
        self._lease = lease
        self._jobs = jobs
        self._due: dict[str, float] = {}  # by request, with those that have ended meanwhile
        self._kept: dict[str, list[tuple[PrefixTree, PinnedPath]]] = {}

    @property
    def due(self) -> float | None:
        """The time at which `expire` has something to do, or an earlier one."""
        return min(self._due.values(), default=None)

    def expire(self) -> None:
        """Resumes the requests whose lease has run out."""
        now = self._clock.now()
        for request in [request for request, due in self._due.items() if due <= now]:
            del self._due[request]
            stream = self._requests.stream(request)
            self.let_go(request)
            if stream is not None:
                self._go_on(stream)

    def let_go(self, request: str) -> None:
        """Gives up what is kept for a request, which is over or goes on."""
        for tree, path in self._kept.pop(request, ()):
            tree.unpin(path)

    async def pause(self, request: str) -> list[Made]:
        """Returns all tokens of the choices that have not ended. Raises BadRequest if the request is not
        here, or has ended, or a choice has yet to begin."""
        stream = self._requests.stream(request)
        if stream is None:
            raise BadRequest(f"no request {request} is here: it never was, or it has ended", param="request")
        return await self._requests.deferred.do(stream, lambda: self._stand_still(stream))

    def _stand_still(self, stream: RequestStream) -> list[Made]:
        live = stream.live
        if not live or not all(sequence.output_length for sequence in live):
            problem = "has a choice without a token; ask once each has one" if live else "has ended"
            raise BadRequest(f"request {stream.id} {problem}", param="request")
        kept = self._kept.setdefault(stream.body.request, [])
        for sequence in live:
            if sequence.status is not Status.HELD:
                self._queues[sequence.model].release(sequence, Status.HELD)
                tree = self._queues[sequence.model].cache.prefixes
                if path := tree.pin(sequence.tokens.list(), sequence.salt):
                    kept.append((tree, path))
        self._due[stream.body.request] = self._clock.now() + self._lease
        return [Made(sequence.choice, sequence.tokens.output.tolist()) for sequence in live]

    async def resume(self, request: str) -> None:
        """Lets a paused request go on. Requests that do not stand still, and unknown ones, are fine. A pause
        that still waits for the end of a step takes effect first."""
        self._due.pop(request, None)
        stream = self._requests.stream(request)
        if stream is not None:
            await self._requests.deferred.do(stream, lambda: self._go_on(stream))

    def _go_on(self, stream: RequestStream) -> None:
        self.let_go(stream.body.request)
        for sequence in stream.live:
            if sequence.status is Status.HELD:
                sequence.become(Status.WAITING)
                self._queues[sequence.model].enqueue(sequence, self._jobs())

    async def publish(self, request: str) -> None:
        """Caches what a running request has computed, as far as it fills pages."""
        stream = self._requests.stream(request)
        if stream is not None:
            await self._requests.deferred.do(stream, lambda: self._publish(stream))

    def _publish(self, stream: RequestStream) -> None:
        for sequence in stream.live:
            queue = self._queues[sequence.model]
            if sequence.status is Status.RUNNING and queue.planner.is_home(sequence):
                queue.cache.keep(sequence.id, sequence.tokens.list())


class Llumlet:
    """Chooses which request leaves the unit (Llumnix, sections 4.3 and 4.4): the fleet scheduler knows loads,
    and this knows requests."""

    def __init__(
        self, queues: Mapping[str, ModelQueue], pool: Pool, requests: Requests, spec: EngineSpec
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._requests = requests
        self._levels = spec.priorities
        self._in_order = spec.policy in IN_ORDER

    def select_migration(self, body: Offer) -> Offered:
        """Returns the request that is to move to a unit, if there is one. Requests that wait behind a first
        one that finds no room go before all that run, because nothing of them is copied. The paper leaves
        such requests at their unit, and so does this under the policy of the paper's engine. Of running
        requests, those at home go before offloaded ones, which would free no block here, and whose K and V
        would be computed again."""
        besides = frozenset(body.besides)
        for one in self._stuck():
            there = body.destination.model(one.model)
            at_once = there is not None and not there.waiting
            if at_once and one.request not in besides and has_room(body.destination, one, body.floor):
                return Offered(request=one.request)
        for home in (True, False):
            candidates = (one for one in self._candidates(home=home) if one.request not in besides)
            chosen = choose(candidates, body.destination, floor=body.floor)
            if chosen is not None:
                return Offered(request=chosen.request)
        return Offered(request=None)

    def _stuck(self) -> Iterator[MigrationCandidate]:
        """Yields waiting requests of the models whose first waiting request finds no room, in their order.
        Requests with several choices stay, and so do those of which something has been computed, here or
        elsewhere."""
        for queue in () if self._in_order else filter(self._blocked, self._queues.values()):
            for sequence in queue.waiting:
                stream = self._requests.stream(sequence.request)
                if stream and isinstance(stream.id, str) and stream.body.n == 1 and sequence.untouched:
                    yield self._candidate(stream, [sequence])

    def _blocked(self, queue: ModelQueue) -> bool:
        """Returns whether the first waiting request finds no room beside the blocks that are kept for running
        ones to grow. Quotas, which give way, do not count."""
        first = queue.waiting.first
        if first is None or not queue.page_blocks:
            return False
        geometry = queue.cache.geometry
        kept = kept_to_grow(len(queue.running), geometry.blocks_per_page)
        return geometry.blocks(first.tokens.length) + kept > self._pool.available

    def _candidates(self, *, home: bool) -> Iterator[MigrationCandidate]:
        """Yields requests of which every choice that has not ended decodes. home: those with all choices at
        home; else those with some offloaded."""
        for stream in self._requests.streams:
            live = stream.live
            if not isinstance(stream.id, str) or not live or not all(map(_decodes, live)):
                continue
            if all(map(self._queues[stream.body.model].planner.is_home, live)) == home:
                yield self._candidate(stream, live)

    def _candidate(self, stream: RequestStream, live: list[Sequence]) -> MigrationCandidate:
        return MigrationCandidate(
            request=str(stream.id),
            model=stream.body.model,
            lengths=tuple(sequence.tokens.length for sequence in live),
            left=max(self._left(sequence) for sequence in live),
            level=level_of(stream.body.priority, self._levels),
            shared=len(stream.body.prompt),
        )

    def _left(self, sequence: Sequence) -> int:
        limit = self._queues[sequence.model].card.context_length
        return min(sequence.sampling.max_tokens - sequence.output_length, limit - sequence.tokens.length)


def _decodes(sequence: Sequence) -> bool:
    return sequence.status is Status.RUNNING and sequence.decodes

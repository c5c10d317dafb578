"""Which request leaves the unit (Llumnix, sections 4.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences

from kvloom.engine.batching.view import kept_to_grow
from kvloom.engine.choice import Candidate, choose, has_room
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.requests import Requests
from kvloom.engine.sequence import Sequence, Status
from kvloom.engine.stream import Stream
from kvloom.kv.pool import Pool
from kvloom.types.request import Level, level_of
from kvloom.types.verbs import Offer, Offered


class Llumlet:
    """The unit's word in what the fleet scheduler wants: that knows loads, this knows requests."""

    def __init__(
        self, queues: Mapping[str, ModelQueue], pool: Pool, requests: Requests, levels: Sequences[Level]
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._requests = requests
        self._levels = levels

    def offer(self, body: Offer) -> Offered:
        """Who waits where the first finds no room goes before all that run: nothing is copied. The paper
        leaves them where they are, behind that first one. Then who is at home goes before who is offloaded,
        whose leaving frees no block here, and whose K and V are computed again."""
        besides = frozenset(body.besides)
        for one in self._stuck():
            there = body.destination.models.get(one.model)
            at_once = there is not None and not there.waiting
            if at_once and one.request not in besides and has_room(body.destination, one, body.floor):
                return Offered(request=one.request)
        for home in (True, False):
            candidates = (one for one in self._candidates(home=home) if one.request not in besides)
            chosen = choose(candidates, body.destination, floor=body.floor)
            if chosen is not None:
                return Offered(request=chosen.request)
        return Offered(request=None)

    def _stuck(self) -> Iterator[Candidate]:
        """Requests of models of which the first that waits finds no room, in the order in which they wait.
        Those with several choices stay, and those of which a part is here."""
        for queue in filter(self._blocked, self._queues.values()):
            for sequence in queue.waiting:
                stream = self._requests.stream(sequence.request)
                if stream and isinstance(stream.id, str) and stream.body.n == 1 and sequence.untouched:
                    yield self._candidate(stream, [sequence])

    def _blocked(self, queue: ModelQueue) -> bool:
        """Whether the first that waits finds no room beside what is kept for those that run to grow. Quotas,
        which give way, do not count."""
        if not queue.waiting:
            return False
        geometry = queue.cache.geometry
        kept = kept_to_grow(len(queue.running), geometry.blocks_per_page)
        return geometry.blocks(queue.waiting[0].tokens.length) + kept > self._pool.available

    def _candidates(self, *, home: bool) -> Iterator[Candidate]:
        """Requests of which every choice that has not ended decodes. home: those of which all are; else those
        of which some are offloaded."""
        for stream in self._requests.streams:
            live = stream.live
            if not isinstance(stream.id, str) or not live or not all(map(_decodes, live)):
                continue
            if all(map(self._queues[stream.body.model].planner.is_home, live)) == home:
                yield self._candidate(stream, live)

    def _candidate(self, stream: Stream, live: list[Sequence]) -> Candidate:
        return Candidate(
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

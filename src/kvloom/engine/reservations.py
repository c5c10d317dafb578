"""Room that this engine keeps for K and V that its peers write: reserved, filled, and taken or given back;
and the decode step that waits a little for a request that is about to begin in such room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kvloom.engine.leases import Promises
from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.cache import ModelCache
from kvloom.types.address import KVAddress, KVForm, digest_of, resolve
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, QueueFull
from kvloom.types.request import StartGenerate
from kvloom.types.transfer import Transport
from kvloom.types.verbs import Prepared, PrepRecv

MOST_RESERVATIONS: Final = 255  # of one model
_AGAIN: Final = 0.02  # seconds until a ticket that a sender still writes for is closed again

LONGEST_PART: Final = 0.5  # of a step, for which the step waits for a newcomer
LONGEST_WAIT: Final = 0.1  # seconds, for which it does, however long the step
SOON: Final = 0.7  # of the longest wait, within which a newcomer has to be due, or late
EVERY: Final = 8  # steps after a wait, until there may be another


@dataclass(slots=True)
class KVReservation:
    """Room for one request's tokens, and the answer that its caller has had."""

    body: PrepRecv
    """The request for room as it came, without its `due`."""
    answer: Prepared
    cache: ModelCache
    sequence: int
    """The sequence of `cache` whose room it is."""
    beyond: bool
    """Whether it went beyond the budget of what may be promised."""
    due: float
    """The time at which the lease runs out."""
    expected: float | None
    """The time at which its request is to begin here, if that is known."""


class Reservations:
    """The reservations by request id. Whatever ends one, its blocks come back only once no sender can write
    into them."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        promises: Promises,
        transport: Transport,
        clock: Clock,
        lease: float,
        new_id: Callable[[], int],
    ) -> None:
        self._queues = queues
        self._promises = promises
        self._transport = transport
        self._clock = clock
        self._lease = lease
        self._new_id = new_id
        self._open: dict[str, KVReservation] = {}
        self._closing: list[KVReservation] = []

    @property
    def due(self) -> float | None:
        """When `expire` has something to do."""
        times = [reservation.due for reservation in (*self._open.values(), *self._closing)]
        return min(times, default=None)

    def prepare(self, body: PrepRecv) -> Prepared:
        """Does the verb prep_recv for a checked body. Raises OutOfBlocks if the pool is short or too much of
        it is promised (see `Promises`), QueueFull if there are too many reservations."""
        expected = None if body.due is None else self._clock.now() + body.due
        body = structs.replace(body, due=None)
        known = self._open.get(body.request)
        if known is not None:
            if known.body != body:
                raise BadRequest(f"request {body.request} has another reservation here", param="request")
            self.renew(body.request)
            known.expected = known.expected if expected is None else expected
            return known.answer
        cache = self._queues[body.model].cache
        if sum(one.cache is cache for one in (*self._open.values(), *self._closing)) >= MOST_RESERVATIONS:
            raise QueueFull(
                f"{MOST_RESERVATIONS} reservations of {body.model} are open already", retry_after=1
            )
        end = resolve(body.end, len(body.prompt), "end")
        sequence = self._new_id()
        matched = cache.adopt(sequence, body.prompt, end, salt=body.salt, whole_pages=True)
        try:
            shared = cache.pages.promised_of(cache.page_list(sequence))
            beyond = self._promises.reserve(cache.geometry.blocks(end) - shared)
            answer = self._reserve(body, cache, sequence, matched, end)
        except BaseException:
            cache.remove_sequence(sequence)
            raise
        cache.pages.promise(cache.page_list(sequence))
        due = self._clock.now() + self._lease
        self._open[body.request] = KVReservation(body, answer, cache, sequence, beyond, due, expected)
        return answer

    def has(self, request: str) -> bool:
        """Returns whether room is kept for the request."""
        return request in self._open

    def expected(self, model: str) -> list[float]:
        """Returns when requests of this model for which room is kept are to begin, by the clock, for those of
        which that is known."""
        mine = (
            one.expected for one in self._open.values() if self._queues[one.body.model] is self._queues[model]
        )
        return [at for at in mine if at is not None]

    def _reserve(self, body: PrepRecv, cache: ModelCache, sequence: int, matched: int, end: int) -> Prepared:
        form = self._form(body)
        blocks = cache.prepare_receive(sequence, end - matched) if end > matched else None
        runs = b"" if blocks is None else KVAddress.compress(blocks)
        ranks, rank_blocks = cache.geometry.ranks, cache.pages.rank_blocks
        digest = digest_of(
            model=body.model,
            form=form,
            begin=matched,
            end=end,
            blocks=runs,
            where=self._transport.endpoint.where,
            prompt=body.prompt,
            salt=body.salt,
            ranks=(ranks, rank_blocks),
        )
        try:
            everywhere = KVAddress.runs_over_ranks(runs, ranks, rank_blocks)
            ticket = self._transport.open(matched, digest, everywhere)
        except BaseException:
            if blocks is not None:
                cache.commit_receive(sequence, 0)
            raise
        address = KVAddress(
            model=body.model,
            form=form,
            begin=matched,
            end=end,
            blocks=runs,
            ticket=ticket,
            ranks=ranks,
            rank_blocks=rank_blocks,
        )
        return Prepared(
            matched=matched, end=end, address=address, peer=self._transport.endpoint, lease=self._lease
        )

    def _form(self, body: PrepRecv) -> KVForm:
        form = self._queues[body.model].form
        if body.sender is not None:
            form.refuse_unlike(body.sender, model=body.model)
        return form

    def renew(self, request: str) -> float | None:
        """Renews the lease, unless the reservation went beyond the budget and is in somebody's way. Returns
        the seconds that are left; None if nothing is reserved for `request`."""
        reservation, now = self._open.get(request), self._clock.now()
        if reservation is None:
            return None
        if not (reservation.beyond and self._promises.in_the_way()):
            reservation.due = now + self._lease
        return max(0.0, reservation.due - now)

    def take(self, body: StartGenerate) -> range:
        """Caches the K and V that have been received for a request that starts: of its prompt, or of one
        choice's tokens. Its sequence takes them from the cache like any other prefix. Returns which tokens
        those are. Raises BadRequest if fewer than `begin` have been received."""
        begin = resolve(body.begin, len(body.prompt), "begin")
        reservation = self._open.get(body.request)
        if reservation is None:
            if begin:
                raise BadRequest(
                    f"nothing is reserved for request {body.request}: it never was, or its lease of "
                    f"{self._lease:g} s ran out",
                    param="request",
                )
            return range(0)
        asked, answer = reservation.body, reservation.answer
        contexts = [[*body.prompt, *made.tokens] for made in body.choices]
        alike = any(asked.prompt[: answer.end] == context[: answer.end] for context in contexts)
        if (asked.model, asked.salt) != (body.model, body.salt) or not alike:
            raise BadRequest(f"request {body.request} has reserved room for another prompt", param="request")
        received = self._transport.received(answer.address.ticket)
        if begin > received:
            raise BadRequest(f"begin: {begin} is past the {received} tokens received", param="begin")
        del self._open[body.request]
        if not self._close(reservation):
            raise BadRequest(
                "begin: tokens were still being sent, and what they went to is given up; start_generate "
                "comes after remote_send's answer",
                param="begin",
            )
        return range(answer.matched, received)

    def release(self, request: str) -> None:
        """Gives up a reservation, but keeps what has been received cached; unknown ones are fine."""
        reservation = self._open.pop(request, None)
        if reservation is not None:
            self._close(reservation)

    def release_all(self) -> None:
        for request in list(self._open):
            self.release(request)

    def expire(self) -> None:
        """Gives up the reservations whose lease has run out, and tries again those that senders hold."""
        now = self._clock.now()
        for request in [r for r, reservation in self._open.items() if reservation.due <= now]:
            self.release(request)
        late = [reservation for reservation in self._closing if reservation.due <= now]
        self._closing = [reservation for reservation in self._closing if reservation.due > now]
        for reservation in late:
            self._close(reservation)

    def _close(self, reservation: KVReservation) -> bool:
        """Closes the ticket. Returns False if a sender still writes: it has been told to stop, and soon
        `expire` tries again."""
        ticket = reservation.answer.address.ticket
        received = self._transport.received(ticket)
        closed = self._transport.close(ticket)
        if closed:
            self._keep(reservation, received)
        else:
            reservation.due = self._clock.now() + _AGAIN
            self._closing.append(reservation)
        return closed

    def _keep(self, reservation: KVReservation, received: int) -> None:
        """Caches what has been received, and gives back the room; nobody writes to it any more."""
        cache, sequence, matched = reservation.cache, reservation.sequence, reservation.answer.matched
        self._queues[reservation.body.model].stats.received_tokens += received - matched
        cache.pages.unpromise(cache.page_list(sequence))
        if reservation.answer.end > matched:
            cache.commit_receive(sequence, received - matched)
        cache.keep(sequence, reservation.body.prompt, tail=True)
        cache.remove_sequence(sequence)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait for requests that are due from `since` to `by`; the wait itself lasts until `until`, by the
    clock."""

    since: float
    by: float
    until: float
    step: float
    """Seconds that a step was to take."""


class Arrivals:
    """Requests that are about to arrive: they have room reserved and have said when they come.

    A step takes no newcomer once it has begun, and a request that arrives just then waits for all of it. So
    the step waits for a request that is due within a part of a step, and has it in its batch. A model whose
    steps wait loses `LONGEST_PART` of `EVERY` steps at most, by the clock. No other loses anything: a step
    waits only if nobody else on the unit has a sequence, because its share of the compute might go to a long
    job of theirs meanwhile."""

    def __init__(self, queues: Mapping[str, ModelQueue], reservations: Reservations, clock: Clock) -> None:
        self._queues = queues
        self._reservations = reservations
        self._clock = clock
        self._waiting: set[str] = set()  # models
        self._last: dict[str, _Wait] = {}  # by model

    @property
    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((self._last[model].until for model in self._waiting), default=None)

    def expire(self) -> None:
        """Ends the waits that have lasted as long as was meant."""
        now = self._clock.now()
        self._waiting = {model for model in self._waiting if self._last[model].until > now}

    def waits(self, queue: ModelQueue) -> bool:
        """Returns whether a model's decode step that could begin is to wait. It waits while a newcomer is
        due, but until `due` at most."""
        model = queue.card.name
        coming = self._reservations.expected(model)
        wait = self._wait(queue) if coming else None  # mostly nobody is, and a step costs no more than that
        if wait and self._joins(queue) and any(wait.since <= at <= wait.by for at in coming):
            self._waiting.add(model)
            self._last[model] = wait
            return True
        self._waiting.discard(model)
        return False

    def _wait(self, queue: ModelQueue) -> _Wait | None:
        """Returns the wait that is under way, or the one that there may be from now on; None before it is
        known what a step takes, or soon after a wait."""
        last = self._last.get(queue.card.name)
        if queue.card.name in self._waiting:
            return last
        now, step = self._clock.now(), queue.step_time.least
        if step == 0 or (last and now < last.until + EVERY * max(step, last.step)):
            return None
        longest = min(LONGEST_PART * step, LONGEST_WAIT)
        return _Wait(now - SOON * longest, now + SOON * longest, now + longest, step)

    def _joins(self, queue: ModelQueue) -> bool:
        """Returns whether a newcomer would be in the step, and no other model of the unit has a sequence."""
        others = (other for other in self._queues.values() if other is not queue)
        if any(other.waiting or other.running for other in others):
            return False
        return not queue.waiting and len(queue.running) < queue.max_running

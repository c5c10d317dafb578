"""Room that this engine keeps for K and V that its peers write: reserved, filled, and taken or given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.promises import Promises
from kvloom.kv.cache import ModelCache
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, QueueFull
from kvloom.types.request import StartGenerate
from kvloom.types.transfer import KVAddress, KVForm, Transport, digest_of, resolve
from kvloom.types.verbs import Prepared, PrepRecv

MOST = 255  # of one model
_AGAIN = 0.02  # seconds until a ticket that a sender still writes for is closed again


@dataclass(slots=True)
class Reservation:
    """body: without its `due`. sequence: whose room it is in `cache`. beyond: the budget of what may be
    promised. due: when the lease runs out. expected: when its request is to begin here, if it is known."""

    body: PrepRecv
    answer: Prepared
    cache: ModelCache
    sequence: int
    beyond: bool
    due: float
    expected: float | None


class Reservations:
    """By request id. Whatever ends one, its blocks come back only once no sender can write into them."""

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
        self._open: dict[str, Reservation] = {}
        self._closing: list[Reservation] = []

    @property
    def due(self) -> float | None:
        """When `expire` has something to do."""
        times = [reservation.due for reservation in (*self._open.values(), *self._closing)]
        return min(times, default=None)

    def prepare(self, body: PrepRecv) -> Prepared:
        """The verb prep_recv for a checked body. Raises OutOfBlocks where the pool is short or too much of it
        promised (see `Promises`), QueueFull where there are too many."""
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
        if sum(one.cache is cache for one in (*self._open.values(), *self._closing)) >= MOST:
            raise QueueFull(f"{MOST} reservations of {body.model} are open already", retry_after=1)
        end = resolve(body.end, len(body.prompt), "end")
        sequence = self._new_id()
        matched = cache.adopt(sequence, body.prompt, end, whole_pages=True)
        try:
            shared = cache.pages.promised_of(cache.page_list(sequence))
            beyond = self._promises.reserve(cache.geometry.blocks(end) - shared)
            answer = self._reserve(body, cache, sequence, matched, end)
        except BaseException:
            cache.remove_sequence(sequence)
            raise
        cache.pages.promise(cache.page_list(sequence))
        due = self._clock.now() + self._lease
        self._open[body.request] = Reservation(body, answer, cache, sequence, beyond, due, expected)
        return answer

    def expected(self, model: str) -> list[float]:
        """When requests of this model for which room is kept are to begin, by the clock, if it is known."""
        mine = (one.expected for one in self._open.values() if one.body.model == model)
        return [at for at in mine if at is not None]

    def _reserve(self, body: PrepRecv, cache: ModelCache, sequence: int, matched: int, end: int) -> Prepared:
        form = self._form(body)
        blocks = cache.prepare_receive(sequence, end - matched) if end > matched else None
        runs = b"" if blocks is None else KVAddress.compress(blocks)
        digest = digest_of(
            model=body.model,
            form=form,
            begin=matched,
            end=end,
            blocks=runs,
            where=self._transport.endpoint.where,
            prompt=body.prompt,
        )
        try:
            ticket = self._transport.open(matched, digest)
        except BaseException:
            if blocks is not None:
                cache.commit_receive(sequence, 0)
            raise
        address = KVAddress(model=body.model, form=form, begin=matched, end=end, blocks=runs, ticket=ticket)
        return Prepared(
            matched=matched, end=end, address=address, peer=self._transport.endpoint, lease=self._lease
        )

    def _form(self, body: PrepRecv) -> KVForm:
        form = self._queues[body.model].form
        if body.sender is not None:
            form.refuse_unlike(body.sender, model=body.model)
        return form

    def renew(self, request: str) -> float | None:
        """For another lease, unless it went beyond the budget and is in somebody's way. Returns the seconds
        that are left; None where nothing is reserved for `request`."""
        reservation, now = self._open.get(request), self._clock.now()
        if reservation is None:
            return None
        if not (reservation.beyond and self._promises.in_the_way()):
            reservation.due = now + self._lease
        return max(0.0, reservation.due - now)

    def take(self, body: StartGenerate) -> range:
        """start_generate is here: what has been received, of its prompt or of what one of its choices has,
        becomes cached, from where its sequence takes it like any other prefix. Returns which tokens that are.
        Raises BadRequest where less than `begin` has been received."""
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
        if asked.model != body.model or not alike:
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
        """Give up a reservation, but keep what has been received cached; unknown ones are fine."""
        reservation = self._open.pop(request, None)
        if reservation is not None:
            self._close(reservation)

    def release_all(self) -> None:
        for request in list(self._open):
            self.release(request)

    def expire(self) -> None:
        """Give up the reservations whose lease has run out, and try again those that senders hold."""
        now = self._clock.now()
        for request in [r for r, reservation in self._open.items() if reservation.due <= now]:
            self.release(request)
        late = [reservation for reservation in self._closing if reservation.due <= now]
        self._closing = [reservation for reservation in self._closing if reservation.due > now]
        for reservation in late:
            self._close(reservation)

    def _close(self, reservation: Reservation) -> bool:
        """False where a sender still writes: it has been told to stop, and soon `expire` tries again."""
        ticket = reservation.answer.address.ticket
        received = self._transport.received(ticket)
        closed = self._transport.close(ticket)
        if closed:
            self._keep(reservation, received)
        else:
            reservation.due = self._clock.now() + _AGAIN
            self._closing.append(reservation)
        return closed

    def _keep(self, reservation: Reservation, received: int) -> None:
        """Nobody writes any more: what has been received is cached from now on, and the room is nobody's."""
        cache, sequence, matched = reservation.cache, reservation.sequence, reservation.answer.matched
        self._queues[reservation.body.model].tally.received_tokens += received - matched
        cache.pages.unpromise(cache.page_list(sequence))
        if reservation.answer.end > matched:
            cache.commit_receive(sequence, received - matched)
        cache.keep(sequence, reservation.body.prompt, tail=True)
        cache.remove_sequence(sequence)

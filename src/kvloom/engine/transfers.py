"""The verb remote_send: K and V that are cached go at once; those that are not are computed, and go layer by
layer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from msgspec.structs import replace

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.requests import Requests, RequestStream
from kvloom.types.address import Endpoint, Ticket, resolve
from kvloom.types.clock import together
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate
from kvloom.types.transfer import Transfer, Transport
from kvloom.types.verbs import RemoteSend, Sent

_REMEMBERED = 1024  # sends whose answer is kept for a caller that asks again

_Key = tuple[str, Endpoint, Ticket, int, int, int]  # the last is the digest of address, peer and prompt


class _GivenUp(Exception):
    """The caller of the send has hung up; others may still wait for it."""


class Transfers:
    """The sends of a unit, by request and destination."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        transport: Transport,
        requests: Requests,
        *,
        wake: Callable[[], None],
        jobs: Callable[[], int],
    ) -> None:
        """wake: tells the loop that there is a sequence to compute. jobs: says how many it has started."""
        self._queues = queues
        self._transport = transport
        self._requests = requests
        self._wake = wake
        self._jobs = jobs
        self._known: dict[_Key, asyncio.Future[Sent]] = {}
        self._open: dict[str, set[Transfer]] = {}
        self._computing: dict[Transfer, RequestStream] = {}
        self._stopped = False

    async def send(self, body: RemoteSend) -> Sent:
        """Returns once every byte has arrived. The same send again joins the first, or gets its answer."""
        begin, end = self._range(body)
        digest = body.address.digest(body.prompt, body.peer, body.salt)
        key = (body.request, body.peer, body.address.ticket, begin, end, digest)
        while key in self._known:
            with suppress(_GivenUp):  # then this caller's turn has come
                return await asyncio.shield(self._known[key])
        if self._stopped:
            raise Unavailable("the engine is stopping")
        answer = self._known[key] = asyncio.get_running_loop().create_future()
        try:
            sent = await self._send(body, digest, begin, end)
        except BaseException as error:
            del self._known[key]
            given_up = isinstance(error, asyncio.CancelledError)
            answer.set_exception(_GivenUp() if given_up else error)
            answer.exception()  # whether or not anyone has joined
            raise
        answer.set_result(sent)
        self._forget()
        return sent

    def _forget(self) -> None:
        """Forgets the oldest answers; a send that is under way has none yet."""
        answered = (key for key, answer in self._known.items() if answer.done())
        for key in list(islice(answered, max(0, len(self._known) - _REMEMBERED))):
            del self._known[key]

    async def send_what_is_here(self, bodies: Sequence[RemoteSend]) -> list[int]:
        """Starts all sends at the same time, each up to its end or as far as its tokens are cached. Returns
        how far they have come."""
        ranges = [self._here(body) for body in bodies]
        orders = [
            replace(body, end=end) for body, (begin, end) in zip(bodies, ranges, strict=True) if begin < end
        ]
        if len(orders) == 1:
            await self.send(orders[0])
        elif orders:
            async with together() as group:
                for order in orders:
                    group.create_task(self.send(order))
        return [end for _, end in ranges]

    def _here(self, body: RemoteSend) -> tuple[int, int]:
        """Returns the token that the send begins with, and the one up to which it is cached."""
        length = len(body.prompt)
        begin, end = resolve(body.begin, length, "begin"), resolve(body.end, length, "end")
        _, cached = self._queues[body.model].cache.prefixes.match(body.prompt, end, body.salt)
        return begin, max(begin, cached)

    def abort(self, request: str) -> None:
        """Gives up the request's sends; unknown ones are fine."""
        for transfer in self._open.get(request, ()):
            transfer.abandon()
            stream = self._computing.get(transfer)
            if stream is not None:
                self._requests.close(stream, "abort")

    def give_way(self) -> None:
        """Gives up the last send, unless one is about to end. It is called when no job runs and none can
        start. Sends that were put back keep the pages they have sent from, and everybody else may wait for
        those."""
        if len(self._computing) < sum(map(len, self._open.values())):
            return
        keeping = [transfer for transfer in self._computing if transfer.held]
        if keeping:
            last = max(keeping, key=lambda one: self._computing[one].sequences[0].order)
            stream = self._computing.pop(last)
            self._requests.close(stream, "abort", "the send gave its blocks to others; ask again")

    def stop(self) -> None:
        """Gives up all sends, and takes no more."""
        self._stopped = True
        for request in self._open:
            self.abort(request)

    def _range(self, body: RemoteSend) -> tuple[int, int]:
        address, length = body.address, len(body.prompt)
        begin, end = resolve(body.begin, length, "begin"), resolve(body.end, length, "end")
        if address.model != body.model:
            raise BadRequest(f"address: it is {address.model}'s, not {body.model}'s", param="address")
        self._queues[body.model].form.refuse_unlike(address.form, model=body.model)
        if not address.begin <= begin <= end <= address.end <= length:
            raise BadRequest(
                f"begin, end: [{begin}, {end}) is not within the address, which takes "
                f"[{address.begin}, {address.end})",
                param="begin",
            )
        return begin, end

    async def _send(self, body: RemoteSend, digest: int, begin: int, end: int) -> Sent:
        queue = self._queues[body.model]
        transfer = self._transport.claim(body.peer, body.address, digest, begin, end)
        self._open.setdefault(body.request, set()).add(transfer)
        try:
            cached = self._send_cached(queue, body, transfer)
            if transfer.sent < end:
                cached = await self._compute(body, transfer)
            await transfer.arrived()
        finally:
            await self._settle(queue, body.request, transfer)
        return Sent(cached=max(0, cached - begin), computed=end - max(begin, cached))

    def _send_cached(self, queue: ModelQueue, body: RemoteSend, transfer: Transfer) -> int:
        """Sends all at once if all is cached; otherwise it sends nothing yet. Returns how many tokens are
        cached."""
        cache, sequence = queue.cache, self._requests.new_id()
        cached = cache.adopt(sequence, body.prompt, transfer.end, salt=body.salt)
        if cached == transfer.end:
            queue.stats.cached_tokens += transfer.end - transfer.sent
            cache.sends.begin(sequence, transfer, cached)
            cache.sends.leave(sequence, transfer)
        cache.remove_sequence(sequence)
        return cached

    async def _compute(self, body: RemoteSend, transfer: Transfer) -> int:
        """Computes the send as a request like any other, except that it draws no token. Returns how many
        tokens were cached."""
        order = StartGenerate(
            model=body.model,
            request=body.request,
            prompt=body.prompt[: transfer.end],
            sampling=SamplingParams(max_tokens=0, seed=0),
            priority=body.priority,
            salt=body.salt,
            tenant=body.tenant,
        )
        stream = self._computing[transfer] = self._requests.open(order, transfer)
        try:
            self._requests.begin(stream, [None], self._jobs(), foreign=range(transfer.sent))
            self._wake()
            frame, over = await stream.frame()
            while not over:
                frame, over = await stream.frame()
        finally:
            self._computing.pop(transfer, None)
            self._requests.close(stream, "abort")
        end = next(event for event in frame if isinstance(event, EndEvent))
        if end.reason == "error" and not self._stopped:
            raise KvloomError(end.message)
        if end.reason in ("abort", "error"):
            raise Unavailable(end.message or "the request was aborted")
        return end.cached_tokens

    async def _settle(self, queue: ModelQueue, request: str, transfer: Transfer) -> None:
        """Ends the copies, and then gives back the pages that were kept for them. If the caller is cancelled
        meanwhile, the pages are still kept until then: a copy that is under way reads them for some
        milliseconds more."""
        interrupted: asyncio.CancelledError | None = None
        try:
            transfer.abandon()
            while not transfer.over:
                try:
                    await transfer.arrived()
                except KvloomError:
                    break
                except asyncio.CancelledError as error:
                    interrupted = error
        finally:
            queue.cache.sends.settle(transfer)
            self._wake()  # others may have waited for the pages
            self._open[request].discard(transfer)
            if not self._open[request]:
                del self._open[request]
        if interrupted is not None:
            raise interrupted

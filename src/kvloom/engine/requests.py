"""Every live request of an engine: let in, fed with tokens, ended exactly once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from kvloom.engine.guide import GuideState
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence, Status, StreamId, TokenBuffer
from kvloom.types.errors import BadRequest, GuideFailed, KvloomError, QueueFull, UnknownModel
from kvloom.types.request import (
    EndEvent,
    Event,
    FinishReason,
    ModelCard,
    PromptEvent,
    StartGenerate,
    TokenEvent,
    TokenLogprob,
    check_prompt,
    check_request,
)
from kvloom.types.transfer import Transfer

MOST_UNREAD: Final = 256
"""Events that wait for a caller who takes none before its request stands still."""


@dataclass(slots=True, eq=False)
class RequestStream:
    """The events of one request on their way to its caller. They are held back until there are
    `body.interval` of them for each open choice, or one of them is a choice's first token or its end."""

    id: StreamId
    """No other live stream has this id."""
    body: StartGenerate
    sequences: list[Sequence]
    """The choices, in order."""
    filled: Callable[[RequestStream], None]
    """Called when the stream becomes full."""
    full: bool = False
    """Whether the caller has left more than `MOST_UNREAD` events, besides those of a frame, untaken."""
    _events: list[Event] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _awaited: bool = False  # whether the caller waits for the next frame
    _refusal: KvloomError | None = None
    _open: int = field(init=False)
    _most: int = field(init=False)

    def __post_init__(self) -> None:
        self._open = len(self.sequences)
        self._most = MOST_UNREAD + self.body.interval * self._open

    @property
    def ended(self) -> bool:
        return self._open == 0

    @property
    def live(self) -> list[Sequence]:
        """The choices that have not ended, and are not about to."""
        return [one for one in self.sequences if not one.over and one.status is not Status.ENDED]

    @property
    def in_job(self) -> bool:
        return any(sequence.in_job for sequence in self.sequences)

    def add(self, event: Event) -> None:
        """Adds a choice's next event."""
        self._events.append(event)
        if isinstance(event, EndEvent):
            self._open -= 1
            self._ready.set()
        elif (isinstance(event, TokenEvent) and event.index == 0) or len(
            self._events
        ) >= self.body.interval * self._open:
            self._ready.set()
            if len(self._events) > self._most and not self._awaited:
                self._note_full()

    def extend(self, events: list[TokenEvent]) -> None:
        """Adds tokens of one choice, of which none is its last."""
        self._events += events
        if len(self._events) >= self.body.interval * self._open:
            self._ready.set()
            if len(self._events) > self._most and not self._awaited:
                self._note_full()

    def begin(self) -> None:
        """Lets a frame come, perhaps an empty one: a choice's prompt is being computed."""
        self._ready.set()

    def _note_full(self) -> None:
        self.full = True
        self.filled(self)

    def refuse(self, error: KvloomError) -> None:
        """Ends a stream that has no event yet: `frame` raises the error."""
        self._refusal, self._open = error, 0
        self._ready.set()

    async def frame(self) -> tuple[list[Event], bool]:
        """Waits for an event. Returns all since the last frame, and whether they are the last. Raises the
        error with which the stream was refused."""
        self._awaited = True
        await self._ready.wait()
        self._awaited = False
        self._ready.clear()
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events, []
        return events, self._open == 0


T = TypeVar("T")


class DeferredActions:
    """Actions on requests that must not run while the request is in a job."""

    def __init__(self) -> None:
        self._waiting: list[tuple[RequestStream, Callable[[], None]]] = []
        self._done = False  # whether any has run since `let_callers_run`

    async def do(self, stream: RequestStream, action: Callable[[], T]) -> T:
        """Runs the action at once, or when the job under way has ended, before the next one begins. Returns
        the action's result, or raises its KvloomError."""
        if not stream.in_job:
            return action()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def do() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(action())
            except KvloomError as error:
                done.set_exception(error)

        self._waiting.append((stream, do))
        return await done

    async def let_callers_run(self) -> None:
        """Lets callers whose actions have run go on before the next job begins and takes the core."""
        if self._done:
            self._done = False
            await asyncio.sleep(0)  # each caller goes on from its future
            await asyncio.sleep(0)  # and the tasks that it starts, one for each send of a `hold`, begin

    def later(self, stream: RequestStream, action: Callable[[], None]) -> None:
        """Runs the action when the job that has made the stream's last event is processed."""
        self._waiting.append((stream, action))

    def run(self) -> None:
        """Runs the actions that waited for the job that has ended."""
        if not self._waiting:
            return
        waiting, self._waiting, self._done = self._waiting, [], True
        for stream, do in waiting:
            if stream.in_job:
                self._waiting.append((stream, do))
            else:
                do()


class Requests:
    """The requests that have not ended, by id. A choice ends by its own tokens, by its request's abort, or by
    an error; its blocks come back then, or with the end of the job it is in."""

    def __init__(self, queues: Mapping[str, ModelQueue]) -> None:
        self._queues = queues
        self._streams: dict[StreamId, RequestStream] = {}
        self.deferred = DeferredActions()
        self.new_id = itertools.count().__next__
        self._arrivals = itertools.count()

    @property
    def ids(self) -> list[StreamId]:
        return list(self._streams)

    @property
    def streams(self) -> Iterable[RequestStream]:
        """The streams that have not ended, those of sends included."""
        return self._streams.values()

    def stream(self, request: StreamId) -> RequestStream | None:
        """Returns the stream of a request; None if it is not here, or has ended."""
        return self._streams.get(request)

    def open(self, body: StartGenerate, transfer: Transfer | None = None) -> RequestStream:
        """Lets a checked request in. It can be ended from here on, and computes nothing before `begin`.
        Raises BadRequest if its id is in use, and QueueFull. transfer: takes its K and V to a peer; a request
        may have several at a time."""
        name: StreamId = body.request if transfer is None else self.new_id()
        if name in self._streams:
            raise BadRequest(f"request id {name} is in use", param="request")
        self._displaced_by(body)  # raises QueueFull, before a guide is compiled; `begin` chooses anew
        arrival = next(self._arrivals)
        prompt, prompt_logprobs = np.asarray(body.prompt, dtype=np.int64), list[TokenLogprob]()
        texts = {at + 1: np.asarray(text, dtype=np.int64) for at, text in enumerate(body.more)}
        sequences = [
            Sequence(
                id=self.new_id(),
                model=body.model,
                request=name,
                choice=made.choice,
                order=(body.priority, arrival, made.choice),
                sampling=body.sampling,
                tokens=TokenBuffer(texts.get(made.choice, prompt), made.tokens),
                pair=body.pairs[made.choice] if body.pairs else 0,
                prompt_logprobs=prompt_logprobs,
                transfer=transfer,
                salt=body.salt,
                tenant=body.tenant,
            )
            for made in body.choices
        ]
        stream = self._streams[name] = RequestStream(name, body, sequences, self._filled)
        return stream

    def begin(
        self, stream: RequestStream, guides: list[GuideState | None], jobs: int, foreign: range = range(0)
    ) -> None:
        """Enqueues the choices of an open request that nobody has ended. Raises QueueFull if other requests
        have filled the queue meanwhile, and none of them gives way.
        guides: one for each choice, which has stepped over its tokens. jobs: how many the unit has started.
        foreign: see `Sequence`.
        """
        body, queue = stream.body, self._queues[stream.body.model]
        displaced = self._displaced_by(body)
        if displaced is not None:
            self._refuse(displaced)
        for sequence, guide in zip(stream.sequences, guides, strict=True):
            sequence.guide, sequence.foreign = guide, foreign
            if not sequence.over:
                self._end_if_made(sequence)
        live = [sequence for sequence in stream.sequences if not sequence.over]
        fresh = [sequence for sequence in live if not sequence.output_length]
        if body.task != "generate":
            for sequence in fresh:  # each has a text of its own
                queue.enqueue(sequence, jobs)
        elif fresh:
            first, *siblings = fresh
            first.siblings.extend(siblings)
            if body.sampling.prompt_logprobs is not None and len(body.prompt) == 1:
                stream.add(PromptEvent(first.prompt_logprobs))  # all there is: it has one token
            queue.enqueue(first, jobs)
        for sequence in live:
            if sequence.output_length:
                queue.enqueue(sequence, jobs)

    def _end_if_made(self, sequence: Sequence) -> None:
        """Ends a sequence that has tokens from elsewhere if its guide has not taken them all, or if they are
        all that it may have."""
        made, guide = sequence.output_length, sequence.guide
        if guide and guide.taken < made:
            self._fail_guide(sequence, guide, guide.taken, "made: token {} breaks the guide")
        elif made:
            self._end_after(sequence, int(sequence.tokens.output[-1]))

    def _displaced_by(self, body: StartGenerate) -> RequestStream | None:
        """Returns the request that is to give its place in a full queue to this one: the last one of the
        tenant of whom most wait. Returns None if the queue is not full, or the request goes on from another
        unit and so comes in anyway. Raises QueueFull if none gives way."""
        queue = self._queues[body.model]
        if not queue.waiting_full or body.made:
            return None
        for sequence in queue.waiting.who_gives_way(body.tenant, body.priority):
            stream = self._streams[sequence.request]
            # A send, whose id is a number, gives no place.
            if isinstance(stream.id, str) and all(one.untouched for one in stream.sequences):
                return stream
        raise QueueFull(f"{len(queue.waiting)} requests wait for {queue.card.name} already", retry_after=1)

    def _refuse(self, stream: RequestStream) -> None:
        """Ends a request of which nothing was computed, as if it had not been let in."""
        queue = self._queues[stream.body.model]
        queue.stats.displaced += 1
        for sequence in stream.live:
            sequence.over = True
            queue.release(sequence, Status.ENDED)
        del self._streams[stream.id]
        stream.refuse(
            QueueFull(
                f"{len(queue.waiting)} requests wait for {queue.card.name}, most of them from where this one "
                "comes; it gave its place to another's",
                retry_after=1,
            )
        )

    def _filled(self, stream: RequestStream) -> None:
        self.deferred.later(stream, lambda: self._stop_unread(stream))

    def _stop_unread(self, stream: RequestStream) -> None:
        """Lets the choices of a full stream stand still until it is read. What they have computed stays
        cached as long as nobody wants the blocks, and is computed again otherwise."""
        for sequence in stream.live if stream.full else ():
            if sequence.output_length and sequence.status in (Status.RUNNING, Status.WAITING):
                self._queues[sequence.model].stand_still(sequence)

    def go_on(self, stream: RequestStream, jobs: int) -> None:
        """Lets the choices of a stream that was full go on, because it has been read. jobs: how many the unit
        has started."""
        stream.full = False
        for sequence in stream.live:
            if sequence.status is Status.UNREAD:
                sequence.become(Status.WAITING)
                self._queues[sequence.model].enqueue(sequence, jobs)

    def check(self, body: StartGenerate) -> None:
        """Raises UnknownModel, PromptTooLong or BadRequest if the request is wrong by itself."""
        check_request(body, self._card(body.model))

    def check_prompt(self, model: str, prompt: list[int]) -> None:
        """Checks a prompt whose K and V are asked for. Raises UnknownModel, PromptTooLong, and BadRequest,
        also for a model that makes vectors, which keeps none."""
        card = self._card(model)
        if card.task != "generate":
            raise BadRequest(
                f"model {card.name} makes vectors of texts and keeps no K and V; one that generates is right",
                param="model",
            )
        check_prompt(prompt, card)

    def _card(self, model: str) -> ModelCard:
        if model not in self._queues:
            raise UnknownModel.named(model, self._queues)
        return self._queues[model].card

    def cancel(
        self, request: StreamId, reason: FinishReason, message: str = "", *, choice: int | None = None
    ) -> None:
        """Ends every choice that still runs, or only `choice`. Unknown and ended requests are fine."""
        if stream := self._streams.get(request):
            self.close(stream, reason, message, choice=choice)

    def close(
        self, stream: RequestStream, reason: FinishReason, message: str = "", *, choice: int | None = None
    ) -> None:
        """Does what `cancel` does, for a stream whose id another request may have by now."""
        for sequence in stream.sequences:
            if choice not in (None, sequence.choice):
                continue
            if not sequence.over and sequence.status is not Status.ENDED:
                self.end(sequence, reason, message=message)

    def release(self, queue: ModelQueue, sequence: Sequence) -> None:
        """Releases a sequence that has ended and is in no job. The first sibling that waits for its prompt
        takes its place in the queue."""
        queue.release(sequence, Status.ENDED)
        waiting, sequence.siblings = [s for s in sequence.siblings if not s.over], []
        if waiting:
            first, *rest = waiting
            first.siblings.extend(rest)
            queue.enqueue(first, sequence.waiting_since)

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """Appends a drawn token and adds its event to the stream; the token may end the sequence."""
        index = sequence.tokens.made
        sequence.tokens.append(token)
        if sequence.guide and not sequence.guide.accepts(token):
            self._fail_guide(sequence, sequence.guide, index, "token {} breaks the guide that drew it")
            return
        self._streams[sequence.request].add(TokenEvent(sequence.choice, index, token, logprob))
        self._end_after(sequence, token)

    def _fail_guide(self, sequence: Sequence, guide: GuideState, index: int, broken: str) -> None:
        """Ends a sequence whose guide does not take its token `index`. If the guide gave up, the request is
        to blame. broken: the message about the token if the guide did not give up."""
        asked = sequence.sampling.guide
        if asked is None or not guide.problem:
            self.end(sequence, "error", message=broken.format(sequence.tokens.output[index]))
            return
        message = f"{asked.param}: after {index} tokens {guide.problem}"
        self.end(sequence, "error", message=message, code=GuideFailed.code, param=asked.param)

    def _end_after(self, sequence: Sequence, token: int) -> None:
        """Ends the sequence if its last token, `token`, does."""
        sampling, tokens, card = sequence.sampling, sequence.tokens, self._queues[sequence.model].card
        if token in sampling.stop_token_ids:
            self.end(sequence, "stop", stop_token=token)
        elif tokens.made >= sampling.max_tokens or tokens.length >= card.context_length:
            self.end(sequence, "length")
        elif sequence.guide and sequence.guide.done:
            self.end(sequence, "stop")

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        message: str = "",
        code: str = "",
        param: str = "",
        vector: bytes = b"",
    ) -> None:
        """Ends a sequence; it is released now, or when its job has ended. code, param: see `EndEvent`."""
        sequence.over = True
        if not sequence.in_job:
            self.release(self._queues[sequence.model], sequence)
        stream = self._streams[sequence.request]
        cached = sequence.cached or 0
        stream.add(EndEvent(sequence.choice, reason, stop_token, cached, message, code, param, vector))
        if stream.ended:
            del self._streams[sequence.request]

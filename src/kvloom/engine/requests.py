"""Every live request of an engine: let in, fed with tokens, ended exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from kvloom.core.errors import BadRequest, PromptTooLong, QueueFull, UnknownModel
from kvloom.core.job import JobResult, Phase
from kvloom.core.request import EndEvent, FinishReason, PromptEvent, StartGenerate, TokenEvent, TokenLogprob
from kvloom.engine.flight import Flight
from kvloom.engine.guide import GuideCompiler, GuideState
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.outbound import Outbound
from kvloom.engine.sequence import Sequence, Status
from kvloom.engine.stream import Stream
from kvloom.engine.tokens import Tokens


class Requests:
    """Streams by request id. A choice ends by its own tokens, by its request's abort, or by an error; its
    blocks come back then, or with the end of the job it is in."""

    def __init__(self, queues: Mapping[str, ModelQueue]) -> None:
        self._queues = queues
        self._guides = {name: GuideCompiler(queue.card) for name, queue in queues.items()}
        self._streams: dict[str, Stream] = {}
        self.new_id = itertools.count().__next__
        self._arrivals = itertools.count()

    @property
    def ids(self) -> list[str]:
        return list(self._streams)

    def guides(self, body: StartGenerate) -> list[GuideState | None]:
        """One for each choice. May take a second for a large grammar, so it is safe on any thread."""
        guide = body.sampling.guide
        return [*self._guides[body.model].start(guide, body.n)] if guide else [None] * body.n

    def open(
        self,
        body: StartGenerate,
        guides: list[GuideState | None],
        now: int,
        outbound: Outbound | None = None,
    ) -> Stream:
        """Let a checked request in, or raise why not now. now: jobs that the unit has started.
        outbound: where its K and V go."""
        queue = self._queues[body.model]
        self._admits(body, queue)
        arrival = next(self._arrivals)
        prompt, prompt_logprobs = np.asarray(body.prompt, dtype=np.int64), list[TokenLogprob]()
        sequences = [
            Sequence(
                id=self.new_id(),
                model=body.model,
                request=body.request,
                choice=choice,
                order=(body.priority, arrival, choice),
                sampling=body.sampling,
                tokens=Tokens(prompt),
                prompt_logprobs=prompt_logprobs,
                guide=guide,
            )
            for choice, guide in enumerate(guides)
        ]
        first, *siblings = sequences
        first.outbound = outbound
        first.siblings.extend(siblings)
        stream = self._streams[body.request] = Stream(body, sequences)
        if body.sampling.prompt_logprobs is not None and len(body.prompt) == 1:
            stream.add(PromptEvent(prompt_logprobs))  # all there is: nothing comes before the only token
        queue.enqueue(first, now)
        return stream

    def _admits(self, body: StartGenerate, queue: ModelQueue) -> None:
        if body.request in self._streams:
            raise BadRequest(f"request id {body.request} is in use", param="request")
        if queue.full:
            raise QueueFull(f"{len(queue.waiting)} requests wait for {body.model} already", retry_after=1)

    def check(self, body: StartGenerate) -> None:
        """Raise what is wrong with a request, before anything is made for it."""
        self.check_prompt(body.model, body.prompt)
        queue = self._queues[body.model]
        card = queue.card
        if len(body.prompt) >= card.context_length:
            raise PromptTooLong(
                f"the prompt has {len(body.prompt)} tokens, and {card.name} holds {card.context_length} "
                "in all",
                param="prompt",
            )
        for param in ("logit_bias", "stop_token_ids"):
            for token in getattr(body.sampling, param):
                if not 0 <= token < card.vocab_size:
                    raise BadRequest(
                        f"{param}: token {token} is outside the vocabulary of {card.vocab_size}", param=param
                    )
        self._admits(body, queue)

    def check_prompt(self, model: str, prompt: list[int]) -> None:
        """Raise what is wrong with a prompt by itself."""
        queue = self._queues.get(model)
        if queue is None:
            raise UnknownModel(f"the model `{model}` is not served here; served: {', '.join(self._queues)}")
        card = queue.card
        if len(prompt) > card.context_length:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, and {card.name} holds {card.context_length} in all",
                param="prompt",
            )
        if max(prompt, default=0) >= card.vocab_size:
            raise BadRequest(
                f"prompt token {max(prompt)} is not in {card.name}'s vocabulary of {card.vocab_size}",
                param="prompt",
            )

    def cancel(
        self, request: str, reason: FinishReason, message: str = "", *, choice: int | None = None
    ) -> None:
        """End every choice that still runs, or the one. Unknown and ended requests are fine."""
        stream = self._streams.get(request)
        if stream:
            self.close(stream, reason, message, choice=choice)

    def close(
        self, stream: Stream, reason: FinishReason, message: str = "", *, choice: int | None = None
    ) -> None:
        """`cancel` for a request in hand, whose id may be another's by now."""
        for sequence in stream.sequences:
            if choice not in (None, sequence.choice):
                continue
            if not sequence.cancelled and sequence.status is not Status.ENDED:
                self._end(sequence, reason, message=message)

    def land(self, flight: Flight, result: JobResult, now: int) -> None:
        """A job has ended: its tokens go to their sequences and streams."""
        queue = self._queues[flight.job.model]
        for asker, report in zip(flight.asked, result.prompt_logprobs, strict=True):
            self._report_prompt(asker, report)
        for sequence, count in flight.batch:
            sequence.in_job = False
            sequence.computed += count
            if sequence.outbound:
                sequence.outbound.computed(sequence.computed)
            if sequence.pending == 0:
                if flight.job.phase is Phase.PREFILL:
                    queue.cache.keep(sequence.id, sequence.tokens.list())
                siblings, sequence.siblings = sequence.siblings, []
                for sibling in siblings:
                    if not sibling.cancelled:
                        queue.fork(sequence, sibling, now)
            if sequence.cancelled:
                self._release(queue, sequence)
            elif sequence.pending == 0 and not sequence.draws:
                self._end(sequence, "length")
        for drawer, token, logprob in zip(flight.drawers, result.tokens, result.logprobs, strict=True):
            if not drawer.cancelled:
                self._append(drawer, token, logprob)

    def fail(self, flight: Flight, error: BaseException) -> None:
        """A job has failed: so have its sequences, and nothing else."""
        queue = self._queues[flight.job.model]
        for sequence, _ in flight.batch:
            sequence.in_job = False
            if sequence.cancelled:
                self._release(queue, sequence)
        message = f"the job failed ({type(error).__name__}); the engine's log has more"
        for sequence, _ in flight.batch:
            if not sequence.cancelled:
                self.cancel(sequence.request, "error", message)

    def _release(self, queue: ModelQueue, sequence: Sequence) -> None:
        """It has ended and is in no job. The first of those who wait for its prompt takes its place."""
        queue.release(sequence, Status.ENDED)
        heirs, sequence.siblings = [s for s in sequence.siblings if not s.cancelled], []
        if heirs:
            first, *rest = heirs
            first.siblings.extend(rest)
            queue.enqueue(first, sequence.waiting_since)

    def _report_prompt(self, sequence: Sequence, logprob: TokenLogprob) -> None:
        sequence.prompt_logprobs.append(logprob)
        if len(sequence.prompt_logprobs) < sequence.prompt_length - 1:
            return
        stream = self._streams.get(sequence.request)
        if stream and sequence in stream.sequences:  # it may have ended, but not all choices with it
            stream.add(PromptEvent(sequence.prompt_logprobs))

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        index = sequence.output_length
        sequence.tokens.append(token)
        if sequence.guide and not sequence.guide.accepts(token):
            self._end(sequence, "error", message=f"token {token} breaks the guide that drew it")
            return
        self._streams[sequence.request].add(TokenEvent(sequence.choice, index, token, logprob))
        reason = sequence.ends_with(token, self._queues[sequence.model].card.context_length)
        if reason:
            stop = token if token in sequence.sampling.stop_token_ids else None
            self._end(sequence, reason, stop_token=stop)

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, stop_token: int | None = None, message: str = ""
    ) -> None:
        sequence.cancelled = True
        if not sequence.in_job:
            self._release(self._queues[sequence.model], sequence)
        stream = self._streams[sequence.request]
        stream.add(EndEvent(sequence.choice, reason, stop_token, sequence.cached or 0, message))
        if stream.ended:
            del self._streams[sequence.request]

"""Who generates for a request: one replica, and then those that it moves to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from kvloom.cluster.freeness import Arrival
from kvloom.router.fleet import Fleet
from kvloom.router.holdings import Holdings
from kvloom.router.progress import Progress, less_cached
from kvloom.router.replica import Replica
from kvloom.types.address import resolve
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.request import Event, Made, StartGenerate

Frames = AsyncGenerator[list[Event], None]


def arriving(body: StartGenerate) -> Arrival:
    made = sum(len(one.tokens) for one in body.made)
    return Arrival(body.model, len(body.prompt), len(body.choices), body.priority, made)


class Lost(KvloomError):
    """The engine has ended all that was left of a request with an error: another may go on."""


class _Moved(NamedTuple):
    """Where a request goes on, and as what. It is let in there."""

    frames: Frames
    replica: Replica
    name: str


class Course:
    """needs: tokens of context that the replica which took the request first has promised; 0 before.
    refused: replicas that would not, or could not, generate. running: who has let it in. computed: tokens
    whose K and V were made elsewhere for this request."""

    def __init__(self, body: StartGenerate, fleet: Fleet, holdings: Holdings, progress: Progress) -> None:
        self.needs = 0
        self.refused: set[Replica] = set()
        self.running: Replica | None = None
        self.computed = 0
        self._body = body
        self._fleet = fleet
        self._holdings = holdings
        self._progress = progress
        self._running_as = ""
        self._moved: _Moved | None = None  # where it goes on once `running` has told all it has

    def runs(self, replica: Replica, name: str) -> bool:
        """Whether `replica` generates it, under this id."""
        return self.running is replica and self._running_as == name

    def is_to_compute(self, replica: Replica, begin: int, end: int) -> None:
        """prompt[begin:end], less what the replica probably has cached."""
        prompt = self._body.prompt
        self._holdings.is_to_compute(replica, self._fleet.to_compute(prompt, replica, begin, end))

    async def begin(self, replica: Replica, name: str, begin: int) -> Frames:
        """At `replica`, where prompt[:begin] has been received, and wherever the request moves from there.
        Choices that were aborted while nobody generated end first."""
        if self._progress.unwanted:
            yield self._progress.end_unwanted()
            if self._progress.over:
                return
        here: Frames | None = self._generate(replica, self._rest(name, begin, self._progress.made))
        try:
            while here is not None:
                async with aclosing(here):
                    async for frame in here:
                        yield frame
                here = None
                if self._moved is not None and not self._progress.over:
                    here, self.running, self._running_as = self._moved
                    self._moved = None
        finally:
            left, self._moved = self._moved, None
            if left is not None:
                await left.frames.aclose()

    async def hand_over(
        self, source: Replica, before: str, target: Replica, made: list[Made], name: str
    ) -> None:
        """Go on at `target` as `name` after `made`, which is empty where it has not begun, once `source`,
        where it runs as `before`, has told the last of it. Raises KvloomError, and all is as it was, where
        the target does not let it in or the request has gone on otherwise."""
        if not target.up:  # by now: room there is no call, and nothing that a drain waits for
            raise Unavailable(f"{target.name} takes no requests any more")
        refused = target in self.refused
        moved = self._generate(target, self._rest(name, 0, made), told=True)
        try:
            if await anext(moved, None) is None:
                raise Unavailable(f"{target.name} ended request {before} before it began")
            choices = {one.choice for one in made}
            as_made = choices <= self._progress.open if made else not self._progress.begun
            if not (self.runs(source, before) and as_made) or self._progress.unwanted:
                raise BadRequest(f"request {before} has gone on otherwise", param="request")
        except BaseException:
            await moved.aclose()
            self._holdings.let_go(target, "work", name)  # also where it was cancelled before it was let in
            if not refused:
                self.refused.discard(target)  # full for a move is not full for good
            raise
        self._moved = _Moved(moved, target, name)

    async def _generate(self, replica: Replica, body: StartGenerate, *, told: bool = False) -> Frames:
        """told: what `body` says is made the caller has not seen all of yet."""
        prompt, name = body.prompt, body.request
        spent = self.computed if body.begin else 0
        begin = resolve(body.begin, len(prompt), "begin")
        self.is_to_compute(replica, begin, len(prompt))
        self._fleet.note(prompt, replica)
        replica.report.sent(arriving(body))
        try:
            async with (
                self._holdings.asking(replica, "work", name),
                aclosing(replica.client.start_generate(body)) as frames,
            ):
                async for frame in frames:
                    if not told:
                        self.running, self._running_as = replica, name
                    self._let_in(replica, name, computed=bool(frame))
                    seen, failure = self._seen(less_cached(frame, spent), told=told)
                    yield seen
                    if failure is not None:
                        await replica.check()  # it may be about to end
                        raise Lost(f"{replica.name}: {failure}")
        except GeneratorExit:  # closing the engine's stream has ended the request there
            self._holdings.let_go(replica, "work", name)
            raise
        except KvloomError:
            if not body.begin or self._progress.begun:
                self.refused.add(replica)
            raise
        finally:
            if self.runs(replica, name):
                self.running = None
            self._progress.tell()
            self._holdings.is_to_compute(replica, 0)
        self._holdings.let_go(replica, "work", name)

    def _let_in(self, replica: Replica, name: str, *, computed: bool) -> None:
        self._holdings.let_go(replica, "room", name)  # the engine has taken it over
        if not self.needs:
            most = len(self._body.prompt) + self._body.sampling.max_tokens
            self.needs = min(most, replica.card.context_length)
        if computed:
            self._holdings.is_to_compute(replica, 0)

    def _seen(self, frame: list[Event], *, told: bool) -> tuple[list[Event], str | None]:
        """What the caller is told of a frame, and why nothing comes after it, where it is not over."""
        progress = self._progress
        news = progress.as_one(frame, moved=self._moved is not None)
        seen, failure = progress.survives(progress.unseen(news) if told else news)
        progress.note(seen)
        return seen, failure

    def _rest(self, name: str, begin: int, made: list[Made]) -> StartGenerate:
        """What is still to be generated, after `made`."""
        sampling = self._body.sampling
        if self._progress.prompt_told:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self._body, request=name, begin=begin, made=made, sampling=sampling)

"""The progress of a request, as its caller has seen it: enough for another engine to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from msgspec.structs import replace

from kvloom.journal.lives import Teller
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, Made, PromptEvent, TokenEvent


class RequestProgress:
    """The tokens of a request with `n` choices, and what its caller is told of the frames that come."""

    def __init__(self, n: int, clock: Clock) -> None:
        self.begun = False
        """An event has been passed on."""
        self.prompt_told = False
        """The prompt's log-probabilities have been passed on."""
        self.tokens = 0
        """The tokens that the choices have, in all."""
        self.step: float | None = None
        """Seconds between the last two frames, if the later one had a token of each choice at most."""
        self._clock = clock
        self._told_at: float | None = None  # when the last frame came
        self._open: dict[int, list[int]] = {choice: [] for choice in range(n)}
        self._unwanted: set[int] = set()
        self._spared: dict[int, int] = {}  # cached tokens, by choice, of a request that has migrated
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return not self._open

    @property
    def open(self) -> Set[int]:
        """Returns the choices that have not ended."""
        return self._open.keys()

    @property
    def made(self) -> list[Made]:
        """Returns the tokens of the choices that have not ended; empty if all begin."""
        return [Made(choice, tokens[:]) for choice, tokens in self._open.items()] if self.begun else []

    # -- what nobody wants ------------------------------------------------------------------------------

    def cancel(self, choice: int | None) -> None:
        """Notes that the caller wants no more of the choice; None means all of them."""
        self._unwanted |= self._open.keys() if choice is None else {choice}

    @property
    def unwanted(self) -> bool:
        """Returns whether a choice has not ended, and nobody wants more of it."""
        return not self._unwanted.isdisjoint(self._open)

    def end_unwanted(self) -> list[Event]:
        """Ends these choices while no engine is there to do it. Returns their ends, the caller's next
        frame."""
        ends: list[Event] = [
            EndEvent(choice, "abort") for choice in sorted(self._unwanted & self._open.keys())
        ]
        return self.take(ends)[0]

    # -- frames -----------------------------------------------------------------------------------------

    def take(
        self, frame: list[Event], *, behind: bool = False, moved: bool = False, computed: int = 0
    ) -> tuple[list[Event], str | None]:
        """Notes an engine's frame, and returns what the caller is told of it. The text says why the engine
        ends all that is left of the request with this frame, so that another engine may go on. behind:
        whether another engine may have told the caller more already; moved: whether the request goes on
        elsewhere after this stream; computed: tokens whose K and V were made elsewhere for this very request,
        so that the cache has not spared them. Raises KvloomError if the frame does not follow on those
        before."""
        failure = None
        if behind:
            frame = [event for event in frame if not self._told(event)]
        tellers = [event.choice for event in frame if isinstance(event, TokenEvent)]
        if len(tellers) < len(frame) and any(isinstance(event, EndEvent) for event in frame):
            if moved or computed or self._spared:
                frame = self._ends_as_one(frame, moved, computed)
            frame, failure = self._failed(frame)
        if not frame:
            return frame, failure
        before, now = self._told_at, self._clock.now()
        self._told_at = now
        once = len(tellers) < 2 or len(set(tellers)) == len(tellers)
        self.step = now - before if once and before is not None else None
        self._news.set()
        self.begun = True
        self.tokens += len(tellers)
        for event in frame:
            if isinstance(event, PromptEvent):
                self.prompt_told = True
                continue
            tokens = self._open.get(event.choice)
            if tokens is None:
                raise KvloomError(f"choice {event.choice} had ended, and an engine went on with it")
            if isinstance(event, EndEvent):
                del self._open[event.choice]
            elif event.index != len(tokens):
                raise KvloomError(f"choice {event.choice}: token {event.index} came after {len(tokens)}")
            else:
                tokens.append(event.token)
        return frame, failure

    async def news(self) -> None:
        """Waits until the caller has seen more, or the engine has stopped."""
        self._news.clear()
        await self._news.wait()

    def tell(self) -> None:
        """Wakes those who wait for news."""
        self._news.set()

    def _told(self, event: Event) -> bool:
        if isinstance(event, PromptEvent):
            return self.prompt_told
        tokens = self._open.get(event.choice)
        return tokens is None or (isinstance(event, TokenEvent) and event.index < len(tokens))

    def _ends_as_one(self, frame: list[Event], moved: bool, computed: int) -> list[Event]:
        """Returns the frame for a caller who knows nothing of engines: without the ends that a migration
        brings, and with the number of cached tokens that the request found at its first engine."""
        seen = list[Event]()
        for event in frame:
            if not isinstance(event, EndEvent):
                seen.append(event)
                continue
            cached = max(0, event.cached_tokens - computed)
            if not (moved and event.reason == "abort"):
                seen.append(replace(event, cached_tokens=self._spared.get(event.choice, cached)))
            elif self._open.get(event.choice):  # else it begins where it goes
                self._spared.setdefault(event.choice, cached)
        return seen

    def _failed(self, frame: list[Event]) -> tuple[list[Event], str | None]:
        """Returns what of a frame can be passed on, and why an engine ends with it all that is left of the
        request: another may still go on. The text is None if the engine does not."""
        ends = [event for event in frame if isinstance(event, EndEvent)]
        failed = [end for end in ends if end.reason == "error" and not end.code]
        if not failed:
            return frame, None
        well = {end.choice for end in ends} - {end.choice for end in failed}
        if {end.choice for end in failed} != self._open.keys() - well:
            return frame, None
        rest = [event for event in frame if event not in failed]
        return rest, failed[0].message or "the engine could not go on with this request"


class Milestones:
    """Tells the first time that a unit reaches each stage of a request's life."""

    def __init__(self, request: str, progress: RequestProgress, tell: Teller) -> None:
        self.failed_of = ""
        """The code of the error after which the request goes on elsewhere."""
        self._request = request
        self._progress = progress
        self._tell = tell
        self._reads = ""  # the unit that has said that it computes the prompt

    def came(self, unit: str, frame: list[Event], *, new: bool, follows: bool) -> None:
        """Takes a unit's frames up to the first one with events, before that is noted. new: whether it is the
        first of all, with which the unit lets the request in; an empty one after it says that the unit begins
        with the prompt. follows: whether the request goes on there for another unit, which the journal
        tells."""
        if new:
            self._reads = ""
            if not follows:
                what = "resumed" if self.failed_of else "queued"
                self._tell(self._request, what, unit, self.failed_of)
        elif not frame and not self._progress.begun:
            self._reads = unit
            self._tell(self._request, "admitted", unit)
        if not self._progress.begun and any(isinstance(event, TokenEvent) for event in frame):
            if unit != self._reads:
                self._tell(self._request, "admitted", unit)
            self._tell(self._request, "first_token", unit)

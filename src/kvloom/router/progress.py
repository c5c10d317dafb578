"""How far a request has come, as its caller has seen it: enough for another engine to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from msgspec.structs import replace

from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, Made, PromptEvent, TokenEvent


class Progress:
    """Of a request with `n` choices. begun: an event has been passed on; prompt_told: the prompt's
    log-probabilities were. tokens: that its choices have, in all. step: seconds between the last two frames,
    where the later one had a token of each choice at most."""

    def __init__(self, n: int, clock: Clock) -> None:
        self.begun = False
        self.prompt_told = False
        self.tokens = 0
        self.step: float | None = None
        self._clock = clock
        self._told_at: float | None = None  # of the last frame
        self._open: dict[int, list[int]] = {choice: [] for choice in range(n)}
        self._unwanted: set[int] = set()
        self._spared: dict[int, int] = {}  # cached tokens, by choice, of one that has moved
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return not self._open

    @property
    def open(self) -> Set[int]:
        """The choices that have not ended."""
        return self._open.keys()

    def cancel(self, choice: int | None) -> None:
        """The caller wants no more of it; None is all of them."""
        self._unwanted |= self._open.keys() if choice is None else {choice}

    @property
    def unwanted(self) -> bool:
        """A choice has not ended, and nobody wants more of it."""
        return not self._unwanted.isdisjoint(self._open)

    def end_unwanted(self) -> list[Event]:
        """End these choices, in a time in which no engine is there to do it. Their ends are the caller's
        next frame."""
        ends: list[Event] = [
            EndEvent(choice, "abort") for choice in sorted(self._unwanted & self._open.keys())
        ]
        self.note(ends)
        return ends

    @property
    def made(self) -> list[Made]:
        """What the choices that have not ended have: none where all begin."""
        return [Made(choice, tokens[:]) for choice, tokens in self._open.items()] if self.begun else []

    async def news(self) -> None:
        """Until the caller has seen more, or who generates has stopped."""
        self._news.clear()
        await self._news.wait()

    def tell(self) -> None:
        """There is news."""
        self._news.set()

    def note(self, frame: list[Event]) -> None:
        """The caller is about to see the frame. Raises KvloomError where it does not follow on what was."""
        if frame:
            self._time(frame)
            self.tell()
        for event in frame:
            self.begun = True
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
                self.tokens += 1

    def _time(self, frame: list[Event]) -> None:
        now, before = self._clock.now(), self._told_at
        choices = [event.choice for event in frame if isinstance(event, TokenEvent)]
        once = len(set(choices)) == len(choices)
        self._told_at, self.step = now, now - before if once and before is not None else None

    def as_one(self, frame: list[Event], *, moved: bool) -> list[Event]:
        """For a caller that knows nothing of moves: without the ends where it was, and with what the cache
        has spared it where it began. moved: it goes on elsewhere after this stream."""
        if not (moved or self._spared):
            return frame
        seen = list[Event]()
        for event in frame:
            if not isinstance(event, EndEvent):
                seen.append(event)
            elif moved and event.reason == "abort":
                if self._open.get(event.choice):  # else it begins there
                    self._spared.setdefault(event.choice, event.cached_tokens)
            else:
                spared = self._spared.get(event.choice, event.cached_tokens)
                seen.append(replace(event, cached_tokens=spared))
        return seen

    def unseen(self, frame: list[Event]) -> list[Event]:
        """What the caller has yet to see, of a stream that goes on after tokens of which another has told
        perhaps more."""
        return [event for event in frame if not self._told(event)]

    def _told(self, event: Event) -> bool:
        if isinstance(event, PromptEvent):
            return self.prompt_told
        tokens = self._open.get(event.choice)
        return tokens is None or (isinstance(event, TokenEvent) and event.index < len(tokens))

    def survives(self, frame: list[Event]) -> tuple[list[Event], str | None]:
        """What of a frame can be passed on, and why an engine ends with it all that is left of the request:
        another may still go on. None where it does not."""
        ends = [event for event in frame if isinstance(event, EndEvent)]
        failed = [end for end in ends if end.reason == "error"]
        if not failed:
            return frame, None
        well = {end.choice for end in ends} - {end.choice for end in failed}
        if {end.choice for end in failed} != self._open.keys() - well:
            return frame, None
        rest = [event for event in frame if event not in failed]
        return rest, failed[0].message or "the engine could not go on with this request"


def less_cached(frame: list[Event], computed: int) -> list[Event]:
    """What was received had been computed for this very request: the cache has not spared it."""
    if not computed:
        return frame
    return [
        replace(event, cached_tokens=max(0, event.cached_tokens - computed))
        if isinstance(event, EndEvent)
        else event
        for event in frame
    ]

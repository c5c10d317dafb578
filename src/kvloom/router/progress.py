"""The progress of a request, as its caller has seen it: enough for another engine to go on, unless too many
engines have died of the request, which is quarantined then."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Set
from typing import Final

import msgspec
from msgspec.structs import replace

from kvloom.types.clock import Clock
from kvloom.types.errors import EngineDied, KvloomError, RequestQuarantined, Unavailable
from kvloom.types.request import EndEvent, Event, Made, PromptEvent, StartGenerate, TokenEvent

DEATHS_BEFORE: Final = 2
"""So many engines may die of a request that has no token yet: the first may have been killed by somebody
else, and what its grammar or its prompt does to an engine it does before its first token."""
DEATHS_AFTER: Final = 4
"""So many engines may die of a request that has tokens. What it does to an engine it would most likely have
done before, and its caller has seen a part of the answer; so it is trusted for longer."""
QUARANTINE_SECONDS: Final = 600.0
"""The time for which a quarantined request is refused if its client sends it again."""
MOST_QUARANTINED: Final = 256
"""Requests that are remembered for that."""

_SHOWN: Final = 16  # digits of a digest
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)


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
        for event in frame:
            if isinstance(event, EndEvent):
                if moved or computed or self._spared:
                    frame = self._ends_as_one(frame, moved, computed)
                frame, failure = self._failed(frame)
                break
        if not frame:
            return frame, failure
        before, now = self._told_at, self._clock.now()
        self._told_at = now
        tellers = [event.choice for event in frame if isinstance(event, TokenEvent)]
        once = len(tellers) < 2 or len(set(tellers)) == len(tellers)
        self.step = now - before if once and before is not None else None
        self._news.set()
        self.begun = True
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
                self.tokens += 1
        return frame, failure

    async def news(self) -> None:
        """Waits until the caller has seen more, or who generates has stopped."""
        self._news.clear()
        await self._news.wait()

    def tell(self) -> None:
        """Wakes whoever waits for news."""
        self._news.set()

    def _told(self, event: Event) -> bool:
        if isinstance(event, PromptEvent):
            return self.prompt_told
        tokens = self._open.get(event.choice)
        return tokens is None or (isinstance(event, TokenEvent) and event.index < len(tokens))

    def _ends_as_one(self, frame: list[Event], moved: bool, computed: int) -> list[Event]:
        """Returns the frame for a caller who knows nothing of engines: without the ends that a migration
        brings, and with what the cache spared the request where it began."""
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


class Quarantine:
    """The digests of the requests that were quarantined lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def refuse(self, body: StartGenerate) -> None:
        """Raises RequestQuarantined if the same request was quarantined lately."""
        if not self._until:
            return
        digest = digest_of(body)
        left = self._until.get(digest, 0.0) - self._clock.now()
        if left > 0.0:
            raise RequestQuarantined(
                f"this request was quarantined because engines died of it ({digest}); it is refused for "
                f"{left:.0f} s more"
            )

    def add(self, body: StartGenerate) -> str:
        """Remembers the request, and returns its digest."""
        digest = digest_of(body)
        self._until[digest] = self._clock.now() + QUARANTINE_SECONDS
        self._until.move_to_end(digest)
        if len(self._until) > MOST_QUARANTINED:
            self._until.popitem(last=False)
        return digest


class Deaths:
    """Counts the engines that have died of one request, before its first token and after it."""

    def __init__(self, body: StartGenerate, progress: RequestProgress, quarantine: Quarantine) -> None:
        self.verdict: RequestQuarantined | None = None
        """Why the request is tried no more."""
        self._body = body
        self._progress = progress
        self._quarantine = quarantine
        self._before = 0
        self._after = 0

    def counted(self, error: Unavailable) -> KvloomError:
        """Counts the error if an engine has died. Returns it, or RequestQuarantined if that was one death too
        many."""
        if not isinstance(error, EngineDied):
            return error
        if self._progress.tokens:
            self._after += 1
        else:
            self._before += 1
        if self.verdict is None and (self._before >= DEATHS_BEFORE or self._after >= DEATHS_AFTER):
            self.verdict = self._quarantined(error)
        return self.verdict or error

    def _quarantined(self, error: EngineDied) -> RequestQuarantined:
        digest = self._quarantine.add(self._body)
        deaths = f"{self._before} engines died before its first token, and {self._after} after it"
        _log.error(
            "request %s for %s is quarantined (%s): %s; at last %s",
            self._body.request,
            self._body.model,
            digest,
            deaths,
            error.message,
        )
        return RequestQuarantined(f"the request is quarantined ({digest}): {deaths}")


def digest_of(body: StartGenerate) -> str:
    """Returns the digest of what a client sends again if it tries again: for whom, which model, which prompt,
    and how it is sampled, but for the seed, which is drawn anew for a client that gives none."""
    asked = (body.tenant, body.model, body.prompt, body.n, replace(body.sampling, seed=0))
    return hashlib.sha256(_encode(asked)).hexdigest()[:_SHOWN]

"""The lives of a gateway's last requests: when each came, was let in, began, moved and ended, and where. They
hold nothing of prompts or answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, Literal, Protocol

from msgspec import Struct

from kvloom.journal.records import Moved, Preempted, Quarantined, Record, Stayed

KEPT: Final = 1000  # requests
LISTED: Final = 100
MOST_STEPS: Final = 32  # of a request, besides the journal's
CANCELLED: Final = 499  # the status of requests whose clients have hung up

State = Literal["queued", "prefill", "decode", "ended", "failed", "cancelled"]


class Step(Struct, frozen=True, kw_only=True):
    """A moment in a request's life."""

    at: float
    """The time of the step, in seconds of Unix time."""
    what: str
    """`came`: it has come to the gateway. `queued`: a unit has let it in. `admitted`: the unit begins with
    its prompt. `first_token`: its first token has come. `resumed`: another unit goes on after a failure.
    `ended`, `failed` and `cancelled` are its ends. Other kinds are types of the journal's records."""
    unit: str = ""
    reason: str = ""


class Life(Struct, frozen=True, kw_only=True):
    """A request's life up to now."""

    id: str
    """The `x-request-id` of its answer."""
    api_id: str
    """The answer's own id; empty until there is one."""
    model: str
    state: State
    began: float
    """The time at which it came, in seconds of Unix time."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    steps: tuple[Step, ...]


class LifeLine(Struct, frozen=True, kw_only=True):
    """A request in a list of them."""

    id: str
    api_id: str
    model: str
    state: State
    began: float


class Tokens(Struct, frozen=True):
    """The tokens of a request up to now."""

    prompt: int = 0
    output: int = 0
    cached: int = 0


_STATES: Final[dict[str, State]] = {
    "admitted": "prefill",
    "resumed": "queued",
    "first_token": "decode",
    "ended": "ended",
    "failed": "failed",
    "cancelled": "cancelled",
}


class Story:
    """A life as it is being written."""

    def __init__(
        self, request: str, forget: Callable[[Story], None] = lambda _: None, trace: str = ""
    ) -> None:
        """`forget` is called at the life's end, and `trace` is the caller's `traceparent`."""
        self.id = request
        self.trace = trace
        self.api_id = ""
        self.model = ""
        self.requests: tuple[str, ...] = ()
        """The ids by which the router knows its parts, one for each prompt."""
        self._steps: list[Step] = []
        self._state: State = "queued"
        self._count: Callable[[], Tokens] = Tokens
        self._forget = forget
        self.add("came")

    @property
    def began(self) -> float:
        return self._steps[0].at

    def tokens_by(self, count: Callable[[], Tokens]) -> None:
        """Takes the function that counts the request's tokens until its end."""
        self._count = count

    @property
    def tokens(self) -> Tokens:
        """Returns its tokens up to now, or to its end."""
        return self._count()

    def add(self, what: str, unit: str = "", reason: str = "") -> None:
        """Writes a step of now. A life that has all of its steps still knows its state."""
        if what in _STATES and not (what in ("admitted", "resumed") and self._state == "decode"):
            self._state = _STATES[what]
        if len(self._steps) == MOST_STEPS - 1:
            return
        at = max([round(time.time(), 6), *(step.at for step in self._steps[-1:])])
        self._steps.append(Step(at=at, what=what, unit=unit, reason=reason))

    def end(self, status: int, reason: str = "") -> None:
        """Writes the last step, and lets go of whatever counted its tokens. `status` is the answer's."""
        tokens = self._count()
        self._count = lambda: tokens
        del self._steps[MOST_STEPS - 2 :]
        self.add("cancelled" if status == CANCELLED else "ended" if status < 400 else "failed", reason=reason)
        self._forget(self)

    def life(self, records: Iterable[Record] = ()) -> Life:
        """Returns the life up to now. `records` are the journal's, among which it looks for its own."""
        steps = sorted([*self._steps, *filter(None, map(self._told, records))], key=lambda step: step.at)
        state, tokens = self._state, self._count()
        last = next((step.what for step in reversed(steps) if step.what in ("admitted", "preempted")), "")
        if state == "prefill" and last == "preempted":
            state = "queued"
        return Life(
            id=self.id,
            api_id=self.api_id,
            model=self.model,
            state=state,
            began=self.began,
            prompt_tokens=tokens.prompt,
            output_tokens=tokens.output,
            cached_tokens=tokens.cached,
            steps=tuple(steps),
        )

    def line(self) -> LifeLine:
        return LifeLine(id=self.id, api_id=self.api_id, model=self.model, state=self._state, began=self.began)

    def named(self, request: str) -> bool:
        """Returns whether a router or a unit knows the request, or a part of it, by this id. Units know each
        further attempt as `ID~NUMBER`."""
        return request.partition("~")[0] in self.requests

    def _told(self, record: Record) -> Step | None:
        event = record.event
        if not isinstance(event, Moved | Stayed | Preempted | Quarantined) or not self.named(event.request):
            return None
        unit = event.destination if isinstance(event, Moved) else record.component
        kind = event.__struct_config__.tag
        return Step(at=record.at, what=str(kind), unit=unit, reason=event.reason)


class Lives:
    """The lives of the last requests, of which it keeps no more than `most`."""

    def __init__(self, most: int = KEPT) -> None:
        self.ended: Callable[[Story], None] = lambda _: None
        """The function that takes each life that has ended."""
        self._most = most
        self._stories: deque[Story] = deque()
        self._asked: dict[str, Story] = {}
        """The lives that are under way, by the ids of their parts."""

    def begin(self, request: str, trace: str = "") -> Story:
        """Returns the life of a request that has come, with its `x-request-id`, and its `traceparent`."""
        story = Story(request, self._end, trace)
        self._stories.append(story)
        if len(self._stories) > self._most:
            self._forget(self._stories.popleft())
        return story

    def ask(self, story: Story, requests: Iterable[str]) -> None:
        """Notes the ids by which the router will know the parts of a request."""
        story.requests = tuple(requests)
        self._asked.update(dict.fromkeys(story.requests, story))

    def tell(self, request: str, what: str, unit: str, reason: str = "") -> None:
        """Satisfies `Teller`."""
        if story := self._asked.get(request):
            story.add(what, unit, reason)

    def last(self) -> list[LifeLine]:
        """Returns the last lives, the newest first."""
        return [story.line() for story in islice(reversed(self._stories), LISTED)]

    def find(self, name: str) -> Story | None:
        """Returns the newest request that has this id: the one in its answer's head, the answer's own, or one
        by which a unit knows it."""
        return next(
            (
                story
                for story in reversed(self._stories)
                if name in (story.id, story.api_id) or story.named(name)
            ),
            None,
        )

    def _end(self, story: Story) -> None:
        self._forget(story)
        self.ended(story)

    def _forget(self, story: Story) -> None:
        for request in story.requests:
            if self._asked.get(request) is story:
                del self._asked[request]


class Teller(Protocol):
    """Takes what a router knows of a request's life: its id there, and a `Step`. It
    neither blocks nor raises."""

    def __call__(self, request: str, what: str, unit: str, reason: str = "") -> None: ...


def untold(request: str, what: str, unit: str, reason: str = "") -> None:
    """Satisfies `Teller` if no lives are kept."""

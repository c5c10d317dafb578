"""The events of a run, one by one, and what its clients were answered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvloom.lab.faults.faults import Client
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, PromptEvent, TokenEvent


class Journal:
    """The journal of a run has a line for each event: when (virtual seconds), what, who, and how it was.
    Lines are kept only if they are wanted, because they take longer to write than the events themselves."""

    def __init__(self, clock: Clock, *, kept: bool) -> None:
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """The number of events by kind, of those that are worth counting."""
        self.kept = kept
        self._clock = clock

    def __call__(self, what: str, who: str, *how: object) -> None:
        if self.kept:
            said = " ".join(filter(None, map(str, how)))
            self.lines.append(f"{self._clock.now():11.6f}  {what:<8} {who:<10} {said}".rstrip())

    def count(self, what: str) -> None:
        self.counts[what] += 1


Fate = Literal["waits", "ended", "failed", "left", "lost"]


@dataclass(slots=True)
class ClientAnswer:
    """The answer that a client has had so far."""

    client: Client
    fate: Fate = "waits"
    """The fate of the answer: the client waits; its stream has ended; it was told an error and has failed; it
    has left; or its gateway was lost."""
    over: float | None = None
    """The time when its fate was decided; None while it waits."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """The tokens by choice."""
    ends: dict[int, EndEvent] = field(default_factory=dict)
    """The end of each choice that has one."""
    prompt: PromptEvent | None = None
    error: KvloomError | None = None
    aborted: bool = False
    stopped: set[int] = field(default_factory=set)
    """Choices that were aborted for their stop string."""
    broken: list[str] = field(default_factory=list)
    """The things that this stream did and that no stream may do (law 3)."""

    def take(self, frame: list[Event]) -> None:
        for event in frame:
            if isinstance(event, PromptEvent):
                if self.prompt is not None or self.tokens:
                    self.broken.append("a prompt's report comes twice, or late")
                self.prompt = event
            elif event.choice in self.ends or not 0 <= event.choice < self.client.body.n:
                self.broken.append(f"choice {event.choice} goes on after its end, or never was")
            elif isinstance(event, TokenEvent):
                tokens = self.tokens.setdefault(event.choice, [])
                if event.index != len(tokens):
                    self.broken.append(f"choice {event.choice}: token {event.index} follows {len(tokens)}")
                tokens.append(event.token)
            else:
                self.ends[event.choice] = event

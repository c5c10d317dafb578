"""What a client of a run saw of its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvloom.core.errors import KvloomError
from kvloom.core.request import EndEvent, Event, PromptEvent, TokenEvent
from kvloom.sim.faults import Client

Fate = Literal["waits", "ended", "failed", "left", "lost"]


@dataclass(slots=True)
class Answer:
    """fate: ended, its stream did; failed, it was told an error; left, it hung up; lost, its gateway was.
    tokens, ends: by choice. asked, over: when. broken: what no stream may do, law 3."""

    client: Client
    fate: Fate = "waits"
    asked: float | None = None
    over: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndEvent] = field(default_factory=dict)
    prompt: PromptEvent | None = None
    error: KvloomError | None = None
    aborted: bool = False
    broken: list[str] = field(default_factory=list)

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

"""What a model learns from: chats and plain texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A chat, or a plain text when there are no messages."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str = ""


def chat(*turns: str, system: str = "", tools: list[dict[str, Any]] | None = None) -> Sample:
    """A chat of alternating user and assistant turns."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    return Sample(messages, tools)

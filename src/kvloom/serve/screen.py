"""What a person sees of a fleet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

from kvloom.config import DEMO
from kvloom.core.clock import Clock


class Screen:
    """Steps with their seconds, the components' logs between them, and at last how to call the fleet.

    On a terminal the current step moves; elsewhere each is a line of its own.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._started = clock.now()
        self._status: Status | None = None
        self._step: tuple[str, float] | None = None

    def step(self, text: str) -> None:
        """`text` is what is being done now; what was before is done."""
        self._finish_step()
        self._step = text, self._clock.now()
        if self._console.is_terminal:
            self._status = self._console.status(Text(f"{text} …"))
            self._status.start()
        else:
            self._print(f"{self._clock.now() - self._started:6.1f} s  {text} …")

    def log(self, component: str, line: str) -> None:
        self._print(f"{component:>7} | {line}", style="dim")

    def ready(self, url: str, models: Mapping[str, str], chat: Sequence[str], *, locked: bool) -> None:
        """`models`: name → path; `chat`: the names of those that have a chat template."""
        self.close()
        seconds = self._clock.now() - self._started
        self._print(f"Ready in {seconds:.1f} s: {url} serves {', '.join(models)}", style="bold green")
        self._print(f"Try: {curl(url, models, chat, locked=locked)}")

    def close(self) -> None:
        self._finish_step()

    def _finish_step(self) -> None:
        if self._status is not None and self._step is not None:
            self._status.stop()
            text, begun = self._step
            self._print(f"{self._clock.now() - begun:6.1f} s  {text}", style="green")
        self._status = self._step = None

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def curl(url: str, models: Mapping[str, str], chat: Sequence[str], *, locked: bool) -> str:
    """A command to paste into a shell. It asks what the model can answer: of the demo fleet's, a sum."""
    sums = str(DEMO / "sums")
    model = next((name for name, path in models.items() if path == sums), next(iter(models)))
    question = "What is 17 + 25?" if models[model] == sums else "Hello"
    asked: dict[str, object] = {"model": model, "max_tokens": 32}
    if models[model] == sums:
        asked["temperature"] = 0
    talks = model in chat
    asked |= {"messages": [{"role": "user", "content": question}]} if talks else {"prompt": question}
    where = "chat/completions" if talks else "completions"
    key = ' -H "Authorization: Bearer $KVLOOM_API_KEY"' if locked else ""
    body = shlex.quote(msgspec.json.encode(asked).decode())
    return f"curl {url}/v1/{where}{key} -H 'Content-Type: application/json' -d {body}"

"""The screen shows a fleet to the person who started it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

from kvloom.config.config import DEMO
from kvloom.types.clock import Clock


class Screen:
    """Steps with their seconds, the components' logs between them, and at last how to call the fleet.

    Each component may be at a step of its own. On a terminal current steps move; elsewhere each is a line.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._started = clock.now()
        self._status: Status | None = None
        self._steps: dict[str, tuple[str, float]] = {}  # by who is at it

    def step(self, text: str, of: str = "") -> None:
        """Shows `text` as the present step of `of`, whose step before is done."""
        self.done(of)
        text = f"{of}: {text}" if of else text
        self._steps[of] = text, self._clock.now()
        if self._console.is_terminal:
            self._show_steps()
        else:
            self._print(f"{self._clock.now() - self._started:6.1f} s  {text} …")

    def done(self, of: str = "") -> None:
        """Shows that the step of `of` is done, if there was one."""
        if of not in self._steps:
            return
        text, begun = self._steps.pop(of)
        if self._console.is_terminal:
            self._show_steps()
            self._print(f"{self._clock.now() - begun:6.1f} s  {text}", style="green")

    def log(self, component: str, line: str) -> None:
        self._print(f"{component:>7} | {line}", style="dim")

    def warn(self, component: str, line: str) -> None:
        self._print(f"{component:>7} | {line}", style="yellow")

    def ready(self, url: str, models: Mapping[str, str], chat: Sequence[str], *, locked: bool) -> None:
        """Shows that the fleet serves. models: their paths by name; chat: the names of those that have a chat
        template."""
        self.close()
        seconds = self._clock.now() - self._started
        self._print(f"Ready in {seconds:.1f} s: {url} serves {', '.join(models)}", style="bold green")
        self._print(f"Try: {curl(url, models, chat, locked=locked)}")

    def close(self) -> None:
        """Shows that all steps are done."""
        for of in list(self._steps):
            self.done(of)

    def _show_steps(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._steps:
            texts = " · ".join(text for text, _ in self._steps.values())
            self._status = self._console.status(Text(f"{texts} …"))
            self._status.start()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def curl(url: str, models: Mapping[str, str], chat: Sequence[str], *, locked: bool) -> str:
    """Returns a command to paste into a shell. It asks something that the model can answer: a sum of the demo
    fleet's."""
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

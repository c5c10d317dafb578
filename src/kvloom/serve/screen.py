"""The screen shows a fleet to the person who started it."""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.status import Status
from rich.text import Text

from kvloom.cluster.state import GATEWAY
from kvloom.config.config import DEMO
from kvloom.serve.processes.log import ACCESS, BREAK, Background
from kvloom.types.clock import Clock

_LOGGED: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
"""A record of a component's log."""


class FleetReady(Struct, frozen=True, tag="ready"):
    """A fleet that serves, as its callers need to know it."""

    url: str
    models: dict[str, str]
    """The paths of its models, by name."""
    routes: dict[str, str]
    """The route under /v1 at which each of them is asked."""
    locked: bool = False
    """Tells whether callers need a key."""
    authority: str = ""
    """A file with the certificate that callers have to trust; empty if they need none."""


class Screen:
    """Steps with their seconds, the components' logs between them, and at last how to call the fleet.

    Each component may be at a step of its own. On a terminal current steps move; elsewhere each is a line.
    All is written in the background: a terminal that nobody reads, or a full disk, holds nothing up.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._started = clock.now()
        self._status: Status | None = None
        self._steps: dict[str, tuple[str, float]] = {}  # by who is at it
        self._background = Background("screen", self._tell_lost)
        self._level = logging.INFO
        self._json = False

    def show_as(self, level: str, form: Literal["text", "json"]) -> None:
        """Shows lines from a level on only, and each in a form: `json` for an object each. The access log,
        what a component prints without a level, and where the fleet serves are shown at every level."""
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self._json = form == "json"

    def step(self, text: str, of: str = "") -> None:
        """Shows `text` as the present step of `of`, whose step before is done."""
        self.done(of)
        text = f"{of}: {text}" if of else text
        self._steps[of] = text, self._clock.now()
        if self._moves:
            self._show_steps()
        elif self._shows("INFO"):
            self._print(f"{self._clock.now() - self._started:6.1f} s  {text} …")

    def done(self, of: str = "") -> None:
        """Shows that the step of `of` is done, if there was one."""
        if of not in self._steps:
            return
        text, begun = self._steps.pop(of)
        if self._moves:
            self._show_steps()
            self._print(f"{self._clock.now() - begun:6.1f} s  {text}", style="green")

    def log(self, component: str, line: str, level: str = "") -> None:
        """Shows a record of a component's log, or a line that it prints. level: of what the fleet itself says
        of the component."""
        found = None if level else _LOGGED.match(line)
        said_level, logger, said = found.groups() if found else (level, "", line)
        fields = _fields(said) if logger == ACCESS and _is_gateway(component) else {}
        if said_level and not fields and not self._shows(said_level):
            return
        said_level = said_level or "WARNING"  # it comes from no log, as the traceback of a process that dies
        if self._json:
            self._object(said_level, component, _lines(said), logger, fields)
            return
        if fields:
            line = " ".join(f"{key}={_plain(value)}" for key, value in fields.items())
        style = "dim" if said_level in ("DEBUG", "INFO") else "yellow"
        for part in _lines(line).split("\n"):
            self._print(f"{time.strftime('%H:%M:%S')} {component:>7} | {part}", style=style)

    def warn(self, component: str, line: str) -> None:
        """Shows what went wrong with a component."""
        self.log(component, line, "WARNING")

    def ready(self, fleet: FleetReady) -> None:
        """Shows that the fleet serves."""
        self.end_steps()
        seconds = self._clock.now() - self._started
        served = ", ".join(fleet.models)
        self._print(f"Ready in {seconds:.1f} s: {fleet.url} serves {served}", style="bold green")
        self._print(f"Try: {curl(fleet)}")

    def end_steps(self) -> None:
        """Shows that all steps are done."""
        for of in list(self._steps):
            self.done(of)

    def close(self) -> bool:
        """Shows that all steps are done, and waits a moment until all that was told is written. Returns False
        if a write still waits for a reader, and holds the lock of its stream."""
        self.end_steps()
        if not self._background.close():
            # What is still to be written is dropped, or the interpreter's end would fail over it.
            with open(os.devnull, "wb") as nowhere, suppress(OSError):
                os.dup2(nowhere.fileno(), self._console.file.fileno())
        return not self._background.busy

    def _show_steps(self) -> None:
        texts = " · ".join(text for text, _ in self._steps.values())
        self._background.post(lambda: self._spin(texts))

    def _spin(self, texts: str) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if texts:
            self._status = self._console.status(Text(f"{texts} …"))
            self._status.start()

    @property
    def _moves(self) -> bool:
        """True if current steps move, on a terminal."""
        return self._console.is_terminal and not self._json and self._shows("INFO")

    def _shows(self, level: str) -> bool:
        return logging.getLevelNamesMapping()[level] >= self._level

    def _object(
        self,
        level: str,
        component: str,
        message: str,
        logger: str = "",
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Shows a record as an object of JSON. fields: stand for the message, if there are any; none
        stands for what the screen itself knows."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        known: dict[str, object] = {"at": at, "level": level.lower(), "component": component}
        if logger:
            known["logger"] = logger
        told = dict(fields) or {"message": message}
        text = msgspec.json.encode(known | told | known).decode()
        self._background.post(lambda: self._console.print(Text(text), soft_wrap=True))

    def _print(self, text: str, style: str = "") -> None:
        if self._json:
            self._object("INFO", "fleet", text.strip())
            return
        self._background.post(lambda: self._console.print(Text(text, style=style), soft_wrap=True))

    def _tell_lost(self, lines: int) -> None:
        self._console.print(Text(f"{lines} lines could not be shown in time and were lost", style="yellow"))


def _lines(text: str) -> str:
    """Returns a record with its lines' ends."""
    return text.replace(BREAK, "\n")


def _is_gateway(component: str) -> bool:
    """Returns whether a component is called as gateways are (serve/local.py)."""
    return component.partition("@")[0] == GATEWAY


def _fields(said: str) -> dict[str, Any]:
    """Returns what a line of the access log says."""
    try:
        found = msgspec.json.decode(said)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: object) -> str:
    """Returns a value of the access log, on one line: a path may hold what moves a terminal's cursor."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else repr(text)


def curl(fleet: FleetReady) -> str:
    """Returns a command to paste into a shell. It asks something that the model can answer: a sum of the demo
    fleet's."""
    sums = str(DEMO / "sums")
    model = next((name for name, path in fleet.models.items() if path == sums), next(iter(fleet.models)))
    adds = fleet.models[model] == sums
    question = "What is 17 + 25?" if adds else "Hello"
    sampling: dict[str, object] = {"max_tokens": 32}
    if adds:
        sampling["temperature"] = 0
    route = fleet.routes.get(model, "completions")
    match route:
        case "embeddings":
            asked: dict[str, object] = {"input": question}
        case "rerank":
            asked = {"query": question, "documents": ["Good morning", "Three apples"]}
        case "chat/completions":
            asked = sampling | {"messages": [{"role": "user", "content": question}]}
        case _:
            asked = sampling | {"prompt": question}
    key = ' -H "Authorization: Bearer $KVLOOM_API_KEY"' if fleet.locked else ""
    body = shlex.quote(msgspec.json.encode({"model": model} | asked).decode())
    trust = f" --cacert {shlex.quote(fleet.authority)}" if fleet.authority else ""
    return f"curl{trust} {fleet.url}/v1/{route}{key} -H 'Content-Type: application/json' -d {body}"

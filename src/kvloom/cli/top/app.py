"""The command `kvloom top`: two threads read streams, and what they tell is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Annotated, Final, Literal, NamedTuple

from cyclopts import App, Parameter
from rich.console import Console
from rich.live import Live

from kvloom.cli.admin import HERE, ServerOptions
from kvloom.cli.app import CommandFailed
from kvloom.cli.gateway import AdminClient, GatewayError, ServerEvent, Silent
from kvloom.cli.top.picture import LEAST_WIDTH, draw
from kvloom.cli.top.watched import Watched

app = App(name="top")
AGAIN: Final = 1.0  # seconds until a server that went away is asked again
QUIET: Final = 0.5  # seconds after which a journal has told what it has kept
WIDTH: Final = 100  # if there is no terminal

Stream = Literal["live", "events"]


class News(NamedTuple):
    """News of a stream: an event, or why the stream has broken off."""

    stream: Stream
    event: ServerEvent | None = None
    error: GatewayError | None = None


@app.default
def top(
    *,
    once: Annotated[bool, Parameter(help="print one picture, and end")] = False,
    server: ServerOptions = HERE,
) -> int:
    """Watch a fleet that serves: pools, queues, rates, and what happens and why.

    Each model has a bar of its unit's pool: █ are blocks in use, ▓ cached ones, ▒ pinned ones, ▪ weights,
    and the points are what is left of its quota. Rates are those of the last ten seconds. If the server goes
    away, it is asked again; Ctrl-C ends it."""
    gateway = server.gateway()
    fleet = Watched(server.url)
    try:
        if once or not sys.stdout.isatty():
            _look(gateway, fleet)
            _print(fleet)
        else:
            with suppress(KeyboardInterrupt):
                _watch(gateway, fleet)
    except GatewayError as error:
        raise CommandFailed(str(error)) from error
    return 0


def _look(gateway: AdminClient, fleet: Watched) -> None:
    """Takes what the journal has kept, and two samples. Raises GatewayError."""
    with suppress(Silent):
        for event in gateway.stream("events", silence=QUIET):
            _take(gateway, fleet, event)
    told = 0
    for event in gateway.stream("live"):
        _take(gateway, fleet, event)
        told += event.kind == "sample"
        if told == 2:
            return
    raise GatewayError(f"{fleet.url}: the server ended before it told anything; ask again")


def _take(gateway: AdminClient, fleet: Watched, event: ServerEvent) -> None:
    try:
        fleet.take(event)
    except ValueError as error:
        raise GatewayError(f"{fleet.url}: answers, but not as this kvloom does ({error})") from error


def _print(fleet: Watched) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(draw(fleet, console.width), soft_wrap=True)


def _watch(gateway: AdminClient, fleet: Watched) -> None:
    """Draws until Ctrl-C. Raises GatewayError if the server cannot be asked at all."""
    news: SimpleQueue[News] = SimpleQueue()
    over = Event()
    last = {"live": "", "events": ""}
    for stream in ("live", "events"):
        Thread(target=_follow, args=(gateway, stream, news.put, over, last), daemon=True).start()
    console = Console()
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            for one in _each(news):
                never = one.stream == "live" and fleet.last is None
                if one.error is not None and (never or one.error.refused):
                    raise one.error
                if one.event is not None:
                    _take(gateway, fleet, one.event)
                if one.stream == "live":
                    fleet.problem = f"{one.error}; asked again each second" if one.error else ""
                    size = console.size
                    live.update(draw(fleet, max(size.width, LEAST_WIDTH), size.height), refresh=True)
    finally:
        over.set()


def _each(news: SimpleQueue[News]) -> Iterator[News]:
    while True:
        yield news.get()


def _follow(
    gateway: AdminClient, stream: Stream, tell: Callable[[News], None], over: Event, last: dict[str, str]
) -> None:
    """Reads a stream, and asks for it again after it broke off, until it is over."""
    while not over.is_set():
        try:
            for event in gateway.stream(stream, last=last[stream]):
                if stream == "events":
                    last[stream] = event.id or last[stream]
                tell(News(stream, event))
            error = GatewayError("the server has ended")
        except GatewayError as raised:
            error = raised
        tell(News(stream, error=error))
        over.wait(AGAIN)

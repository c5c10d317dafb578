"""Starts the processes of a fleet, watches over them and ends them all."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from kvloom.config import Config
from kvloom.core.clock import WallClock
from kvloom.core.errors import ConfigError
from kvloom.serve.component import Component
from kvloom.serve.orders import EngineOrder, GatewayOrder, Progress, Ready, Refused, Report
from kvloom.serve.screen import Screen

ENGINE: Final = "kvloom.serve.engine_process"
GATEWAY: Final = "kvloom.serve.gateway_process"
BACKLOG: Final = 2048
END_SECONDS: Final = 4.0  # for all components to end by themselves
OPEN_FILES: Final = 1 << 16
LONGEST_FOLDER: Final = 90  # with the socket's name within the 107 bytes that a path may have


@dataclass(frozen=True, slots=True)
class Said:
    component: Component
    report: Report


@dataclass(frozen=True, slots=True)
class Ended:
    component: Component
    how: str


@dataclass(frozen=True, slots=True)
class Told:
    """To end, by a signal."""

    signal: signal.Signals


Event = Said | Ended | Told


@dataclass(frozen=True, slots=True)
class Outcome:
    """code: what the command exits with, and why."""

    code: int
    why: str


class Supervisor:
    """One engine and one gateway, each a process of its own."""

    def __init__(self, config: Config, screen: Screen, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._screen = screen
        self._listener = listener
        self._socket = folder / "engine.sock"
        self._secret = secrets.token_urlsafe(32)
        self._api_keys = config.api_keys()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def run(self) -> Outcome:
        """Until there is a reason to end, and then until no process is left."""
        self._screen.step("starting processes")
        for number in _heeded():
            asyncio.get_running_loop().add_signal_handler(number, self._events.put_nowait, Told(number))
        async with asyncio.TaskGroup() as group:
            engine = await Component.start("engine", ENGINE)
            gateway = await Component.start("gateway", GATEWAY, [self._listener.fileno()])
            for component in (engine, gateway):
                group.create_task(self._hear(component))
                group.create_task(self._show(component))
            try:
                return await self._supervise(engine, gateway)
            finally:
                self._listener.close()
                await end(gateway, engine)

    async def _supervise(self, engine: Component, gateway: Component) -> Outcome:
        await engine.order(
            EngineOrder(spec=self._config.engine(), socket=str(self._socket), secret=self._secret)
        )
        chat: tuple[str, ...] = ()
        while True:
            match await self._events.get():
                case Said(_, Progress(text)):
                    self._screen.step(text)
                case Said(component, Ready(names)) if component is engine:
                    chat = names
                    self._screen.step("starting the gateway")
                    await gateway.order(self._gateway_order())
                case Said(_, Ready()):
                    models = {name: model.path for name, model in self._config.models.items()}
                    locked = self._config.api_key_file is not None
                    self._screen.ready(self._url(), models, chat, locked=locked)
                case Said(_, Refused(message)):
                    return Outcome(2, message)
                case Ended(component, how):
                    return Outcome(1, f"the {component.name} {how}; the fleet has ended with it")
                case Told(number):
                    self._screen.step(f"ending the fleet ({number.name})")
                    return Outcome(0, number.name)

    def _gateway_order(self) -> GatewayOrder:
        return GatewayOrder(
            engine=f"unix://{self._socket}",
            secret=self._secret,
            listener=self._listener.fileno(),
            api_keys=self._api_keys,
            max_body=self._config.max_body,
        )

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _hear(self, component: Component) -> None:
        async for report in component.reports():
            self._events.put_nowait(Said(component, report))
        self._events.put_nowait(Ended(component, await component.ended()))

    async def _show(self, component: Component) -> None:
        async for line in component.logs():
            self._screen.log(component.name, line)


async def end(*components: Component) -> None:
    """One after the other, as each is needed by those before; all within END_SECONDS."""
    try:
        async with asyncio.timeout(END_SECONDS):
            for component in components:
                component.let_go()
                await component.ended()
    except TimeoutError:
        for component in components:
            component.kill()
        for component in components:
            await component.ended()


def serve_fleet(config: Config) -> int:
    """`kvloom serve`, once it is clear what to serve."""
    screen = Screen(Console(highlight=False), WallClock())
    _raise_open_files()
    with _listen(config.host, config.port) as listener, _private_folder() as folder:
        try:
            outcome = asyncio.run(Supervisor(config, screen, listener, folder).run())
        finally:
            screen.close()
    if outcome.code == 2:
        raise ConfigError(outcome.why)
    if outcome.code:
        print(f"kvloom: {outcome.why}", file=sys.stderr)
    return outcome.code


def _heeded() -> list[signal.Signals]:
    """The signals that end the fleet; not those that it was started to ignore, as by nohup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Callers may connect from now on, and are answered once the fleet is ready."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "no name of a machine"
        raise ConfigError(f"host: {host}: {problem}; an address of this machine is right") from error
    try:
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host: {host} is not this machine; an address of it is right") from error
        problem = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(
            f"port: {port} at {host}: {problem}; another, or 0 for any free one, is right"
        ) from error
    with listener:
        yield listener


@contextmanager
def _private_folder() -> Iterator[Path]:
    """For sockets; nobody else can enter it."""
    folder = tempfile.mkdtemp(prefix="kvloom-")
    try:
        if len(os.fsencode(folder)) > LONGEST_FOLDER:
            raise ConfigError(f"TMPDIR: {folder} is too long for a socket's path; name a shorter folder")
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _raise_open_files() -> None:
    """Each stream holds a connection on both sides of the gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

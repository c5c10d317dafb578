"""Starts the processes of a fleet, keeps them alive and ends them all."""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from kvloom.config import Config
from kvloom.core.clock import Clock, WallClock
from kvloom.core.errors import ConfigError
from kvloom.core.spec import EngineSpec
from kvloom.serve import events
from kvloom.serve.events import Answers, Asks, Doing, Failed, Lost
from kvloom.serve.ground import listen, private_folder, raise_open_files
from kvloom.serve.health import answers
from kvloom.serve.orders import EngineOrder, GatewayOrder, Restart, Restarted, Standing
from kvloom.serve.screen import Screen
from kvloom.serve.supervised import Role, State, Supervised

ENGINE: Final = "kvloom.serve.engine_process"
GATEWAY: Final = "kvloom.serve.gateway_process"
END_SECONDS: Final = 4.0  # for all processes to end by themselves


@dataclass(frozen=True, slots=True)
class Told:
    """To end, by a signal."""

    signal: signal.Signals


Event = events.Event | Told


@dataclass(frozen=True, slots=True)
class Outcome:
    """code: what the command exits with, and why."""

    code: int
    why: str


class Supervisor:
    """An engine for each unit and replica, and one gateway, each a process of its own. It holds the socket at
    which clients connect, so that they may wait for a gateway that is being replaced."""

    def __init__(
        self, config: Config, screen: Screen, clock: Clock, listener: socket.socket, folder: Path
    ) -> None:
        self._config = config
        self._screen = screen
        self._clock = clock
        self._listener = listener
        self._folder = folder
        self._secret = secrets.token_urlsafe(32)
        self._api_keys = config.api_keys()
        self._admin_keys = config.admin_keys()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._announced = False
        self._standing = Standing()
        self._engines = [self._supervise(self._engine_role(spec)) for spec in config.engines]
        self._gateway = self._supervise(self._gateway_role())

    async def run(self) -> Outcome:
        """Until there is a reason to end, and then until no process is left."""
        self._screen.step("starting the fleet")
        for number in _heeded():
            asyncio.get_running_loop().add_signal_handler(number, self._events.put_nowait, Told(number))
        async with asyncio.TaskGroup() as group:
            for process in (*self._engines, self._gateway):
                group.create_task(process.run())
            try:
                return await self._follow()
            finally:
                self._listener.close()
                await end([self._gateway], self._engines)

    async def _follow(self) -> Outcome:
        while True:
            match await self._events.get():
                case Doing(process, text) if self._announced:
                    self._screen.log(process.name, text)
                case Doing(process, text):
                    self._screen.step(text, self._label(process))
                case Answers(process, renewed):
                    if renewed:
                        await self._gateway.order(Restarted(process.name))
                    await self._welcome(process)
                case Asks(_, Restart(unit)):
                    self._restart(unit)
                case Lost(process, how, pause, renewed):
                    self._screen.warn(process.name, f"{how}; it starts again in {pause:g} s")
                    if renewed:
                        problem = f"{process.name} {how} as it started; it is tried again"
                        await self._gateway.order(Restarted(process.name, problem))
                case Failed(process, how, refused):
                    return Outcome(2, how) if refused else Outcome(1, f"{process.name} {how} as it started")
                case Told(number):
                    self._screen.step(f"ending the fleet ({number.name})")
                    return Outcome(0, number.name)

    async def _welcome(self, process: Supervised) -> None:
        """One more answers: when all engines do, the gateway may serve, and with it the fleet is ready."""
        self._screen.done(self._label(process))
        engines_ready = all(engine.state is State.READY for engine in self._engines)
        if self._announced:
            self._screen.log(process.name, "answers again")
        elif engines_ready and not self._gateway.begun:
            self._screen.step("starting the gateway")
            await self._gateway.begin()
        elif engines_ready and self._gateway.state is State.READY:
            self._announce()

    def _restart(self, unit: str) -> None:
        self._screen.log(unit, "ends, and starts anew, as was asked")
        next(engine for engine in self._engines if engine.name == unit).restart()

    def _hear(self, event: Event) -> None:
        """What is to be kept is kept before anything else can happen to who said it."""
        match event:
            case Asks(_, Standing() as standing):
                self._standing = standing
            case _:
                self._events.put_nowait(event)

    def _announce(self) -> None:
        self._announced = True
        models = {name: model.path for name, model in self._config.models.items()}
        chat = [name for name in models if any(name in engine.chat for engine in self._engines)]
        self._screen.ready(self._url(), models, chat, locked=self._config.api_key_file is not None)

    def _label(self, process: Supervised) -> str:
        """Whose step it is, where there are several to tell apart."""
        return process.name if len(self._engines) > 1 else ""

    def _supervise(self, role: Role) -> Supervised:
        return Supervised(role, self._clock, tell=self._hear, log=self._screen.log)

    def _engine_role(self, spec: EngineSpec) -> Role:
        """A new process serves at the same path, by which the gateway finds it."""
        path = self._socket(spec.unit)
        return Role(
            name=spec.unit,
            module=ENGINE,
            order=lambda: EngineOrder(spec=spec, socket=path, secret=self._secret),
            check=functools.partial(answers, path, self._secret),
        )

    def _gateway_role(self) -> Role:
        listener = self._listener.fileno()
        return Role(name="gateway", module=GATEWAY, order=self._gateway_order, inherit=[listener], held=True)

    def _gateway_order(self) -> GatewayOrder:
        return GatewayOrder(
            engines={spec.unit: f"unix://{self._socket(spec.unit)}" for spec in self._config.engines},
            secret=self._secret,
            listener=self._listener.fileno(),
            api_keys=self._api_keys,
            admin_keys=self._admin_keys,
            max_body=self._config.max_body,
            program=self._config.program,
            folder=str(self._config.folder),
            sockets=str(self._folder),
            drain=self._config.drain,
            patience=self._config.patience,
            standing=self._standing,
        )

    def _socket(self, unit: str) -> str:
        return str(self._folder / f"{unit}.sock")

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def end(*waves: list[Supervised]) -> None:
    """One wave after the other, as each is needed by those before; all within END_SECONDS."""
    try:
        async with asyncio.timeout(END_SECONDS):
            for wave in waves:
                for process in wave:
                    process.end()
                for process in wave:
                    await process.ended()
    except TimeoutError:
        for process in (process for wave in waves for process in wave):
            process.kill()


def serve_fleet(config: Config) -> int:
    """`kvloom serve`, once it is clear what to serve."""
    clock = WallClock()
    screen = Screen(Console(highlight=False), clock)
    raise_open_files()
    with listen(config.host, config.port) as listener, private_folder() as folder:
        try:
            outcome = asyncio.run(Supervisor(config, screen, clock, listener, folder).run())
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

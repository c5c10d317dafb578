"""Starts the processes of a fleet, keeps them alive and ends them all."""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.config.config import Config
from kvloom.serve import events
from kvloom.serve.engines import Engines
from kvloom.serve.events import Answers, Asks, Doing, Failed, Lost
from kvloom.serve.forkserver import ForkServer
from kvloom.serve.gateways import Gateways
from kvloom.serve.orders import Asked, Away, Back, Forget, Restart, Restarted, Run, Standing, Stop, Stopped
from kvloom.serve.roles import ENGINE, Roles
from kvloom.serve.screen import Screen
from kvloom.serve.supervised import Role, State, Supervised
from kvloom.types.clock import Clock
from kvloom.types.spec import EngineSpec

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
    """An engine for each unit and replica, one gateway, and a fleet scheduler where requests can move, each a
    process of its own. It holds the socket at which clients connect, so that they may wait for a gateway that
    is being replaced."""

    def __init__(
        self, config: Config, screen: Screen, clock: Clock, listener: socket.socket, folder: Path
    ) -> None:
        self._config = config
        self._screen = screen
        self._clock = clock
        self._listener = listener
        self._roles = Roles(config, listener, folder)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._announced = False
        self._standing = Standing()
        self._forks = ForkServer([ENGINE], clock, screen.log)
        self._engines = Engines(config.engines, config.first, self._roles.engine, self._supervise)
        role = self._roles.gateway(lambda: self._standing, self._engines)
        self._gateways = Gateways(role, self._supervise, seconds=config.drain)
        self._scheduler: Supervised | None = None  # until there is a fleet

    async def run(self) -> Outcome:
        """Until there is a reason to end, and then until no process is left."""
        self._screen.step("starting the fleet")
        for number in _heeded():
            asyncio.get_running_loop().add_signal_handler(number, self._events.put_nowait, Told(number))
        async with asyncio.TaskGroup() as group:
            forks = group.create_task(self._forks.run())  # first: engines that start now are its forks
            for process in (*self._engines.every, self._gateways.current):
                group.create_task(process.run())
            try:
                return await self._follow(group)
            finally:
                self._listener.close()
                schedulers = [self._scheduler] if self._scheduler else []
                forks.cancel()
                await end([*schedulers, *self._gateways.every], self._engines.every)

    async def _follow(self, group: asyncio.TaskGroup) -> Outcome:
        while True:
            match await self._events.get():
                case Doing(process, text) if self._announced:
                    self._screen.log(process.name, text)
                case Doing(process, text):
                    self._screen.step(text, self._label(process))
                case Answers(process, renewed, again):
                    if renewed or (self._announced and not again and self._is_unit(process)):
                        await self._gateways.tell(Restarted(process.name))
                    elif again and self._is_unit(process):
                        await self._gateways.tell(Back(process.name))
                    await self._welcome(process, group, again=again)
                case Asks(_, asked):
                    self._do(asked, group)
                case Lost(process, how, pause, renewed):
                    self._screen.warn(process.name, f"{how}; it starts again in {pause:g} s")
                    if renewed:
                        problem = f"{process.name} {how} as it started; it is tried again"
                        await self._gateways.tell(Restarted(process.name, problem))
                case Failed(process, how, refused):
                    problem = how if refused else f"{process.name} {how} as it started"
                    if not await self._serves_on_without(process, how, problem):
                        return Outcome(2 if refused else 1, problem)
                case Told(number):
                    self._screen.step(f"ending the fleet ({number.name})")
                    return Outcome(0, number.name)

    async def _serves_on_without(self, process: Supervised, how: str, problem: str) -> bool:
        """A gateway that was to take another's place, and a unit that came late, are no reason to end."""
        if process is self._gateways.heir:
            self._screen.warn(process.name, f"{how}; the present one serves on")
            await self._gateways.lost_heir(how)
            return True
        if self._announced and self._is_unit(process):
            self._screen.warn(process.name, problem)
            await self._gateways.tell(Restarted(process.name, problem))
            await self._gateways.tell(Away(self._engines.away | {process.name}))
            return True
        return False

    def _is_unit(self, process: Supervised) -> bool:
        return process.name in self._engines.specs

    async def _welcome(self, process: Supervised, group: asyncio.TaskGroup, *, again: bool) -> None:
        """One more answers: when all engines do, the gateway may serve, and with it the fleet is ready."""
        self._screen.done(self._label(process))
        if process in self._gateways.every:
            await process.order(Away(self._engines.away))
        if process is self._gateways.heir:
            group.create_task(self._gateways.see_off(self._gateways.hand_over()))
        engines_ready = all(engine.state is State.READY for engine in self._engines.every)
        gateway = self._gateways.current
        if self._announced:
            self._screen.log(process.name, "answers again" if again else "answers")
        elif engines_ready and not gateway.begun:
            self._screen.step("starting the gateway")
            await gateway.begin()
        elif engines_ready and gateway.state is State.READY:
            self._announce()
            self._schedule(group)

    def _schedule(self, group: asyncio.TaskGroup) -> None:
        """A fleet scheduler, where there is something to move or to start, and none yet."""
        spec = self._config.scheduler_for(self._engines.specs.values())
        if spec and not self._scheduler:
            self._scheduler = self._supervise(self._roles.scheduler(spec))
            group.create_task(self._scheduler.run())

    def _do(self, asked: Asked, group: asyncio.TaskGroup) -> None:
        match asked:
            case Restart(component):
                self._restart(component, group)
            case Run(spec):
                self._run(spec, group)
            case Stop(unit):
                self._screen.log(unit, "ends, as was asked")
                group.create_task(self._stop(unit))
            case Forget(unit):
                self._engines.forget(unit)

    def _run(self, spec: EngineSpec, group: asyncio.TaskGroup) -> None:
        self._screen.log(spec.unit, "starts, as was asked")
        self._engines.specs[spec.unit] = spec
        group.create_task(self._start(spec))
        self._schedule(group)

    async def _start(self, spec: EngineSpec) -> None:
        """Whoever asks for one that answers already is told so."""
        known = self._engines.running.get(spec.unit)
        if known is None:
            await self._engines.start(spec)
        elif known.state is State.READY:
            await self._gateways.tell(Restarted(spec.unit))

    async def _stop(self, unit: str) -> None:
        await self._gateways.alone()
        await self._engines.stop(unit)
        await self._gateways.tell(Stopped(unit))
        await self._gateways.tell(Away(self._engines.away))
        self._screen.log(unit, "has ended")

    def _restart(self, component: str, group: asyncio.TaskGroup) -> None:
        if component == self._gateways.current.name:
            self._screen.log(component, "another one starts, as was asked, and takes its place")
            group.create_task(self._gateways.replace())
            return
        known = self._scheduler if component == "scheduler" else self._engines.running.get(component)
        if known is None:
            problem = f"{component} has no process that could start anew"
            group.create_task(self._gateways.tell(Restarted(component, problem)))
            return
        self._screen.log(component, "ends, and starts anew, as was asked")
        known.restart()

    def _hear(self, event: Event) -> None:
        """What is to be kept is kept before anything else can happen to who said it."""
        match event:
            case Asks(process, Standing() as standing) if not self._gateways.has_left(process):
                self._standing = standing
            case _:
                self._events.put_nowait(event)

    def _announce(self) -> None:
        self._announced = True
        models = {name: model.path for name, model in self._config.models.items()}
        chat = [name for name in models if any(name in engine.chat for engine in self._engines.every)]
        self._screen.ready(self._roles.url, models, chat, locked=self._config.api_key_file is not None)

    def _label(self, process: Supervised) -> str:
        """Whose step it is, where there are several to tell apart."""
        return process.name if len(self._engines.specs) > 1 else ""

    def _supervise(self, role: Role) -> Supervised:
        return Supervised(role, self._clock, tell=self._hear, log=self._screen.log, spawn=self._forks.spawn)


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


def _heeded() -> list[signal.Signals]:
    """The signals that end the fleet; not those that it was started to ignore, as by nohup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

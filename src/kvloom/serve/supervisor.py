"""Runs a fleet's controller, and shows a person what becomes of the fleet: in `kvloom serve` on one host, in
the controller's process on a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Counted, Ended, Launcher, News, NodeReport
from kvloom.cluster.reconcile import TIMING, Timing
from kvloom.cluster.state import (
    GATEWAY,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    UnitSpec,
    gateway_node,
    is_gateway,
)
from kvloom.cluster.store import SpecStore
from kvloom.config.config import Config
from kvloom.journal.file import JournalFile
from kvloom.journal.log import Copies, Journal
from kvloom.journal.records import Journaled, Noted, Record
from kvloom.serve.local import ENGINE_MODULE, Doors, Heard, LocalLauncher, Roles, doors, shown_url
from kvloom.serve.machine import private_folder
from kvloom.serve.processes.forkserver import ForkServer
from kvloom.serve.processes.lease import MARGIN_SECONDS
from kvloom.serve.processes.log import Background, log_to
from kvloom.serve.processes.messages import StartProgress
from kvloom.serve.processes.prefork import LaunchedForkServer
from kvloom.serve.screen import FleetReady, Screen
from kvloom.serve.systemd import READY, STOPPING, ServiceManager
from kvloom.types.clock import Clock, WallClock

END_SECONDS: Final = 4.0  # for all processes to end by themselves


@dataclass(frozen=True, slots=True)
class Outcome:
    """The command's exit code, and the reason."""

    code: int
    why: str


class FleetLauncher(Launcher, Protocol):
    """A launcher that tells gateways of the journal, too."""

    def tell(self, component: str, news: News | Journaled) -> None: ...


class Hosts(Protocol):
    """The hosts on which a fleet's processes run."""

    url: str
    """The gateway's address for people."""

    def launcher(self, tasks: asyncio.TaskGroup, hearing: Hearing) -> FleetLauncher:
        """Returns the launcher of the fleet's processes. It is asked for once."""

    async def answered(self) -> None:
        """Waits until each host that is there has answered, so that the first one does not get all units."""

    def changed(self, spec: FleetSpec, status: FleetStatus) -> None:
        """A process of the fleet has entered another phase."""

    async def end(self) -> None:
        """Ends all processes of the fleet."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """Takes what hosts tell of the fleet's processes."""

    hear: Callable[[str, Heard], None]
    """Is called with a component and what it reports, or is reported of it."""
    hear_node: Callable[[NodeReport], None]
    log: Callable[[str, str], None]
    """Is called with a component's name and a line that it prints."""
    timing: Timing


class ThisHost:
    """Satisfies `Hosts` with the host on which it runs. It holds the socket at which clients connect, so that
    they may wait for a gateway that is being replaced."""

    def __init__(
        self,
        config: Config,
        at: Doors,
        folder: Path,
        clock: Clock,
        log: Callable[[str, str], None],
        forks: LaunchedForkServer | None,
    ) -> None:
        """at: the sockets at which the gateway is called; folder: the fleet's own, for sockets; log: called
        with the lines that the fork server prints."""
        self.url = shown_url(config, *at.listener.getsockname()[:2])
        self._roles = Roles(config, at, folder)
        self._clock = clock
        self._at = at
        self._forks = ForkServer([ENGINE_MODULE], clock, log, first=forks)
        self._launcher: LocalLauncher
        self._forking: asyncio.Task[None]

    def launcher(self, tasks: asyncio.TaskGroup, hearing: Hearing) -> LocalLauncher:
        # first, so that engines that start now are its forks
        self._forking = tasks.create_task(self._forks.run())
        self._launcher = LocalLauncher(
            self._roles.of,
            tasks,
            self._clock,
            hear=hearing.hear,
            log=hearing.log,
            timing=hearing.timing,
            start=self._forks.start,
        )
        return self._launcher

    async def answered(self) -> None:
        """Returns at once: it is this host."""

    def changed(self, spec: FleetSpec, status: FleetStatus) -> None:
        """Does nothing: nobody else is told."""

    async def end(self) -> None:
        self._at.listener.close()
        self._forking.cancel()
        await self._launcher.end(END_SECONDS)


class Supervisor:
    """Runs a fleet: an engine for each unit and replica, gateways and, if requests can move, a fleet
    scheduler, each a process of its own."""

    def __init__(
        self,
        config: Config,
        spec: FleetSpec,
        hosts: Hosts,
        screen: Screen,
        clock: Clock,
        manager: ServiceManager,
        store: SpecStore | None = None,
    ) -> None:
        """spec: what the fleet is to be, if `store` keeps nothing; manager: is told when the fleet serves,
        and that it lives."""
        self._manager = manager
        self._config = config
        self._spec = spec
        self._hosts = hosts
        self._screen = screen
        screen.show_as(config.log_level, config.log_format)
        self._clock = clock
        self._store = store
        self._events: asyncio.Queue[Callable[[], Outcome | None]] = asyncio.Queue()
        """The lines and events that are still to be shown; the task that shows them returns why the fleet
        ends, if it does."""
        self._announced = False
        self._refused: set[str] = set()  # Components that could not use their orders.
        self._journal = Journal(clock, epoch=time.time() - clock.now())
        self._copies: Copies
        self._controller: Controller

    async def run(self) -> Outcome:
        """Serves until there is a reason to end, and then until no process is left. Raises ConfigError if
        what the store keeps cannot be used."""
        self._screen.step("starting the fleet")
        for number in heeded():
            asyncio.get_running_loop().add_signal_handler(number, self.end, number.name)
        # `check` is how soon a process that hangs is noticed (serve/local.py).
        timing = Timing(
            check=self._config.watchdog / TIMING.misses,
            load=self._config.load_timeout,
            lease=self._config.node_lease + MARGIN_SECONDS,
        )
        hearing = Hearing(
            hear=self._hear,
            hear_node=lambda report: self._controller.hear(report),  # noqa: PLW0108 -- it is made later
            log=self._screen.log,
            timing=timing,
        )
        with ExitStack() as stack:
            return await self._serve(hearing, stack)

    async def _serve(self, hearing: Hearing, stack: ExitStack) -> Outcome:
        async with asyncio.TaskGroup() as group:
            watched = group.create_task(self._manager.keep_told(self._clock))
            launcher = self._hosts.launcher(group, hearing)
            self._copies = Copies(self._journal, launcher.tell)
            self._controller = Controller(
                self._spec,
                launcher,
                self._clock,
                store=self._store,
                timing=hearing.timing,
                watch=lambda *change: self._events.put_nowait(partial(self._show, *change)),
                journal=self._journal,
            )
            self._journal.follow(self._copy_journal)
            kept = stack.enter_context(kept_in(self._config.journal, self._screen))
            self._journal.follow(kept)
            if self._config.otlp is not None:
                self._journal.follow(stack.enter_context(traced_to(self._config.otlp, self._screen)))
            controlling = group.create_task(self._control())
            try:
                return await self._follow()
            finally:
                self._manager.tell(STOPPING)
                controlling.cancel()
                await self._hosts.end()
                watched.cancel()

    def _copy_journal(self, _: Sequence[Record]) -> None:
        """Tells the gateways that serve what is new."""
        there = self._controller.status.processes
        self._copies.update(
            {name: one.serial for name, one in there.items() if is_gateway(name) and one.phase == "ready"}
        )

    async def _control(self) -> None:
        await self._hosts.answered()
        await self._controller.run()

    def end(self, why: str) -> None:
        """Ends the fleet. why: as a person is told."""
        self._events.put_nowait(partial(self._end, why))

    async def _follow(self) -> Outcome:
        while True:
            show = await self._events.get()
            if outcome := show():
                return outcome

    def _hear(self, component: str, heard: Heard) -> None:
        """Takes in what a component reports, before anything else can happen to it."""
        match heard:
            case StartProgress(text):
                self._events.put_nowait(partial(self._show_step, component, text))
            case Edit():
                self._controller.answer(component, heard)
            case Counted():
                self._controller.count(component, heard)
            case Noted():
                self._journal.note(component, heard)
            case _:
                if isinstance(heard, Ended) and heard.refused:
                    self._refused.add(component)
                self._controller.hear(heard)

    # -- what a person sees -----------------------------------------------------------------------------

    def _end(self, why: str) -> Outcome:
        self._screen.step(f"ending the fleet ({why})")
        return Outcome(0, why)

    def _show_step(self, component: str, text: str) -> None:
        if self._announced:
            self._screen.log(_shown(component), text, "INFO")
        else:
            self._screen.step(text, self._label(component))

    def _show(self, component: str, before: ComponentStatus, process: ComponentStatus) -> Outcome | None:
        """Returns why the fleet ends, if it does."""
        name, screen = _shown(component), self._screen
        self._hosts.changed(self._controller.spec, self._controller.status)
        match process.phase:
            case "ready" if before.phase in ("starting", "absent"):  # absent: an earlier controller's
                self._welcome(component, again=before.proven > 0)
            case "waiting":
                screen.warn(name, f"{process.problem}; it starts again in {process.pause:g} s")
            case "failed":
                return self._failed(component, process)
            case "starting" if self._announced and before.phase == "absent" and not process.replaces:
                takes = "another one starts, as was asked, and takes its place"
                screen.log(name, takes if is_gateway(component) else "starts, as was asked", "INFO")
                self._schedule()
            case "ending":
                anew = "ends, and starts anew, as was asked"
                screen.log(name, anew if process.replaces else "ends, as was asked", "INFO")
            case "absent" if before.phase == "ending" and not process.replaces:
                screen.log(name, "has ended", "INFO")
        return None

    def _welcome(self, component: str, *, again: bool) -> None:
        """Shows that one more component answers. When all engines answer the gateway may serve, and with it
        the fleet is ready."""
        self._screen.done(self._label(component))
        if self._announced:
            self._screen.log(_shown(component), "answers again" if again else "answers", "INFO")
        elif is_gateway(component):
            self._announce()
            self._schedule()
        elif all(one.phase == "ready" for one in self._wanted()):
            self._screen.step("starting the gateway")

    def _failed(self, component: str, process: ComponentStatus) -> Outcome | None:
        """Returns why the fleet ends, if it does: a gateway that was to take another's place, and a unit that
        came late, are no reason."""
        name, refused = _shown(component), component in self._refused
        self._refused.discard(component)
        problem = process.problem if refused else f"{name} {process.problem} as it started"
        if not self._announced:
            return Outcome(2 if refused else 1, problem)
        said = f"{process.problem}; the present one serves on" if is_gateway(component) else problem
        self._screen.warn(name, said)
        return None

    def _wanted(self) -> list[ComponentStatus]:
        """Returns the status of each unit that is to have a process."""
        there = self._controller.status.processes
        units = self._controller.spec.units
        return [there.get(name, ComponentStatus()) for name, unit in units.items() if unit.wanted]

    def _announce(self) -> None:
        self._announced = True
        self._manager.tell(READY)
        models = {name: model.path for name, model in self._config.models.items()}
        routes = {name: route for process in self._wanted() for name, route in process.routes.items()}
        config, tls = self._config, self._config.tls
        authority = "" if tls is None or not tls.own_authority else str(tls.certificate)
        locked = bool(config.api_key_file or config.keys)
        self._screen.ready(FleetReady(self._hosts.url, models, routes, locked, authority))

    def _schedule(self) -> None:
        """Starts a fleet scheduler once there is something to move or to start, if there is none yet."""
        spec = self._controller.spec
        engines = [unit.engine for unit in spec.units.values()]
        if not spec.scheduler and self._config.scheduler_for(engines):
            self._controller.edit(Edit(scheduler=True))

    def _label(self, component: str) -> str:
        """Returns the component whose step it is, if there are several to tell apart."""
        return _shown(component) if len(self._controller.spec.units) > 1 else ""


@contextmanager
def traced_to(url: str, screen: Screen) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Gives a function that sends records to an OpenTelemetry collector, in the background."""
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415 -- an extra, which few have

    with tracing(url, "fleet", partial(screen.warn, "otlp")) as traces:
        yield traces.tell


@contextmanager
def kept_in(path: Path | None, screen: Screen) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Gives a function that writes records to a file, in the background. A file that cannot be written is
    told of once; what that has cost, when it can be again, or at the end. path: None for no file."""
    if path is None:
        yield lambda _: None
        return
    file, failing = JournalFile(path), False
    lines = Background("journal", lambda lost: screen.warn("journal", f"{path}: {lost} records are lost"))

    def write(records: Sequence[Record]) -> None:
        nonlocal failing
        try:
            file.write(records)
        except OSError as error:
            if not failing:
                why = error.strerror or str(error)
                screen.warn("journal", f"{path}: {why}; the fleet serves on without its journal's file")
            failing = True
            raise  # so that they count as lost
        failing = False

    try:
        yield lambda records: lines.post(partial(write, tuple(records)), len(records))
    finally:
        if not lines.close():
            screen.warn("journal", f"{path}: not all records are written; {lines.lost} or more are lost")


def serve_fleet(config: Config, forks: LaunchedForkServer | None) -> Outcome:
    """Serves on this host until the fleet ends, and returns how it did. Raises ConfigError if nothing can be
    listened at, or there is no place for sockets."""
    clock = WallClock()
    screen = Screen(Console(highlight=False), clock)
    log_to(lambda text: screen.log("fleet", text))
    with private_folder() as folder, doors(config.host, config.port, folder) as at:
        here = ThisHost(config, at, folder, clock, screen.log, forks)
        manager = ServiceManager.named_by(os.environ)
        supervisor = Supervisor(config, specified(config), here, screen, clock, manager)
        return shown(screen, lambda: asyncio.run(supervisor.run()))


def shown(screen: Screen, run: Callable[[], Outcome]) -> Outcome:
    """Returns how a fleet has ended, once the screen shows all that was told. The process ends here if nobody
    reads the screen."""
    try:
        outcome = run()
    finally:
        written = screen.close()
    if not written:
        os._exit(outcome.code)  # the interpreter's own end would wait for whoever does not read
    return outcome


def specified(config: Config, node: str = "") -> FleetSpec:
    """Returns what the config's fleet is to be at first. node: that of its controller, if its processes are
    on nodes of a cluster; it has a gateway if the config names no node for that."""
    on_nodes = bool(node)
    return FleetSpec(
        on_nodes=on_nodes,
        gateways=config.gateways or (node,) if on_nodes else (),
        units={
            engine.unit: UnitSpec(
                engine=engine,
                wanted=engine.unit in config.first,
                node=config.nodes.get(engine.unit, "") if on_nodes else "",
            )
            for engine in config.engines
        },
        groups=dict(config.groups),
        program=config.program,
        proven=config.program,
        drain=config.drain,
    )


def _shown(component: str) -> str:
    """Returns the component's name for a person."""
    if not is_gateway(component):
        return component
    return f"{GATEWAY}@{node}" if (node := gateway_node(component)) else GATEWAY


def heeded() -> list[signal.Signals]:
    """Returns the signals that end the fleet; those that it was started to ignore, as by nohup, do not."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

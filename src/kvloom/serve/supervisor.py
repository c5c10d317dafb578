"""The process of `kvloom serve`: the fleet's controller, its processes here, and what a person sees."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Counted, Ended
from kvloom.cluster.reconcile import TIMING, Timing
from kvloom.cluster.state import GATEWAY, ComponentStatus, FleetSpec, UnitSpec, gateway_node, is_gateway
from kvloom.config.config import Config
from kvloom.config.tls import TlsFiles
from kvloom.serve.local import ENGINE_MODULE, Doors, Heard, LocalLauncher, Roles, doors, shown_url
from kvloom.serve.machine import private_folder
from kvloom.serve.nodes.launcher import Cluster, NodesLauncher
from kvloom.serve.processes.forkserver import ForkServer
from kvloom.serve.processes.identity import calling_context
from kvloom.serve.processes.log import log_to
from kvloom.serve.processes.messages import StartProgress
from kvloom.serve.processes.prefork import LaunchedForkServer
from kvloom.serve.screen import Screen
from kvloom.serve.systemd import READY, STOPPING, ServiceManager
from kvloom.types.clock import Clock, WallClock

END_SECONDS: Final = 4.0  # for all processes to end by themselves


@dataclass(frozen=True, slots=True)
class Outcome:
    """The command's exit code, and the reason."""

    code: int
    why: str


class Supervisor:
    """Runs a fleet: an engine for each unit and replica, one gateway and, if requests can move, a fleet
    scheduler, each a process of its own. All are on this host, or all but the scheduler on the hosts of a
    cluster. Whoever starts gateways holds the socket at which clients connect, so that they may wait for one
    that is being replaced."""

    def __init__(
        self,
        config: Config,
        screen: Screen,
        clock: Clock,
        at: Doors | None,
        folder: Path,
        forks: LaunchedForkServer | None,
        manager: ServiceManager,
        cluster: Cluster | None = None,
    ) -> None:
        """at: where the gateway is called, if it is on this host; folder: the fleet's own, for sockets;
        manager: is told when the fleet serves, and that it lives; cluster: on whose hosts the engines and the
        gateways are, if not on this one."""
        self._manager = manager
        self._config = config
        self._screen = screen
        self._clock = clock
        self._at = at
        self._folder = folder
        self._cluster = cluster
        self._identity = None if cluster is None else cluster.identity.keep(folder)
        secret = "" if cluster is None else cluster.secret
        self._roles = Roles(config, at, folder, self._identity, secret)
        self._events: asyncio.Queue[Callable[[], Outcome | None]] = asyncio.Queue()
        """What is still to be shown; who shows it returns why the fleet ends, if it does."""
        self._announced = False
        self._forks = ForkServer([ENGINE_MODULE], clock, screen.log, first=forks)
        self._refused: set[str] = set()  # Components that could not use their orders.
        self._controller: Controller

    async def run(self) -> Outcome:
        """Serves until there is a reason to end, and then until no process is left."""
        self._screen.step("starting the fleet")
        for number in _heeded():
            asyncio.get_running_loop().add_signal_handler(
                number, self._events.put_nowait, partial(self._end, number)
            )
        # `check` is how soon a process that hangs is noticed (serve/local.py).
        timing = Timing(check=self._config.watchdog / TIMING.misses, load=self._config.load_timeout)
        async with asyncio.TaskGroup() as group:
            watched = group.create_task(self._manager.keep_told(self._clock))
            # first, so that engines that start now are its forks
            forks = group.create_task(self._forks.run())
            local = LocalLauncher(
                self._roles.of,
                group,
                self._clock,
                hear=self._hear,
                log=self._screen.log,
                timing=timing,
                start=self._forks.start,
            )
            launcher = local if self._identity is None else self._over_nodes(self._identity, local, group)
            self._controller = Controller(
                specified(
                    self._config,
                    on_nodes=self._cluster is not None,
                    home="" if self._cluster is None else self._cluster.home,
                ),
                launcher,
                self._clock,
                timing=timing,
                watch=lambda *change: self._events.put_nowait(partial(self._show, *change)),
            )
            controlling = group.create_task(self._control(launcher))
            try:
                return await self._follow()
            finally:
                self._manager.tell(STOPPING)
                controlling.cancel()
                if self._at is not None:
                    self._at.listener.close()
                forks.cancel()
                await launcher.end(END_SECONDS)
                if self._cluster is not None:
                    await self._cluster.end()
                watched.cancel()

    def _over_nodes(
        self, identity: TlsFiles, local: LocalLauncher, group: asyncio.TaskGroup
    ) -> NodesLauncher:
        return NodesLauncher(
            local,
            calling_context(identity),
            group,
            self._clock,
            hear=self._hear,
            hear_node=lambda report: self._controller.hear(report),  # noqa: PLW0108 -- it is made later
            log=self._screen.log,
            lease=self._config.node_lease,
            gateway=self._roles.gateway,
        )

    async def _control(self, launcher: LocalLauncher | NodesLauncher) -> None:
        """Runs the controller; if there are hosts, once those that are there have joined, so that the first
        to answer does not get all units."""
        if self._cluster is None or isinstance(launcher, LocalLauncher):
            await self._controller.run()
            return
        await self._cluster.look(launcher, self._screen.warn)
        await launcher.answered()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._controller.run())
            tasks.create_task(self._cluster.follow(launcher, self._screen.warn))

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
            case _:
                if isinstance(heard, Ended) and heard.refused:
                    self._refused.add(component)
                self._controller.hear(heard)

    # -- what a person sees -----------------------------------------------------------------------------

    def _end(self, number: signal.Signals) -> Outcome:
        self._screen.step(f"ending the fleet ({number.name})")
        return Outcome(0, number.name)

    def _show_step(self, component: str, text: str) -> None:
        if self._announced:
            self._screen.log(_shown(component), text)
        else:
            self._screen.step(text, self._label(component))

    def _show(self, component: str, before: ComponentStatus, process: ComponentStatus) -> Outcome | None:
        """Returns why the fleet ends, if it does."""
        name, screen = _shown(component), self._screen
        match process.phase:
            case "ready" if before.phase == "starting":
                self._welcome(component, again=before.proven > 0)
            case "waiting":
                screen.warn(name, f"{process.problem}; it starts again in {process.pause:g} s")
            case "failed":
                return self._failed(component, process)
            case "starting" if self._announced and before.phase == "absent" and not process.replaces:
                takes = "another one starts, as was asked, and takes its place"
                screen.log(name, takes if is_gateway(component) else "starts, as was asked")
                self._schedule()
            case "ending":
                anew = "ends, and starts anew, as was asked"
                screen.log(name, anew if process.replaces else "ends, as was asked")
            case "absent" if before.phase == "ending" and not process.replaces:
                screen.log(name, "has ended")
        return None

    def _welcome(self, component: str, *, again: bool) -> None:
        """Shows that one more component answers. When all engines answer the gateway may serve, and with it
        the fleet is ready."""
        self._screen.done(self._label(component))
        if self._announced:
            self._screen.log(_shown(component), "answers again" if again else "answers")
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
        chatty = {name for process in self._wanted() for name in process.chat}
        chat = [name for name in models if name in chatty]
        config, tls = self._config, self._config.tls
        authority = "" if tls is None or not tls.own_authority else str(tls.certificate)
        locked = bool(config.api_key_file or config.keys)
        self._screen.ready(self._url, models, chat, locked=locked, authority=authority)

    @property
    def _url(self) -> str:
        """Returns the address of a gateway for people."""
        if self._at is not None:
            return shown_url(self._config, *self._at.listener.getsockname()[:2])
        host, nodes = self._config.host, self._controller.spec.gateways
        return shown_url(self._config, nodes[0] if host in ("0.0.0.0", "::") else host, self._config.port)

    def _schedule(self) -> None:
        """Starts a fleet scheduler once there is something to move or to start, if there is none yet."""
        spec = self._controller.spec
        engines = [unit.engine for unit in spec.units.values()]
        if not spec.scheduler and self._config.scheduler_for(engines):
            self._controller.edit(Edit(scheduler=True))

    def _label(self, component: str) -> str:
        """Returns the component whose step it is, if there are several to tell apart."""
        return _shown(component) if len(self._controller.spec.units) > 1 else ""


def serve_fleet(config: Config, forks: LaunchedForkServer | None, cluster: Cluster | None = None) -> Outcome:
    """Serves until the fleet ends, and returns how it did. cluster: on whose hosts the engines are. Raises
    ConfigError if nothing can be listened at, or there is no place for sockets."""
    clock = WallClock()
    screen = Screen(Console(highlight=False), clock)
    log_to(lambda line: screen.warn("fleet", line))
    manager = ServiceManager.named_by(os.environ)
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        at = None if cluster is not None else stack.enter_context(doors(config.host, config.port, folder))
        supervisor = Supervisor(config, screen, clock, at, folder, forks, manager, cluster)
        try:
            outcome = asyncio.run(supervisor.run())
        finally:
            written = screen.close()
    if not written:
        os._exit(outcome.code)  # the interpreter's own end would wait for whoever does not read
    return outcome


def specified(config: Config, *, on_nodes: bool = False, home: str = "") -> FleetSpec:
    """Returns what the config's fleet is to be at first. on_nodes: whether its processes are on hosts of a
    cluster; home: the node that has a gateway if the config names none."""
    return FleetSpec(
        on_nodes=on_nodes,
        gateways=config.gateways or (home,) if on_nodes else (),
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


def _heeded() -> list[signal.Signals]:
    """Returns the signals that end the fleet; those that it was started to ignore, as by nohup, do not."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

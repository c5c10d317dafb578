"""The process of a cluster's controller: `python -m kvloom.serve.nodes.controller_process`.

It reads a `FleetOrder` from its stdin, and prints the path of the socket at which others attach to it. It is
nobody's child and no part of Ray, so that neither takes it along. If it dies, what runs at the hosts serves
on, and Ray's actor starts another one, which finds it.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from kvloom.cluster.state import ABSENT, ALIVE, FleetSpec, FleetStatus
from kvloom.cluster.store import SpecFile
from kvloom.config.config import Config
from kvloom.serve.local import LocalLauncher, Roles, shown_url
from kvloom.serve.machine import listen_inside, private_folder, raise_open_files
from kvloom.serve.nodes.attach import (
    AttachActor,
    AttachView,
    Done,
    EndFleet,
    FromActor,
    FromView,
    KeeperMissed,
    Line,
    Looked,
    NodeFound,
    NodeGone,
    NodeProblem,
    Over,
    ResourceBundle,
    ResourceBundles,
    SignOfLife,
    SpecCopy,
    Step,
    ToActor,
    ToView,
)
from kvloom.serve.nodes.detached import claim
from kvloom.serve.nodes.home import FleetHome, FleetOrder
from kvloom.serve.nodes.launcher import NodesLauncher
from kvloom.serve.nodes.wire import Wire
from kvloom.serve.processes.identity import calling_context
from kvloom.serve.processes.log import log_to
from kvloom.serve.screen import FleetReady, Screen
from kvloom.serve.supervisor import END_SECONDS, FleetLauncher, Hearing, Outcome, Supervisor, shown, specified
from kvloom.serve.systemd import ServiceManager
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.spec import EngineSpec

LOOK_SECONDS: Final = 60.0  # for Ray's actor to tell of the nodes that there are
TOLD_SECONDS: Final = 2.0  # for all who are attached to hear that the fleet has ended
MOST_UNREAD: Final = 4 << 20  # bytes that a view may leave unread
_Attached = Wire[FromActor | FromView]


class SharedScreen(Screen):
    """A screen that others show as well."""

    def __init__(self, console: Console, clock: Clock) -> None:
        super().__init__(console, clock)
        self._views: set[_Attached] = set()
        self._ready: FleetReady | None = None

    def attach(self, view: _Attached) -> None:
        """Lets a view show what the screen shows now, and all later changes."""
        for of, (text, _) in self._steps.items():
            view.send(Step(text.removeprefix(f"{of}: "), of))
        if self._ready is not None:
            view.send(self._ready)
        self._views.add(view)

    def detach(self, view: _Attached) -> None:
        self._views.discard(view)

    def step(self, text: str, of: str = "") -> None:
        super().step(text, of)
        self._tell(Step(text, of))

    def done(self, of: str = "") -> None:
        super().done(of)
        self._tell(Done(of))

    def log(self, component: str, line: str, level: str = "") -> None:
        super().log(component, line, level)
        self._tell(Line(component, line, level))

    def ready(self, fleet: FleetReady) -> None:
        super().ready(fleet)
        self._ready = fleet
        self._tell(fleet)

    def _tell(self, told: ToView) -> None:
        for view in list(self._views):
            view.send(told)
            if view.unread > MOST_UNREAD:  # Nobody looks at it.
                self.detach(view)
                view.close()


class CopiedSpec:
    """Satisfies `SpecStore` with a file of which somebody else keeps a copy."""

    def __init__(self, path: Path, copy: Callable[[], None]) -> None:
        """copy: called each time that the file has changed."""
        self._file = SpecFile(path)
        self._copy = copy

    def load(self) -> tuple[FleetSpec, int] | None:
        return self._file.load()

    def save(self, spec: FleetSpec, life: int) -> None:
        self._file.save(spec, life)
        self._copy()


class ClusterHosts:
    """Satisfies `Hosts` with the nodes of which Ray's actor tells. The actor, and those who show the fleet,
    attach to it."""

    def __init__(
        self,
        home: FleetHome,
        config: Config,
        roles: Roles,
        node: str,
        context: ssl.SSLContext,
        screen: SharedScreen,
        clock: Clock,
        *,
        end: Callable[[str], None],
    ) -> None:
        """node: the node of this process; context: the TLS context by which keepers are called; end: called
        with the reason, ends the fleet. Raises ConfigError if what is kept of the fleet cannot be used."""
        host = (config.gateways or (node,))[0] if config.host in ("0.0.0.0", "::") else config.host
        self.url = shown_url(config, host, config.port)
        self.store = CopiedSpec(home.spec, self._copy)
        kept = self.store.load()
        self._life = 1 if kept is None else kept[1] + 1
        self._home = home
        self._roles = roles
        self._context = context
        self._screen = screen
        self._clock = clock
        self._lease = config.node_lease
        self._end = end
        self._attached: set[_Attached] = set()
        self._actors: set[_Attached] = set()
        self._reserved = ResourceBundles({})
        self._looked = asyncio.Event()  # once an actor has told of the nodes that there are
        self._launcher: NodesLauncher

    def launcher(self, tasks: asyncio.TaskGroup, hearing: Hearing) -> FleetLauncher:
        local = LocalLauncher(
            self._roles.of,
            tasks,
            self._clock,
            hear=hearing.hear,
            log=hearing.log,
            timing=hearing.timing,
        )
        self._launcher = NodesLauncher(
            local,
            self._context,
            tasks,
            self._clock,
            hear=hearing.hear,
            hear_node=hearing.hear_node,
            missed=lambda name: self._tell_actors(KeeperMissed(name)),
            log=hearing.log,
            lease=self._lease,
            life=self._life,
            gateway=self._roles.gateway,
        )
        return self._launcher

    def _tell_actors(self, message: ToActor) -> None:
        for actor in self._actors:
            actor.send(message)

    def changed(self, spec: FleetSpec, status: FleetStatus) -> None:
        reserved = ResourceBundles(
            {
                name: ResourceBundle(process.node, unit.engine.threads, _gpus(unit.engine))
                for name, unit in spec.units.items()
                if (process := status.processes.get(name, ABSENT)).phase in ALIVE and process.node
            }
        )
        if reserved != self._reserved:
            self._reserved = reserved
            self._tell_actors(reserved)

    async def answered(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._looked.wait()
        await self._launcher.answered()

    async def end(self) -> None:
        await self._launcher.end(END_SECONDS)

    # -- who is attached --------------------------------------------------------------------------------

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Heeds one who has attached, until the connection ends."""
        wire: _Attached = Wire(reader, writer, FromActor | FromView)
        self._attached.add(wire)
        try:
            async for message in wire.messages():
                self._heed(wire, message)
        except Unavailable as error:
            self._screen.warn("fleet", f"who has attached to the controller is cut off: {error.message}")
        finally:
            self._attached.discard(wire)
            self._actors.discard(wire)
            self._screen.detach(wire)
            wire.close()

    def _heed(self, wire: _Attached, message: FromActor | FromView) -> None:
        match message:
            case AttachActor():
                self._actors.add(wire)
                wire.send(self._reserved)
                self._copy()
            case NodeFound(name, address):
                self._launcher.join(name, address)
            case NodeGone(name):
                self._launcher.leave(name)
            case NodeProblem(name, problem):
                self._screen.warn(name, problem)
            case Looked():
                self._looked.set()
            case SignOfLife():
                wire.send(SignOfLife(self._lease))
            case AttachView():
                self._screen.attach(wire)
            case EndFleet(why):
                self._end(why)

    def _copy(self) -> None:
        with suppress(OSError):  # There is none yet.
            self._tell_actors(SpecCopy(self._home.spec.read_bytes()))

    async def tell_end(self, outcome: Outcome) -> None:
        """Tells all who are attached how the fleet has ended."""
        for wire in self._attached:
            wire.send(Over(outcome.code, outcome.why))
        with suppress(TimeoutError):  # Somebody may not read.
            async with asyncio.timeout(TOLD_SECONDS), asyncio.TaskGroup() as tasks:
                for wire in self._attached:
                    tasks.create_task(wire.end())


def _gpus(engine: EngineSpec) -> int:
    return 0 if engine.device == "cpu" else engine.tensor_parallel


def control(order: FleetOrder, screen: SharedScreen) -> Outcome:
    """Controls the fleet until it ends, and returns how it did. Raises ConfigError if it cannot begin."""
    home, clock, config = FleetHome(Path(order.folder)), WallClock(), order.config()
    with (
        private_folder() as folder,
        listen_inside(folder / "controller") as attaching,
    ):
        identity = order.identity.keep(folder)
        hosts = ClusterHosts(
            home,
            config,
            Roles(config, None, folder, identity, order.secret),
            order.node,
            calling_context(identity),
            screen,
            clock,
            end=lambda why: supervisor.end(why),  # noqa: PLW0108 -- it is made later
        )
        supervisor = Supervisor(
            config, specified(config, order.node), hosts, screen, clock, ServiceManager(), hosts.store
        )

        async def run() -> Outcome:
            async with await asyncio.start_unix_server(hosts.take, sock=attaching):
                claim(home.lock, attaching.getsockname(), "a controller of the fleet")
                if not home.has(order):
                    raise ConfigError("the fleet was ended before its controller began")
                outcome = await supervisor.run()
                home.end()
                await hosts.tell_end(outcome)
                return outcome

        return asyncio.run(run())


def main() -> None:
    raise_open_files()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=FleetOrder)
    screen = SharedScreen(Console(file=sys.stderr, highlight=False), WallClock())
    log_to(lambda text: screen.log("fleet", text))
    try:
        outcome = shown(screen, lambda: control(order, screen))
    except ConfigError as error:
        sys.exit(error.message)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()

"""The processes of a fleet on this host: gives each its order, starts it, watches it and ends it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import asdict

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, Missed, News, Started
from kvloom.cluster.reconcile import TIMING, Timing
from kvloom.cluster.state import GATEWAY, SCHEDULER, Phase, gateway_node, is_gateway
from kvloom.config.config import Config
from kvloom.config.tls import TlsFiles
from kvloom.journal.records import Journaled, Noted
from kvloom.serve.machine import listen, listen_inside
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.messages import (
    Alive,
    EngineOrder,
    GatewayOrder,
    Gateways,
    GatewaySpec,
    Lease,
    Order,
    OrderRefused,
    Ready,
    RetireOrder,
    Said,
    SchedulerOrder,
    StartProgress,
    Told,
)
from kvloom.types.clock import Clock
from kvloom.types.spec import EngineSpec, SchedulerSpec

ENGINE_MODULE: Final = "kvloom.serve.engine_process"
GATEWAY_MODULE: Final = "kvloom.serve.gateway_process"
SCHEDULER_MODULE: Final = "kvloom.serve.scheduler_process"

StartChild = Callable[[str, str, Sequence[int]], Awaitable[ChildProcess]]
"""Starts a process as `ChildProcess.start` does."""


@dataclass(frozen=True, slots=True)
class Role:
    """The arguments with which a process is started."""

    name: str
    """The process's name in lists of processes, and on the screen."""
    module: str
    order: Order
    inherit: Sequence[int] = ()
    """Descriptors that it inherits."""
    socket: str = ""
    """The path of the socket at which it serves; empty if it has none of its own."""


@dataclass(frozen=True, slots=True)
class Doors:
    """The sockets at which the gateways of a host are called. A gateway that takes another one's place has
    them too, so that callers may wait for it."""

    listener: socket.socket
    """The socket at which clients connect."""
    inside: socket.socket
    """The Unix socket at which the fleet's own processes of the host connect."""


@contextmanager
def doors(host: str, port: int, folder: Path) -> Iterator[Doors]:
    """Opens the sockets. folder: the fleet's own. Raises ConfigError if the address cannot be listened at."""
    path = folder / GATEWAY
    with listen(host, port) as listener, listen_inside(path) as inside:
        try:
            yield Doors(listener, inside)
        finally:
            path.unlink(missing_ok=True)


def gateway_spec(config: Config) -> GatewaySpec:
    """Returns what each gateway of the config's fleet is to be. Raises ConfigError if keys cannot be read."""
    return GatewaySpec(
        host=config.host,
        port=config.port,
        api_keys=dict(config.api_keys()),
        admin_keys=config.admin_keys(),
        keys=str(config.keys or ""),
        share_prefixes=config.share_prefixes,
        access_log=config.access_log,
        audit_file=str(config.audit_file or ""),
        otlp=config.otlp or "",
        traffic=str(config.traffic or ""),
        max_body=config.max_body,
        max_connections=config.max_connections,
        program=config.program,
        folder=str(config.folder),
        memory=config.machine.memory,
        cores=config.machine.cores,
        drain=config.drain,
        patience=config.patience,
        tls=None if config.tls is None else config.tls.files,
        proxies=config.proxies,
        allow_origins=config.allow_origins,
        request_timeout=config.request_timeout,
    )


def gateway_paths(config: Config) -> dict[str, str]:
    """Returns the files that each host with a gateway needs at the same path, by key, and the folders of the
    files that it writes. Keys without names are in a gateway's order, and need no file there."""
    found: dict[str, Path | None] = {"keys": config.keys}
    if config.audit_file is not None:
        found["audit_file"] = config.audit_file.parent
    if config.traffic is not None:
        found["traffic"] = config.traffic.parent
    if config.tls is not None:
        tls = config.tls
        found |= {"tls.certificate": tls.certificate, "tls.key": tls.key, "tls.client_ca": tls.client_ca}
    module, own, _ = config.program.name.partition(":")
    beside = config.folder / module.partition(".")[0]
    if own:  # a module that is not beside the config is installed
        found["program"] = next((one for one in (beside.with_suffix(".py"), beside) if one.exists()), None)
    return {key: str(path) for key, path in found.items() if path is not None}


def gateway_role(
    component: str,
    spec: GatewaySpec,
    at: Doors,
    folder: Path,
    secret: str,
    *,
    address: str = "",
    identity: TlsFiles | None = None,
) -> Role:
    """Returns a gateway's role. folder: the fleet's own at this host; secret: the secret that engines know;
    address, identity: the address at which it answers other hosts, and its certificate for them, if there are
    any."""
    listeners = at.listener.fileno(), at.inside.fileno()
    node = gateway_node(component)
    order = GatewayOrder(
        **asdict(spec),
        secret=secret,
        listeners=listeners,
        sockets=str(folder),
        node=node,
        address=address,
        identity=identity,
    )
    return Role(f"{GATEWAY}@{node}" if node else GATEWAY, GATEWAY_MODULE, order, inherit=listeners)


def shown_url(config: Config, host: str, port: int) -> str:
    """Returns a gateway's address for people: with a name for which its certificate is, if it is not for the
    address itself. host, port: the address at which it listens."""
    tls = config.tls
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if tls is not None and host not in tls.names:
        names = [name for name in tls.names if "*" not in name]
        host = "localhost" if "localhost" in names else next(iter(names), host)
    scheme, where = "http" if tls is None else "https", f"[{host}]" if ":" in host else host
    return f"{scheme}://{where}:{port}"


class Roles:
    """The roles of a fleet's processes on this host, which share a secret that is made here: all of them, or,
    if the others are on the hosts of a cluster, the fleet scheduler alone."""

    def __init__(
        self,
        config: Config,
        at: Doors | None,
        folder: Path,
        identity: TlsFiles | None = None,
        secret: str = "",
    ) -> None:
        """at: the sockets at which gateways are called; None if they are on hosts of a cluster; folder: the
        fleet's own, for sockets; identity: the certificate by which processes of several hosts know each
        other; secret: the secret that engines know, if it is made already."""
        self.secret = secret or secrets.token_urlsafe(32)
        self.gateway = gateway_spec(config)
        self._identity = identity
        self._config = config
        self._at = at
        self._folder = folder

    def of(self, component: str, engine: EngineSpec | None) -> Role:
        """Returns the arguments for a component's process. engine: the specification that a unit is to
        serve."""
        if engine is not None:
            return self._engine(engine)
        return self._gateway(component) if is_gateway(component) else self._scheduler()

    def _engine(self, spec: EngineSpec) -> Role:
        """Returns an engine's role. A new process serves at the same path, by which the gateway finds it."""
        path = str(self._folder / f"{spec.unit}.sock")
        order = EngineOrder(spec=spec, socket=path, secret=self.secret)
        return Role(spec.unit, ENGINE_MODULE, order, socket=path)

    def _gateway(self, component: str) -> Role:
        assert self._at is not None, "gateways are on the hosts of a cluster"
        return gateway_role(component, self.gateway, self._at, self._folder, self.secret)

    def _scheduler(self) -> Role:
        order = SchedulerOrder(
            spec=self._config.scheduler_for(self._config.engines) or SchedulerSpec(),
            gateway="" if self._at is None else self._at.inside.getsockname(),
            secret=self.secret,
            sockets=str(self._folder),
            identity=self._identity,
        )
        return Role(SCHEDULER, SCHEDULER_MODULE, order)


Heard = Started | Answered | Ended | Missed | StartProgress | Said | Noted
"""A report about a process, or a message from it."""


@dataclass(slots=True)
class _Child:
    """A component's process, from the order to start it to its end."""

    role: Role
    generation: int
    phase: Phase = "starting"
    process: ChildProcess | None = None
    """None until it is started."""
    endpoint: str = ""
    """The address at which it answers, once it does."""
    routes: dict[str, str] = field(default_factory=dict)
    """The route under /v1 at which each of its models is asked, once it answers."""
    news: asyncio.Queue[Told] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    alive: bool = False
    """Whether it has given a sign of life since it was looked at."""

    def end(self) -> None:
        """Tells the process to end, now or as soon as it is started."""
        self.phase = "ending"
        if self.process is not None:
            self.process.terminate()

    def kill(self) -> None:
        self.killed = True
        if self.process is not None:
            self.process.kill()


class LocalLauncher:
    """Satisfies `Launcher` with processes of this host, which end with this one."""

    def __init__(
        self,
        role: Callable[[str, EngineSpec | None], Role],
        tasks: asyncio.TaskGroup,
        clock: Clock,
        *,
        hear: Callable[[str, Heard], None],
        log: Callable[[str, str], None],
        timing: Timing = TIMING,
        start: StartChild = ChildProcess.start,
    ) -> None:
        """role: returns the role of a component; hear: called with a component and each report about it; log:
        called with a component's name and a line that it prints; start: starts a process."""
        self._role = role
        self._start = start
        self._tasks = tasks
        self._clock = clock
        self._hear = hear
        self._log = log
        self._timing = timing
        self._children: dict[str, _Child] = {}

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        assert component not in self._children, f"{component} has a process"
        child = self._children[component] = _Child(self._role(component, engine), generation)
        self._tasks.create_task(self._live(component, child))

    def stop(self, component: str) -> None:
        if child := self._children.get(component):
            child.end()

    def kill(self, component: str) -> None:
        if child := self._children.get(component):
            child.kill()

    def discard(self, node: str, component: str) -> None:
        """Does nothing: there are no other nodes."""

    def retire(self, component: str) -> None:
        if child := self._children.get(component):
            child.phase = "retiring"
            child.news.put_nowait(RetireOrder())

    def tell(self, component: str, news: News | Journaled | Lease | Gateways) -> None:
        if child := self._children.get(component):
            child.news.put_nowait(news)

    def forget(self, component: str) -> None:
        """Does nothing: a unit's cards stay in the fleet's folder, where nobody asks for them."""

    def running(self) -> Sequence[FoundProcess]:
        return [
            FoundProcess(
                name,
                child.generation,
                child.phase,
                pid=child.process.pid if child.process else None,
                endpoint=child.endpoint or child.role.socket,
                routes=child.routes,
            )
            for name, child in self._children.items()
        ]

    async def end(self, seconds: float) -> None:
        """Ends all processes: first the fleet scheduler, then the gateways and at last the engines, as each
        is needed by those before. What has not ended after `seconds` is killed."""
        waves = (
            [SCHEDULER],
            [name for name in self._children if is_gateway(name)],
            [name for name in self._children if name != SCHEDULER and not is_gateway(name)],
        )
        try:
            async with asyncio.timeout(seconds):
                for wave in waves:
                    there = [self._children[name] for name in wave if name in self._children]
                    for child in there:
                        child.end()
                    for child in there:
                        await child.ended.wait()
        except TimeoutError:
            for child in self._children.values():
                child.kill()

    async def ended(self) -> None:
        """Waits until no process is left."""
        for child in list(self._children.values()):
            await child.ended.wait()

    async def _live(self, name: str, child: _Child) -> None:
        """Lets one process live from its start to its end."""
        try:
            how, refused = await self._run(name, child)
        except OSError as error:
            how, refused = f"cannot be started: {error.strerror}", False
        del self._children[name]
        child.ended.set()
        self._hear(name, Ended(name, how, refused))

    async def _run(self, name: str, child: _Child) -> tuple[str, bool]:
        """Runs a process, and returns how it ended and whether it refused its order. Raises OSError if it
        cannot be started."""
        role = child.role
        process = child.process = await self._start(role.name, role.module, role.inherit)
        try:
            self._hear(name, Started(name, pid=process.pid))
            if child.phase == "ending":
                process.terminate()
            if child.killed:
                process.kill()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._show(process))
                telling = group.create_task(self._tell(child, process))
                how, refused = await self._follow(name, child, process, group)
                telling.cancel()
                return how, refused
        finally:
            process.kill()

    async def _follow(
        self, name: str, child: _Child, process: ChildProcess, group: asyncio.TaskGroup
    ) -> tuple[str, bool]:
        end = group.create_task(process.ended())
        watch: asyncio.Task[None] | None = None
        refusal: str | None = None
        async for report in process.reports():
            match report:
                case OrderRefused(message):
                    refusal = message
                case Ready(routes, endpoint):
                    if child.phase == "starting":
                        child.phase = "ready"
                    child.endpoint, child.routes = endpoint or child.role.socket, routes
                    self._hear(name, Answered(name, endpoint=child.endpoint, routes=routes))
                    watch = group.create_task(self._watch(name, child))
                case Alive():
                    child.alive = True
                case _:
                    self._hear(name, report)
        how = await end
        if watch is not None:
            watch.cancel()
        return refusal or how, refusal is not None

    async def _tell(self, child: _Child, process: ChildProcess) -> None:
        await process.order(child.role.order)
        while True:
            await process.order(await child.news.get())

    async def _show(self, process: ChildProcess) -> None:
        async for line in process.logs():
            self._log(process.name, line)

    async def _watch(self, name: str, child: _Child) -> None:
        """Looks again and again whether the process has given a sign of life. A look that comes late does not
        count: then this process was held up itself, or was stopped together with the other, whose reports may
        wait to be read."""
        check, missed = self._timing.check, 0
        while True:
            due = self._clock.now() + check
            await self._clock.sleep(check)
            before = missed
            if child.alive:
                child.alive, missed = False, 0
            elif self._clock.now() < due + check / 2:
                missed += 1
            if missed != before:
                self._hear(name, Missed(name, missed))

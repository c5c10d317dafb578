"""Starts and ends a fleet's processes on several hosts: engines by their keepers, the rest on this one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from msgspec.structs import replace

from kvloom.cluster.launcher import (
    Ended,
    FoundProcess,
    News,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReport,
    NodeSilent,
    Started,
)
from kvloom.serve.local import Heard, LocalLauncher
from kvloom.serve.nodes.wire import (
    VERSION,
    Begin,
    EndOrder,
    FromController,
    Granted,
    HeardAt,
    KillOrder,
    LeaseAsked,
    Logged,
    NodeHere,
    Refused,
    StartOrder,
    StopOrder,
    Wire,
    connect,
)
from kvloom.serve.processes.identity import FleetIdentity
from kvloom.types.clock import Clock
from kvloom.types.errors import Unavailable
from kvloom.types.spec import EngineSpec

MARGIN_SECONDS: Final = 1.0  # by which a node's lease is taken to hold longer than it does
PAUSE_SECONDS: Final = 0.5  # between two attempts to reach a keeper
SILENT_SECONDS: Final = 3.0  # without a word of a keeper, which asks for a lease each second


@dataclass(slots=True)
class _Node:
    """A host with a keeper."""

    name: str
    address: str
    """Its keeper's."""
    wire: Wire | None = None
    """None while the keeper does not answer."""
    phase: Literal["there", "silent", "lost"] = "lost"
    """What the controller was told of it last."""
    until: float = 0.0
    """When the last lease that it was given is over, by this host's clock."""
    touch: asyncio.Task[None] | None = None
    """Keeps in touch with it."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its keeper has answered, or has not."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the connection is closed."""
    refusal: str = ""
    """Why its keeper has refused this controller, as it was told last."""


class Joins(Protocol):
    """Hears of hosts, each with the address of its keeper."""

    def join(self, name: str, address: str) -> None: ...

    def leave(self, name: str) -> None: ...

    def silent(self) -> Set[str]:
        """Returns the hosts whose keepers do not answer."""


class Cluster(Protocol):
    """Knows which hosts there are, and lets a keeper of the fleet run on each."""

    @property
    def identity(self) -> FleetIdentity: ...

    @property
    def secret(self) -> str: ...

    async def look(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        """Tells of the hosts that have come and gone since the last look. told: called with a host and what
        is wrong with it, once for each problem."""

    async def follow(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        """Looks again and again, until it is cancelled."""

    async def end(self) -> None:
        """Leaves nothing of the fleet with whoever knows the hosts."""


class NodesLauncher:
    """Satisfies `Launcher`. A unit's process is on the node where it was started, or found; gateways and the
    fleet scheduler are on this host."""

    def __init__(
        self,
        local: LocalLauncher,
        context: ssl.SSLContext,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        *,
        hear: Callable[[str, Heard], None],
        hear_node: Callable[[NodeReport], None],
        log: Callable[[str, str], None],
        lease: float,
        life: int = 1,
    ) -> None:
        """context: with which keepers are called; life: counts the fleet's controllers; lease: the seconds
        for which a node may serve without hearing of this one."""
        self._local = local
        self._context = context
        self._tasks = tasks
        self._clock = clock
        self._hear = hear
        self._hear_node = hear_node
        self._log = log
        self._life = life
        self._lease = lease
        self._nodes: dict[str, _Node] = {}
        self._going: set[asyncio.Task[None]] = (
            set()
        )  # each waits until nothing of a node that has left can serve
        self._where: dict[str, str] = {}  # the node of each component that is on one

    # -- nodes ------------------------------------------------------------------------------------------

    def join(self, name: str, address: str) -> None:
        """Keeps in touch with a node from now on. address: of its keeper."""
        node = self._nodes.setdefault(name, _Node(name, address))
        if node.touch is None or node.address != address:
            if node.touch is not None:
                node.touch.cancel()
            node.address = address
            node.touch = self._tasks.create_task(self._keep_in_touch(node))

    def silent(self) -> Set[str]:
        """Returns the nodes whose keepers do not answer, be it that others run there now."""
        return {node.name for node in self._nodes.values() if node.wire is None}

    async def answered(self) -> None:
        """Waits until each node that has joined has answered, or could not be reached."""
        for node in list(self._nodes.values()):
            await node.tried.wait()

    def leave(self, name: str) -> None:
        """Keeps in touch with a node no more. The controller hears of it once nothing there can serve."""
        if (node := self._nodes.pop(name, None)) is not None:
            if node.touch is not None:
                node.touch.cancel()
            going = self._tasks.create_task(self._outlive(node))
            self._going.add(going)
            going.add_done_callback(self._going.discard)

    async def _outlive(self, node: _Node) -> None:
        await self._clock.sleep(max(0.0, self._left(node)))
        if node.name not in self._nodes:  # else it has joined again meanwhile, with all that it has
            self._hear_node(NodeLeft(node.name))

    def _left(self, node: _Node) -> float:
        """Returns the seconds for which a node may still serve."""
        return node.until + MARGIN_SECONDS - self._clock.now()

    async def _keep_in_touch(self, node: _Node) -> None:
        while True:
            try:
                problem = await self._follow(node, await connect(node.address, self._context))
            except Unavailable as error:
                problem = error.message
            node.tried.set()
            left = self._left(node)
            if node.phase != "lost" and left <= 0:
                node.phase = "lost"
                self._hear_node(NodeLost(node.name, problem))
            elif node.phase == "there":
                node.phase = "silent"
                self._hear_node(NodeSilent(node.name, left, problem))
            await self._clock.sleep(min(PAUSE_SECONDS, left) if node.phase == "silent" else PAUSE_SECONDS)

    async def _follow(self, node: _Node, wire: Wire) -> str:
        """Follows what a keeper says. Returns why that is over. Raises Unavailable for nonsense."""
        why = "its keeper has closed the connection"
        messages = wire.messages()
        try:
            wire.send(Begin(version=VERSION, life=self._life, lease=self._lease))
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    message = await anext(messages, None)
                match message:
                    case None:
                        return why
                    case Refused():
                        why = f"its keeper refuses this controller: {message.why}"
                        if node.refusal != why:  # else it was told before
                            node.refusal = why
                            self._log(node.name, why)
                    case NodeHere():
                        node.wire, node.phase = wire, "there"
                        node.closed.clear()
                        self._hear_node(self._joined(node, message))
                        node.tried.set()
                    case LeaseAsked():
                        node.until = self._clock.now() + self._lease
                        wire.send(Granted(message.asked))
                    case HeardAt():
                        self._pass_on(node, message)
                    case Logged():
                        self._log(message.name, message.line)
        except TimeoutError:
            return f"its keeper has said nothing for {SILENT_SECONDS:g} s"
        finally:
            node.wire = None
            node.closed.set()
            wire.close()

    def _joined(self, node: _Node, here: NodeHere) -> NodeJoined:
        found = tuple(replace(process, node=node.name) for process in here.running)
        self._where.update((process.component, node.name) for process in found)
        return NodeJoined(
            node=node.name,
            address=node.address,
            cores=here.cores,
            memory=here.memory,
            gpus=here.gpus,
            processes=found,
        )

    def _pass_on(self, node: _Node, message: HeardAt) -> None:
        heard: Heard = message.heard
        if isinstance(heard, Started | Ended):
            heard = replace(heard, node=node.name)
        self._hear(message.component, heard)

    # -- the launcher -----------------------------------------------------------------------------------

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        if engine is None or not node:
            self._where.pop(component, None)
            self._local.start(component, generation, engine)
            return
        self._where[component] = node
        self._send(component, StartOrder(component, generation, engine))

    def stop(self, component: str) -> None:
        if component in self._where:
            self._send(component, StopOrder(component))
        else:
            self._local.stop(component)

    def kill(self, component: str) -> None:
        if component in self._where:
            self._send(component, KillOrder(component))
        else:
            self._local.kill(component)

    def discard(self, node: str, component: str) -> None:
        self._send_to(node, KillOrder(component))

    def retire(self, component: str) -> None:
        self._local.retire(component)

    def tell(self, component: str, news: News) -> None:
        self._local.tell(component, news)

    def forget(self, component: str) -> None:
        self._where.pop(component, None)
        self._local.forget(component)

    def running(self) -> Sequence[FoundProcess]:
        """Returns this host's processes; `NodeJoined` tells those of nodes."""
        return self._local.running()

    async def end(self, seconds: float) -> None:
        """Ends all processes: those of this host first, which need the others."""
        await self._local.end(seconds)
        ending = []
        for node in self._nodes.values():
            if node.wire is not None:
                node.wire.send(EndOrder())
                ending.append(node.closed)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for closed in ending:
                    await closed.wait()
        for task in (*self._going, *(node.touch for node in self._nodes.values())):
            if task is not None:
                task.cancel()

    def _send(self, component: str, order: FromController) -> None:
        self._send_to(self._where[component], order)

    def _send_to(self, node: str, order: FromController) -> None:
        """Sends an order, if the node answers; what it is told while it does not is passed over."""
        known = self._nodes.get(node)
        if known is not None and known.wire is not None:
            known.wire.send(order)

"""Starts and ends a fleet's processes on several hosts: engines and gateways by the hosts' keepers, the fleet
scheduler on this one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace

from kvloom.cluster.launcher import (
    Answered,
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
from kvloom.cluster.state import SCHEDULER, is_gateway
from kvloom.journal.records import Journaled
from kvloom.serve.local import Heard, LocalLauncher
from kvloom.serve.nodes.wire import (
    VERSION,
    Begin,
    EndOrder,
    ForgetOrder,
    FromController,
    FromKeeper,
    Granted,
    HeardAt,
    KillOrder,
    LeaseAsked,
    Leaving,
    Logged,
    NodeHere,
    Refused,
    StartGateway,
    StartOrder,
    StopOrder,
    Tell,
    Wire,
    connect,
)
from kvloom.serve.processes.lease import MARGIN_SECONDS
from kvloom.serve.processes.messages import Gateways, GatewaySpec, RetireOrder
from kvloom.types.clock import Clock
from kvloom.types.errors import Unavailable
from kvloom.types.spec import EngineSpec

PAUSE_SECONDS: Final = 0.5  # between two attempts to reach a keeper
SILENT_SECONDS: Final = 3.0  # without a word of a keeper, which asks for a lease each second


@dataclass(slots=True)
class _Node:
    """A host with a keeper."""

    name: str
    address: str
    """The address of its keeper."""
    wire: Wire[FromKeeper] | None = None
    """The connection to the keeper; None while the keeper does not answer."""
    phase: Literal["there", "silent", "lost"] = "lost"
    """The last report about it to the controller."""
    until: float = 0.0
    """The time at which its last lease is over, by this host's clock."""
    leaves: bool = False
    """Whether it has left the cluster; then it is forgotten as soon as it is lost."""
    touch: asyncio.Task[None] | None = None
    """The task that keeps in touch with it."""
    problem: str = ""
    """The reason why its keeper did not answer the last time."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its keeper has answered, or has not."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the connection is closed."""


class NodesLauncher:
    """Satisfies `Launcher`. A unit's process, and a gateway's, is on the node where it was started, or found;
    the fleet scheduler is on this host, and is told where the gateways answer."""

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
        gateway: GatewaySpec,
        life: int = 1,
        missed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """context: with which keepers are called; life: counts the fleet's controllers; lease: the seconds
        for which a node may serve without hearing of this one; gateway: what each gateway is to be;
        missed: called with a node again and again while its keeper does not answer."""
        self._local = local
        self._context = context
        self._tasks = tasks
        self._clock = clock
        self._hear = hear
        self._hear_node = hear_node
        self._log = log
        self._life = life
        self._lease = lease
        self._missed = missed
        self._gateway = gateway
        self._gateways: dict[str, str] = {}  # where each gateway on a node answers that takes requests
        self._told = Gateways(())  # what the scheduler was told of them last
        self._serving: set[str] = set()  # gateways on nodes that have a process
        self._ended = asyncio.Event()  # set each time that one of them has ended
        self._nodes: dict[str, _Node] = {}
        self._where: dict[str, str] = {}  # the node of each component that is on one

    # -- nodes ------------------------------------------------------------------------------------------

    def join(self, name: str, address: str) -> None:
        """Keeps in touch with a node from now on. address: that of its keeper."""
        node = self._nodes.setdefault(name, _Node(name, address))
        node.leaves = False
        if node.touch is None or node.address != address:
            if node.touch is not None:
                node.touch.cancel()
            node.address = address
            node.touch = self._tasks.create_task(self._keep_in_touch(node))

    async def answered(self) -> None:
        """Waits until each node that has joined has answered, or could not be reached."""
        for node in list(self._nodes.values()):
            await node.tried.wait()

    def leave(self, name: str) -> None:
        """Keeps in touch with a node only as long as its keeper answers, or what runs there may serve."""
        if (node := self._nodes.get(name)) is not None:
            node.leaves = True

    def _left(self, node: _Node) -> float:
        """Returns the seconds for which a node may still serve."""
        return node.until + MARGIN_SECONDS - self._clock.now()

    async def _keep_in_touch(self, node: _Node) -> None:
        while node.phase != "lost" or not node.leaves:
            try:
                problem = await self._follow(node, await connect(node.address, self._context))
            except Unavailable as error:
                problem = error.message
            node.tried.set()
            left = self._left(node)
            if node.phase != "lost" and left <= 0:
                node.phase = "lost"
                self._hear_node(NodeLeft(node.name) if node.leaves else NodeLost(node.name, problem))
            elif node.phase == "there":
                node.phase = "silent"
                self._hear_node(NodeSilent(node.name, left, problem))
            elif (
                node.phase == "lost" and problem != node.problem
            ):  # It was never there, or is another problem.
                self._log(node.name, f"nothing can start there: {problem}")
            node.problem = problem
            self._missed(node.name)
            await self._clock.sleep(min(PAUSE_SECONDS, left) if node.phase == "silent" else PAUSE_SECONDS)
        del self._nodes[node.name]

    async def _follow(self, node: _Node, wire: Wire[FromKeeper]) -> str:
        """Follows a keeper's messages. Returns the reason why they have ended. Raises Unavailable for
        nonsense."""
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
                    case Leaving():
                        node.until = 0.0
                        return "its keeper has ended"
                    case NodeHere():
                        node.wire, node.phase = wire, "there"
                        # An earlier controller may have given it a lease just now.
                        node.until = max(node.until, self._clock.now() + self._lease)
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
            self._ended.set()
            self._tell_scheduler()

    def _joined(self, node: _Node, here: NodeHere) -> NodeJoined:
        found = tuple(replace(process, node=node.name) for process in here.running)
        for process in found:
            self._where.setdefault(process.component, node.name)
        there = {process.component: process for process in found if is_gateway(process.component)}
        for name in [name for name in self._serving if self._where.get(name) == node.name]:
            if name not in there:
                self._serving.discard(name)
                self._gateways.pop(name, None)
        self._serving.update(there)
        self._gateways.update((one.component, one.endpoint) for one in there.values() if one.phase == "ready")
        self._tell_scheduler()
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
        if is_gateway(message.component):
            self._follow_gateway(message.component, heard)
        elif isinstance(heard, Ended) and self._where.get(message.component) == node.name:
            del self._where[message.component]
        self._hear(message.component, heard)

    # -- gateways ---------------------------------------------------------------------------------------

    def _follow_gateway(self, name: str, heard: Heard) -> None:
        match heard:
            case Answered(endpoint=endpoint):
                self._gateways[name] = endpoint
            case Ended():
                self._serving.discard(name)
                self._gateways.pop(name, None)
                self._ended.set()
        self._tell_scheduler()

    def _tell_scheduler(self, *, anew: bool = False) -> None:
        """Tells the fleet scheduler where gateways answer, if it is not known there. anew: whether it was
        told nothing yet."""
        there = Gateways(
            tuple(
                endpoint
                for name, endpoint in sorted(self._gateways.items())
                if (node := self._nodes.get(self._where.get(name, ""))) is not None and node.wire is not None
            )
        )
        if anew or there != self._told:
            self._told = there
            self._local.tell(SCHEDULER, there)

    async def _end_gateways(self) -> None:
        """Ends the gateways of all nodes that answer, so that no engine ends under their streams."""
        for name in list(self._serving):
            self.stop(name)
        while any(
            (node := self._nodes.get(self._where.get(name, ""))) is not None and node.wire is not None
            for name in self._serving
        ):
            self._ended.clear()
            await self._ended.wait()

    # -- the launcher -----------------------------------------------------------------------------------

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        if not node:
            self._where.pop(component, None)
            self._local.start(component, generation, engine)
            if component == SCHEDULER:
                self._tell_scheduler(anew=True)
            return
        self._where[component] = node
        if engine is None:
            self._serving.add(component)
            self._send(component, StartGateway(component, generation, self._gateway))
        else:
            self._send(component, StartOrder(component, generation, engine))

    def stop(self, component: str) -> None:
        self._withdraw(component)
        if component in self._where:
            self._send(component, StopOrder(component))
        else:
            self._local.stop(component)

    def kill(self, component: str) -> None:
        self._withdraw(component)
        if component in self._where:
            self._send(component, KillOrder(component))
        else:
            self._local.kill(component)

    def discard(self, node: str, component: str) -> None:
        self._send_to(node, KillOrder(component))

    def _withdraw(self, component: str) -> None:
        """Lets the fleet scheduler ask a gateway no more."""
        if self._gateways.pop(component, None) is not None:
            self._tell_scheduler()

    def retire(self, component: str) -> None:
        self._withdraw(component)
        if component in self._where:
            self._send(component, Tell(component, RetireOrder()))
        else:
            self._local.retire(component)

    def tell(self, component: str, news: News | Journaled) -> None:
        if component in self._where:
            self._send(component, Tell(component, news))
        else:
            self._local.tell(component, news)

    def forget(self, component: str) -> None:
        if component in self._where:
            if is_gateway(component):
                self._send(component, ForgetOrder(component))
            self._serving.discard(component)
            del self._where[component]
        self._local.forget(component)

    def running(self) -> Sequence[FoundProcess]:
        """Returns this host's processes; `NodeJoined` tells those of nodes."""
        return self._local.running()

    async def end(self, seconds: float) -> None:
        """Ends all processes: those of this host first, then gateways and at last engines, as each needs
        those after it."""
        await self._local.end(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end_gateways()
        ending = []
        for node in self._nodes.values():
            if node.wire is not None:
                node.wire.send(EndOrder())
                ending.append(node.closed)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for closed in ending:
                    await closed.wait()
        for node in self._nodes.values():
            if node.touch is not None:
                node.touch.cancel()

    def _send(self, component: str, order: FromController) -> None:
        self._send_to(self._where[component], order)

    def _send_to(self, node: str, order: FromController) -> None:
        """Sends an order, if the node answers; what it is told while it does not is passed over."""
        known = self._nodes.get(node)
        if known is not None and known.wire is not None:
            known.wire.send(order)

"""Machines of a fleet in virtual time: the launcher that starts units there, and the links between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvloom.cluster.launcher import Ended, FoundProcess, NodeJoined, NodeSilent
from kvloom.cluster.reconcile import TIMING
from kvloom.lab.sim.links import Link, TimedLink
from kvloom.lab.sim.processes import (
    GATEWAY_NAME,
    EngineProcess,
    ModelledLauncher,
    ModelledWire,
    ProcessTasks,
    UnitHost,
)
from kvloom.types.clock import Clock
from kvloom.types.errors import ConnectionLost
from kvloom.types.request import Event, StartGenerate
from kvloom.types.spec import EngineSpec
from kvloom.types.verbs import Answer, Body, Verb

T = TypeVar("T")

ETHERNET: Final = 12.5e9
"""Bytes a second, one way: 100 Gbit/s."""
LATENCY: Final = 50e-6  # seconds from one machine to another


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A machine."""

    name: str
    memory: int
    """Bytes that units may take."""
    cores: int
    rack: str = ""
    gpus: int = 0
    bandwidth: float = ETHERNET
    """Bytes a second of its way out, which all its units share."""
    latency: float = LATENCY
    """Seconds to another machine."""


def link_between(homes: Mapping[str, str]) -> Callable[[str, str], Link | None]:
    """Returns a function of two units that returns the link from the first one's machine to the second one's;
    None if both are on one, or the first has a link of its own. homes: the machine of each unit, for good; a
    unit that is not named there has its own link to all others."""
    links = {node: TimedLink(ETHERNET, LATENCY) for node in homes.values()}

    def link(source: str, destination: str) -> Link | None:
        one, other = homes.get(source), homes.get(destination)
        return None if one is None or other in (None, one) else links[one]

    return link


class NodesLauncher(ModelledLauncher):
    """Satisfies `Launcher` with the machines of a fleet. Its gateway is on none of them."""

    def __init__(
        self,
        hosts: Mapping[str, UnitHost],
        clock: Clock,
        tasks: ProcessTasks,
        nodes: Sequence[SimulatedNode],
        *,
        lease: float = TIMING.lease,
    ) -> None:
        """lease: seconds from the moment at which a node falls silent to the end of its lease."""
        super().__init__(hosts, clock, tasks)
        self._nodes = {node.name: node for node in nodes}
        self._links: dict[str, Link] = {node.name: TimedLink(node.bandwidth, node.latency) for node in nodes}
        self._lease = lease
        self._where: dict[str, str] = {}  # The node on which each unit was started last.
        self._down: set[str] = set()

    def join(self, names: Collection[str] = ()) -> None:
        """Has these nodes join with nothing running there; all of them if none is named."""
        for name in names or self._nodes:
            self._down.discard(name)
            node = self._nodes[name]
            self.hear(
                NodeJoined(node=name, address=name, cores=node.cores, memory=node.memory, gpus=node.gpus)
            )

    def rack(self, name: str) -> list[str]:
        """Returns the nodes of a rack."""
        return [node.name for node in self._nodes.values() if node.rack == name]

    def lose(self, names: Collection[str]) -> None:
        """Ends all that runs on these nodes at once. That they are silent is all that is known of it."""
        self._down.update(names)
        for unit, node in self._where.items():
            if node not in names:
                continue
            if unit in self._starts:
                self._call_off(unit)
            elif self._hosts[unit].process is not None:
                self._hosts[unit].kill()
                self.census.less()
        for name in names:
            self.hear(NodeSilent(name, self._lease, "it does not answer"))

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        if engine is not None:
            self._where[component] = node
        super().start(component, generation, engine, node)

    def running(self) -> Sequence[FoundProcess]:
        """Returns the gateway: the units' processes are told of by their nodes."""
        return [FoundProcess(GATEWAY_NAME, 1, "ready")]

    def link(self, source: str, destination: str) -> Link | None:
        """Returns the way from one unit to another if that goes from machine to machine."""
        one, other = self._where.get(source, ""), self._where.get(destination, "")
        return None if one == other else self._links.get(one)

    def _tell_end(self, ended: Ended) -> None:
        """Tells of a process's end, unless its node is down: then nobody does."""
        if self._where.get(ended.component) not in self._down:
            super()._tell_end(ended)


class NodesWire(ModelledWire):
    """Satisfies `EngineClient`. A call breaks with the process that answers it, as a connection does whose
    other end is gone."""

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        await self._clock.sleep(self._delay)
        process = self._host.reached
        answer: Answer = await _unless_gone(process, verb.ask(process.engine, body))
        await self._clock.sleep(self._delay)
        return answer

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        await self._clock.sleep(2 * self._delay)
        process = self._host.reached
        async with aclosing(process.engine.start_generate(body)) as frames:
            while (frame := await _unless_gone(process, anext(frames, None))) is not None:
                yield frame


async def _unless_gone(process: EngineProcess, work: Awaitable[T]) -> T:
    """Returns what the work returns. Raises ConnectionLost if the process ends before."""
    doing = asyncio.ensure_future(work)
    try:
        either: list[asyncio.Future[Any]] = [doing, process.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if process.ended.done():
            raise ConnectionLost("the connection broke: the engine is gone")
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])

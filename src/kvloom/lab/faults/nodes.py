"""The machines of a fleet in a run with faults: they lose their power, or are cut off, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

from msgspec.structs import replace

from kvloom.cluster.launcher import (
    Answered,
    Ended,
    FoundProcess,
    NodeJoined,
    NodeReport,
    NodeSilent,
    Report,
)
from kvloom.lab.faults.host import FaultyHost, FaultyLauncher, Outage
from kvloom.lab.sim.nodes import SimulatedNode
from kvloom.types.spec import EngineSpec

MARGIN: Final = 0.05  # seconds by which the controller takes a node's lease to hold longer than it does
NOTICED: Final = 0.25  # of a lease, after which the controller knows that a node does not answer


class FaultyNodes(FaultyLauncher):
    """Satisfies `Launcher` with machines. Gateways and the controller are on none of them.

    What runs on a node that is cut off serves until the node's lease is over, and then ends. The controller
    and the callers hear nothing of it meanwhile. A node that is back tells what runs there."""

    def __init__(self, nodes: Collection[SimulatedNode], lease: float, *given: Any) -> None:
        """`lease` is in seconds, and `given` is what a `FaultyLauncher` takes."""
        super().__init__(*given)
        self.nodes = {node.name: node for node in nodes}
        self._lease = lease
        self._outages: dict[str, Outage] = {}
        self._where: dict[str, str] = {}  # The node on which each unit was started last.
        self._leases: list[asyncio.TimerHandle] = []  # of the nodes that no controller keeps in touch with

    # -- what befalls nodes -----------------------------------------------------------------------------

    def join(self, names: Collection[str] = ()) -> None:
        """Tells what runs on these nodes, as far as they are reached; on all if none is named."""
        for name in names or self.nodes:
            if name not in self._outages:
                node = self.nodes[name]
                self.hear(
                    NodeJoined(
                        node=name,
                        address=name,
                        cores=node.cores,
                        memory=node.memory,
                        processes=tuple(self._processes(name)),
                    )
                )

    def cut(self, name: str, *, off: bool) -> bool:
        """Cuts a node off, or its power. Returns False if it is not there anyway."""
        if name in self._outages:
            return False
        self._journal("node", name, "has no power" if off else "is cut off")
        self._journal.count("nodes lost" if off else "nodes cut off")
        loop, outage = asyncio.get_running_loop(), Outage(off)
        self._outages[name] = outage
        for unit in self._units(name):
            self._faulty(unit).outage = outage
        if off:
            self._end_all(name)
        else:
            outage.timers.append(loop.call_later(self._lease, self._fence, name))
        outage.timers.append(loop.call_later(NOTICED * self._lease, self._notice, name))
        outage.timers.append(loop.call_later(self._lease + MARGIN, lambda: outage.end(healed=False)))
        return True

    def heal(self, name: str) -> None:
        """Gives a node its network, or its power, back."""
        outage = self._outages.pop(name, None)
        if outage is None:
            return
        self._journal("node", name, "is back")
        outage.end(healed=True)
        for unit in self._units(name):
            self._faulty(unit).outage = None
        if outage.noticed or outage.off:
            self.join([name])
        else:
            for carry in outage.held:
                carry()

    def abandon(self) -> None:
        """Lets the controller be gone: nobody renews leases, and its connections are over."""
        loop = asyncio.get_running_loop()
        self._give_up_connections()
        self._leases = [
            loop.call_later(self._lease, self._fence, name)
            for name in self.nodes
            if name not in self._outages
        ]

    def resume(self) -> None:
        """Lets another controller be there, which is told what runs on the nodes that it reaches."""
        for timer in self._leases:
            timer.cancel()
        self._leases = []
        self._give_up_connections()
        self.join()

    def _give_up_connections(self) -> None:
        for outage in self._outages.values():
            outage.noticed = True
            outage.held.clear()

    def apart(self, source: str, destination: str) -> bool:
        """Returns whether no K and V go from one unit to another now."""
        nodes = [self._where.get(unit) for unit in (source, destination)]
        return nodes[0] != nodes[1] and any(node in self._outages for node in nodes)

    def _fence(self, name: str) -> None:
        self._journal("node", name, "has no lease any more")
        self._end_all(name)

    def _notice(self, name: str) -> None:
        outage = self._outages[name]
        outage.noticed = True
        outage.held.clear()
        self.hear(NodeSilent(name, (1 - NOTICED) * self._lease + MARGIN, "it does not answer"))

    def _end_all(self, name: str) -> None:
        for unit in self._units(name):
            if unit in self._starts:
                self._starts[unit].cancel()
                self._called_off.discard(unit)
            self._hosts[unit].kill()

    def _units(self, name: str) -> list[str]:
        return [unit for unit, node in self._where.items() if node == name]

    def _faulty(self, unit: str) -> FaultyHost:
        host = self._hosts[unit]
        assert isinstance(host, FaultyHost)
        return host

    def _processes(self, name: str) -> list[FoundProcess]:
        return [replace(one, node=name) for one in self._found(self._units(name))]

    # -- the launcher -----------------------------------------------------------------------------------

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        if engine is None:
            super().start(component, generation, engine)
        elif (outage := self._outages.get(node)) is None:
            self._where[component] = node
            self._faulty(component).outage = None
            super().start(component, generation, engine)
        elif not outage.noticed and not outage.off:
            outage.held.append(lambda: self.start(component, generation, engine, node))

    def stop(self, component: str) -> None:
        outage = self._outages.get(self._where.get(component, ""))
        if outage is None:
            super().stop(component)
        elif not outage.noticed and not outage.off:
            outage.held.append(lambda: self.stop(component))

    def kill(self, component: str) -> None:
        outage = self._outages.get(self._where.get(component, ""))
        if outage is not None:
            if not outage.noticed and not outage.off:
                outage.held.append(lambda: self.kill(component))
        elif component in self._starts:
            self._called_off.discard(component)
            self._starts[component].cancel()
        elif (host := self._hosts.get(component)) and host.process and component not in self._ending:
            host.kill()
            self._tell_end(Ended(component, "was killed"))

    def running(self) -> list[FoundProcess]:
        """Returns the gateway: the units' processes are told of by their nodes."""
        return [found for found in super().running() if found.component not in self._hosts]

    def passed(self, report: Report | NodeReport) -> Report | NodeReport | None:
        """Returns a report as it reaches the controller; None if it does not now."""
        if not isinstance(report, Ended | Answered) or report.component not in self._where:
            return report
        node = self._where[report.component]
        if (outage := self._outages.get(node)) is None:
            return replace(report, node=node) if isinstance(report, Ended) else report
        if not outage.noticed and not outage.off:
            outage.held.append(lambda: self.hear(report))
        return None

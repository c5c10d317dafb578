"""Fleets on nodes that join, fall silent, come back, die, leave and are drained, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from kvloom.cluster.edits import Edit, NodeEdit, UnitEdit
from kvloom.cluster.launcher import Ended, FoundProcess, News, NodeJoined, NodeLeft, NodeLost, NodeSilent
from kvloom.cluster.placement import Place, gateway_nodes, needs, place, rooms
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import ABSENT, ALIVE, FleetSpec, UnitSpec, gateway_name
from kvloom.types.spec import EngineSpec
from tests.cluster.histories import History, Memory, ModelledHost, One, StillClock, engine

LEASE = Timing().lease
NAMES = ("a", "b", "c", "d")


@dataclass
class Node:
    """A node as it really is."""

    memory: int
    reached: bool = True
    lease: float = 0.0
    """When the lease of its processes is over, if it is not reached."""


class NodesHost(ModelledHost):
    """Satisfies `Launcher` for nodes, which outlive its controllers. A node that is not reached is told
    nothing."""

    def __init__(self, draw: random.Random, clock: StillClock) -> None:
        super().__init__(draw)
        self.clock = clock
        self.nodes: dict[str, Node] = {}
        self.sizes: dict[str, int] = {}
        """Bytes that the process of each unit takes, as far as the controller can know it."""
        self.follow: Callable[[News], None] = lambda news: None
        """Called with what is told to a gateway."""
        self.stale: dict[tuple[str, str], One] = {}
        """Processes of lost nodes whose components have been started elsewhere."""

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        if engine is not None:
            self.sizes[component] = _size(engine)
            taken = {key: self.sizes.get(key, 0) for key, one in self.there.items() if one.node == node}
            taken[component] = self.sizes[component]
            assert sum(taken.values()) <= self.nodes[node].memory, f"{taken} are more than {node} has"
        old = self.there.get(component)
        if old is not None:
            assert not self.serves(old), f"{component} has two processes that may serve"
            self.stale[old.node, component] = self.there.pop(component)
        assert (node, component) not in self.stale, f"{component} has two processes on {node}"
        assert node == "" or self.nodes[node].reached, f"{component} is started on {node}, which is not there"
        super().start(component, generation, engine, node)

    def stop(self, component: str) -> None:
        if self.reaches(component):
            super().stop(component)

    def kill(self, component: str) -> None:
        if self.reaches(component):
            super().kill(component)

    def retire(self, component: str) -> None:
        if self.reaches(component):
            super().retire(component)

    def tell(self, component: str, news: News) -> None:
        if self.reaches(component):
            super().tell(component, news)
            self.follow(news)

    def discard(self, node: str, component: str) -> None:
        assert (node, component) in self.stale, f"{component} on {node} is discarded, and is no stale one"
        self.stale[node, component].phase = "ending"

    def forget(self, component: str) -> None:
        assert not self.reaches(component), f"{component} is forgotten, but has a process"

    def running(self) -> Sequence[FoundProcess]:
        return [one for one in super().running() if not self.there[one.component].node]

    def reaches(self, component: str) -> bool:
        one = self.there.get(component)
        return one is not None and (not one.node or self.nodes[one.node].reached)

    def serves(self, one: One) -> bool:
        """Returns whether a process may serve: its node is reached, or its lease is not over."""
        node = self.nodes.get(one.node)
        return not one.node or (node is not None and (node.reached or self.clock.now() < node.lease))

    def cut(self, name: str) -> None:
        self.nodes[name].reached, self.nodes[name].lease = False, self.clock.now() + LEASE

    def end_all(self, name: str) -> None:
        """All processes of a node are gone."""
        self.there = {key: one for key, one in self.there.items() if one.node != name}
        self.stale = {key: one for key, one in self.stale.items() if key[0] != name}

    def on(self, name: str) -> tuple[FoundProcess, ...]:
        """Returns what runs on a node."""
        ones = [(key, one) for key, one in self.there.items() if one.node == name]
        ones += [(key, one) for (node, key), one in self.stale.items() if node == name]
        return tuple(FoundProcess(key, one.generation, one.phase, node=name) for key, one in ones)


def _size(engine: EngineSpec) -> int:
    return engine.kv_bytes + engine.memory + sum(model.memory for model in engine.models)


def _weighty(engine: EngineSpec, draw: random.Random) -> EngineSpec:
    """Returns the specification with models and processes that take memory."""
    models = tuple(replace(model, memory=draw.choice((0, 1 << 19, 1 << 20))) for model in engine.models)
    return replace(engine, models=models, memory=draw.choice((0, 1 << 18)))


class NodesHistory(History):
    """One fleet on nodes, and what befalls it by its seed."""

    host: NodesHost

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.clock, self.store = StillClock(), Memory()
        self.host = NodesHost(draw, self.clock)
        self.drained: dict[str, One] = {}
        self.lives = 0
        units = {
            f"u{i}": UnitSpec(
                engine=_weighty(engine(f"u{i}", draw.choice("mn")), draw), node=draw.choice(("", "", "", "a"))
            )
            for i in range(draw.randint(1, 6))
        }
        gateways = tuple(draw.sample(NAMES, draw.choice((0, 0, 1, 2, 3))))
        self.first = FleetSpec(
            units=units, on_nodes=True, gateways=gateways, scheduler=draw.randint(0, 1), drain=3.0
        )
        self.begin()

    def begin(self) -> None:
        for name, node in self.host.nodes.items():
            if node.reached:
                self.host.cut(name)  # Its launcher has yet to find the controller.
        super().begin()

    def adopt(self, name: str) -> None:
        """A process of which the controller has not heard before is taken to be as its unit is specified."""
        unit = self.controller.spec.units.get(name)
        self.host.sizes[name] = 0 if unit is None else _size(unit.engine)

    def happen(self) -> None:
        if self.draw.random() < 0.25:
            self.befall_node(self.draw.choice(NAMES))
        else:
            super().happen()

    def befall(self, name: str) -> None:
        if self.host.reaches(name):
            super().befall(name)
        elif self.draw.random() < 0.2:
            del self.host.there[name]  # It ends, and nobody hears of it.

    def befall_node(self, name: str) -> None:
        draw, host = self.draw, self.host
        node, kind = host.nodes.get(name), draw.random()
        if node is None or not node.reached:
            if node is None:
                host.nodes[name] = Node(memory=draw.randint(1, 4) << 20)
            self.join(name)
        elif kind < 0.3:
            host.cut(name)
            self.controller.hear(NodeSilent(name, LEASE, "timed out"))
        elif kind < 0.4:
            host.cut(name)
            host.end_all(name)
            silent = draw.random() < 0.5
            self.controller.hear(NodeSilent(name, LEASE) if silent else NodeLost(name, "its host is gone"))
        elif kind < 0.5:
            host.cut(name)
            host.end_all(name)
            self.controller.hear(NodeLeft(name))
        elif kind < 0.6:
            self.end_stale(name)
        else:
            drained = draw.random() < 0.5
            self.controller.edit(Edit(nodes={name: NodeEdit(drained=drained, seconds=1.0)}))

    def join(self, name: str) -> None:
        host = self.host
        node = host.nodes[name]
        node.reached = True
        for key in [key for key, one in host.there.items() if one.node == name]:
            self.drained.pop(key, None)  # What is taken over anew may drain anew.
        for key, one in list(host.there.items()):
            process = self.controller.status.processes.get(key, ABSENT)
            if one.node == name and process.phase not in ALIVE:
                self.adopt(key)
            if one.node == name and process.phase != "absent" and process.node != name:
                host.stale[name, key] = host.there.pop(key)
        self.controller.hear(NodeJoined(node=name, memory=node.memory, cores=2, processes=host.on(name)))
        for key in [key for where, key in host.stale if where == name]:
            if key not in self.controller.status.nodes[name].stale:
                host.there[key] = host.stale.pop((name, key))  # It is taken over.
                self.adopt(key)
        for key, one in host.there.items():
            assert key not in self.controller.status.nodes[name].stale or one.node != name

    def end_stale(self, name: str) -> None:
        for where, key in [key for key in self.host.stale if key[0] == name]:
            del self.host.stale[where, key]
            self.controller.hear(Ended(key, "was killed", node=where))

    def drawn_edit(self) -> Edit:
        draw = self.draw
        if draw.random() < 0.1:
            return Edit(gateways=tuple(draw.sample(NAMES, draw.choice((0, 1, 2)))))
        if draw.random() < 0.1:
            name = draw.choice(list(self.controller.spec.units) or ["u0"])
            return Edit(units={name: UnitEdit(node=draw.choice(("", "a", "b")), seconds=1.0)})
        drawn = super().drawn_edit()
        units = {
            name: one if one.engine is UNSET else replace(one, engine=_weighty(one.engine, draw))
            for name, one in drawn.units.items()
        }
        return replace(drawn, units=units)

    def calm(self) -> None:
        self.host.fuse = None
        for name in list(self.host.nodes):
            if not self.host.nodes[name].reached and self.draw.random() < 0.8:
                self.join(name)
            self.end_stale(name)
        super().calm()

    def reached(self) -> bool:
        spec, status, host = self.controller.spec, self.controller.status, self.host
        if spec.rolling is not None or any(unit.removed for unit in spec.units.values()):
            return False
        if any(node.phase == "silent" for node in status.nodes.values()):
            return False
        left = rooms(spec, status)
        for name, unit in spec.units.items():
            process = status.processes.get(name, ABSENT)
            one = host.there.get(name)
            if not unit.wanted:
                if one is not None and host.serves(one):
                    return False
            elif process.lack:
                assert not isinstance(place(name, needs(unit), left), Place), (
                    f"{name} waits for {process.lack}"
                )
            elif one is None or (one.generation, one.phase) != (unit.generation, "ready"):
                return False
        nodes = gateway_nodes(spec, status)
        for node in nodes:
            one = host.there.get(gateway_name(spec.gateway, node))
            if one is None or one.phase != "ready":
                return False
        drained = [node for node, one in spec.nodes.items() if one.drained]
        return not any(one.node in drained for key, one in host.there.items() if nodes or "/" not in key)

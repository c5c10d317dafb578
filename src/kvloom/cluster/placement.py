"""Finds the node on which a unit starts: pure functions of what the unit needs, and of the room that each
node has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvloom.cluster.actions import Action, StartProcess, TellLack
from kvloom.cluster.state import (
    ABSENT,
    ALIVE,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    UnitSpec,
    is_drained,
    outlook,
)

_GPU: Final = "cuda:"


@dataclass(frozen=True, slots=True)
class Needs:
    """The part of a node that a unit takes."""

    memory: int
    """Bytes of the node's memory."""
    threads: int
    gpus: int
    """GPUs side by side; 0 for a unit on cores."""
    models: frozenset[str]
    """Units that serve one of them are its replicas."""
    node: str = ""
    """The node that it is bound to; empty if it is bound to none."""
    device: str = "cpu"
    """The device that it specifies. A unit that is bound to a node has just this one, because whoever
    bound it knows what else is there."""


def needs(unit: UnitSpec) -> Needs:
    """Returns what a unit takes of its node: its pool, its models and its processes. What a unit on GPUs has
    in their memory does not count, and models that can sleep are within the pool."""
    engine = unit.engine
    on_gpus = engine.device.startswith(_GPU)
    models = 0 if engine.sleep_dir else sum(model.memory for model in engine.models)
    return Needs(
        memory=engine.memory + (0 if on_gpus else engine.kv_bytes + models),
        threads=engine.threads,
        gpus=engine.tensor_parallel if on_gpus else 0,
        models=frozenset(model.name for model in engine.models),
        node=unit.node,
        device=engine.device,
    )


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """The room that one node has left."""

    memory: int
    """Bytes."""
    cores: int
    """Cores without a thread of their own; less than 0 if threads share cores."""
    gpus: frozenset[int]
    """GPUs that no unit has, by number."""
    models: Mapping[str, int]
    """Units there that serve each model."""
    closed: str = ""
    """Why it takes no unit, in words that follow \"which\"; empty if it takes units."""
    stale: frozenset[str] = frozenset()
    """Units of which an earlier process has yet to end there."""

    def less(self, need: Needs, device: str) -> NodeRoom:
        """Returns the room once a unit has its part of it. device: the one that the unit has there."""
        counts = dict(self.models)
        for model in need.models:
            counts[model] = counts.get(model, 0) + 1
        first = int(device.removeprefix(_GPU)) if need.gpus else 0
        return replace(
            self,
            memory=self.memory - need.memory,
            cores=self.cores - need.threads,
            gpus=self.gpus - set(range(first, first + need.gpus)),
            models=counts,
        )

    def device(self, need: Needs) -> str | None:
        """Returns the device that the unit would have here; None if there are too few GPUs side by side."""
        if not need.gpus or need.node:
            return need.device
        for first in sorted(self.gpus):
            if self.gpus.issuperset(range(first, first + need.gpus)):
                return f"{_GPU}{first}"
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Names the node, and the device there, on which a unit starts."""

    node: str
    device: str


def rooms(spec: FleetSpec, status: FleetStatus) -> dict[str, NodeRoom]:
    """Returns the room of each node: what it has, less what its units take."""
    found = {}
    for name, node in status.nodes.items():
        closed = "" if node.phase == "there" else f"is {node.phase}"
        if not closed and is_drained(name, spec):
            closed = "is drained"
        found[name] = NodeRoom(
            memory=node.memory,
            cores=node.cores,
            gpus=frozenset(range(node.gpus)),
            models={},
            closed=closed,
            stale=frozenset(node.stale),
        )
    for name, unit in spec.units.items():
        process = status.processes.get(name, ABSENT)
        if process.phase in ALIVE and process.node in found:
            device = process.device or unit.engine.device
            taken = replace(needs(unit), memory=process.memory)  # It may be specified otherwise by now.
            found[process.node] = found[process.node].less(taken, device)
        for other in [node for node, room in found.items() if name in room.stale]:
            found[other] = found[other].less(needs(unit), unit.engine.device)
    return found


def place(name: str, need: Needs, nodes: Mapping[str, NodeRoom]) -> Place | str:
    """Returns where the unit of this name starts, or in words why it cannot start now.

    Of the nodes with room those with the fewest replicas of the unit come first, so that the loss of one
    costs as few as can be; then those on which threads have cores of their own; and of these the one that has
    the least left afterwards (best fit), so that large units find room later. Among equals the first by name
    is taken.
    """
    if need.node:
        return _bound(name, need, nodes)
    open_ = {node: room for node, room in nodes.items() if not room.closed and name not in room.stale}
    fits = [
        (_cost(need, room), node, device)
        for node, room in open_.items()
        if room.memory >= need.memory and (device := room.device(need)) is not None
    ]
    if fits:
        _, node, device = min(fits)
        return Place(node, device)
    return _lack(name, need, nodes, open_)


class Moves:
    """Says which units leave drained nodes now: those whose replicas are not out of service for a restart."""

    def __init__(self, spec: FleetSpec, status: FleetStatus) -> None:
        self.drained = {name for name, node in spec.nodes.items() if node.drained}
        self._out: set[str] = set()  # Models of units that are being restarted, and have room to.
        for name, unit in spec.units.items() if self.drained else ():
            process = status.processes.get(name, ABSENT)
            if outlook(unit, process) == "restarting" and not process.lack:
                self._out.update(needs(unit).models)

    def is_due(self, unit: UnitSpec, process: ComponentStatus) -> bool:
        """Returns whether the unit is to start anew elsewhere now; then its replicas wait for it."""
        here = process.phase in ("starting", "ready") and not process.killed
        if not here or process.node not in self.drained or not unit.wanted:
            return False
        models = needs(unit).models
        if process.generation != unit.generation or models & self._out:
            return False
        self._out |= models
        return True


def gateway_nodes(spec: FleetSpec, status: FleetStatus) -> list[str]:
    """Returns the nodes on which a gateway can be now and is to be; an empty name is the controller's
    host."""
    if not spec.gateways:
        return [""]
    there = {name for name, node in status.nodes.items() if node.phase == "there"}
    return [node for node in spec.gateways if node in there and not is_drained(node, spec)]


def placed(found: Iterable[Action], spec: FleetSpec, status: FleetStatus) -> Iterator[Action]:
    """Gives each unit that starts a node with room for it, one after the other. One that no node has room for
    waits, and it is told for what. While a node has yet to say what runs there nothing starts that may run
    there."""
    left = None
    mute = [node for node, one in status.nodes.items() if one.phase == "silent" and not one.told]
    for action in found:
        if not isinstance(action, StartProcess) or action.component not in spec.units or not spec.on_nodes:
            yield action
            continue
        name = action.component
        left = left or rooms(spec, status)
        need = needs(spec.units[name])
        made = f"waits until {mute[0]} has said what runs there" if mute else place(name, need, left)
        if not isinstance(made, str):
            left[made.node] = left[made.node].less(need, made.device)
            yield StartProcess(name, action.generation, made.node, made.device, need.memory)
        elif made != status.processes.get(name, ABSENT).lack:
            yield TellLack(name, made)


def _cost(need: Needs, room: NodeRoom) -> tuple[int, int, int, int]:
    replicas = max((room.models.get(model, 0) for model in need.models), default=0)
    shared = max(0, need.threads - room.cores)
    return replicas, shared, len(room.gpus), room.memory


def _bound(name: str, need: Needs, nodes: Mapping[str, NodeRoom]) -> Place | str:
    room = nodes.get(need.node)
    if room is None:
        return f"is to be on {need.node}, which has not joined"
    if room.closed:
        return f"is to be on {need.node}, which {room.closed}"
    if name in room.stale:
        return f"is to be on {need.node}, where its last process has yet to end"
    if room.memory < need.memory:
        return f"needs {_size(need.memory)} on {need.node}, which has {_size(room.memory)} left"
    return Place(need.node, need.device)


def _lack(name: str, need: Needs, nodes: Mapping[str, NodeRoom], open_: Mapping[str, NodeRoom]) -> str:
    if not open_:
        if not nodes:
            return "needs a node, and none has joined"
        why = [
            f"{node} {room.closed or 'has its last process, which has yet to end'}"
            for node, room in sorted(nodes.items())
        ]
        return f"needs a node that takes units; {_few(why)}"
    freest = max(open_, key=lambda node: (open_[node].memory, node))
    if open_[freest].memory < need.memory:
        return (
            f"needs {_size(need.memory)}; the freest node, {freest}, has {_size(open_[freest].memory)} left"
        )
    freest = max(open_, key=lambda node: (len(open_[node].gpus), node))
    left = len(open_[freest].gpus)
    return (
        f"needs {need.gpus} GPUs side by side, and {_size(need.memory)}, on one node; the freest, "
        f"{freest}, has {left}, and {_size(open_[freest].memory)} left"
    )


def _few(said: Iterable[str], most: int = 3) -> str:
    said = list(said)
    more = f", and {len(said) - most} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more


def _size(size: int) -> str:
    unit, name = (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")
    return f"{max(size, 0) / unit:.3g} {name}"

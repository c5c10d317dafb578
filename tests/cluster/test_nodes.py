"""Nodes that join, fall silent, are lost, come back and are drained, step by step."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, NodeEdit, UnitEdit
from kvloom.cluster.launcher import (
    Answered,
    Change,
    Counted,
    Ended,
    Missed,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeSilent,
    UnitSeen,
)
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.models import node_states
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.state import ABSENT, ComponentStatus, FleetSpec, UnitSpec, is_gateway
from kvloom.types.errors import Conflict
from kvloom.types.service import UnitState
from tests.cluster.histories import Memory, StillClock, engine
from tests.cluster.node_histories import LEASE, Node, NodesHost
from tests.scripted import ScriptedEngine

MIB = 1 << 20


class Fleet:
    """A fleet on nodes of which each has room for so many units."""

    def __init__(self, units: int, nodes: dict[str, int], **spec: Any) -> None:
        self.clock, self.store = StillClock(), Memory()
        self.host = NodesHost(random.Random(2), self.clock)
        wanted = {f"u{i}": UnitSpec(engine=engine(f"u{i}")) for i in range(units)}
        self.spec = FleetSpec(units=wanted, on_nodes=True, **spec)
        self.begin()
        for name, size in nodes.items():
            self.host.nodes[name] = Node(memory=size * MIB)
            self.join(name)
        self.settle()

    def begin(self) -> None:
        self.controller = Controller(self.spec, self.host, self.clock, store=self.store)

    def join(self, name: str) -> None:
        node = self.host.nodes[name]
        node.reached = True
        for key, one in list(self.host.there.items()):
            process = self.process(key)
            if one.node == name and process.node not in ("", name):
                self.host.stale[name, key] = self.host.there.pop(key)
        self.controller.hear(NodeJoined(node=name, memory=node.memory, cores=2, processes=self.host.on(name)))

    def cut(self, name: str) -> None:
        self.host.cut(name)
        self.controller.hear(NodeSilent(name, LEASE, "timed out"))
        self.settle()

    def settle(self) -> None:
        """Everything that is reached answers, ends and counts as it is told, until nothing is due now."""
        for _ in range(20):
            self.controller.step()
            for name, one in list(self.host.there.items()):
                if not self.host.reaches(name):
                    continue
                if one.phase == "starting" and (not is_gateway(name) or self.process(name).begun):
                    one.phase = "ready"
                    self.controller.hear(Answered(name))
                elif one.phase in ("ending", "retiring"):
                    del self.host.there[name]
                    self.controller.hear(Ended(name, "ended with exit code 0", node=one.node))
                elif is_gateway(name):
                    self.controller.count(name, one.counted())
                else:
                    self.controller.hear(UnitSeen(name, one.generation))

    def process(self, name: str) -> ComponentStatus:
        return self.controller.status.processes.get(name, ABSENT)

    @property
    def where(self) -> dict[str, str]:
        """Returns the node of each unit that is ready."""
        processes = self.controller.status.processes.items()
        return {name: one.node for name, one in processes if one.phase == "ready" and name.startswith("u")}


def test_a_silent_node_is_left_alone_until_its_lease_is_over() -> None:
    fleet = Fleet(4, {"a": 2, "b": 2, "c": 2})
    before = fleet.where
    assert sorted(before.values()).count("c") <= 2
    assert len(before) == 4
    lost = [name for name, node in before.items() if node == "b"]
    fleet.cut("b")
    fleet.clock.time += LEASE - 0.1
    fleet.settle()
    assert fleet.where == before
    fleet.clock.time += 0.2
    fleet.settle()
    assert fleet.controller.status.nodes["b"].phase == "lost"
    assert set(fleet.where) == set(before)
    assert "b" not in fleet.where.values()
    assert all(fleet.process(name).pause == 0 for name in lost)
    fleet.join("b")  # What runs there still is not wanted any more.
    assert set(fleet.controller.status.nodes["b"].stale) == set(lost)
    assert all(fleet.host.stale["b", name].phase == "ending" for name in lost)
    after = fleet.where
    fleet.controller.hear(Ended(lost[0], "was killed", node="b"))
    assert lost[0] not in fleet.controller.status.nodes["b"].stale
    assert fleet.where == after


def test_a_node_that_comes_back_in_time_keeps_what_it_has() -> None:
    fleet = Fleet(2, {"a": 1, "b": 1})
    before = fleet.where
    fleet.cut("b")
    gone = next(name for name, node in before.items() if node == "b")
    fleet.clock.time += 5.0
    fleet.join("b")
    fleet.settle()
    assert fleet.where == before
    assert fleet.process(gone).serial == 1
    fleet.cut("b")
    del fleet.host.there[gone]  # It ends, and nobody hears of it before the node is back.
    fleet.join("b")
    assert (fleet.process(gone).phase, fleet.process(gone).problem) == (
        "waiting",
        "ended while b did not answer",
    )


def test_what_is_ordered_while_a_node_is_silent_is_done_when_it_is_back() -> None:
    fleet = Fleet(2, {"a": 1, "b": 1})
    there = next(name for name, node in fleet.where.items() if node == "b")
    fleet.cut("b")
    fleet.controller.edit(Edit(units={there: UnitEdit(wanted=False, seconds=0.0)}))
    fleet.settle()
    assert fleet.process(there).phase == "ready"  # Nobody can tell it anything.
    fleet.join("b")
    fleet.settle()
    assert fleet.process(there).phase == "absent"


def test_orders_that_were_lost_on_their_way_are_given_again() -> None:
    fleet = Fleet(2, {"a": 1, "b": 1})
    there = next(name for name, node in fleet.where.items() if node == "b")
    fleet.controller.hear(Missed(there, 3))
    fleet.controller.step()
    assert fleet.process(there).killed
    fleet.host.there[there].phase = "ready"  # The order to kill it never came.
    fleet.cut("b")
    fleet.join("b")
    assert (fleet.process(there).killed, fleet.process(there).misses) == (False, 0)
    fleet.controller.edit(Edit(units={there: UnitEdit(restart=True, seconds=0.0)}))
    for _ in range(4):
        fleet.controller.step()
        if fleet.host.there[there].phase == "ending":
            del fleet.host.there[there]
            fleet.controller.hear(Ended(there, "ended", node="b"))
            break
    fleet.controller.step()
    assert fleet.process(there).phase == "starting"
    del fleet.host.there[there]  # Nor did the order to start it.
    fleet.cut("b")
    fleet.join("b")
    fleet.settle()
    assert fleet.where[there] == "b"


@pytest.mark.parametrize("report", [NodeLost("b", "its host is gone"), NodeLeft("b")])
def test_what_no_node_has_room_for_waits_and_starts_as_soon_as_there_is(report: NodeLost | NodeLeft) -> None:
    fleet = Fleet(3, {"a": 2, "b": 1})
    gone = next(name for name, node in fleet.where.items() if node == "b")
    fleet.host.cut("b")
    fleet.host.end_all("b")
    fleet.controller.hear(report)
    fleet.settle()
    assert fleet.process(gone).lack == "needs 1 MiB; the freest node, a, has 0 MiB left"
    fleet.host.nodes["c"] = Node(memory=MIB)
    fleet.join("c")
    fleet.settle()
    assert fleet.where[gone] == "c"
    assert not fleet.process(gone).lack


def test_a_controller_that_starts_anew_waits_for_the_nodes_that_it_knew() -> None:
    fleet = Fleet(2, {"a": 2, "b": 2})
    before = fleet.where
    fleet.host.cut("a")
    fleet.host.cut("b")
    fleet.begin()
    fleet.join("a")
    fleet.settle()
    left = next(name for name, node in before.items() if node == "b")
    assert fleet.process(left).lack == "waits until b has said what runs there"
    fleet.join("b")
    fleet.settle()
    assert fleet.where == before
    fleet.host.cut("a")
    fleet.host.cut("b")
    fleet.begin()
    fleet.join("a")
    fleet.clock.time += LEASE
    fleet.settle()
    assert fleet.where == dict.fromkeys(before, "a")


def test_a_drained_node_is_emptied_replica_after_replica() -> None:
    fleet = Fleet(4, {"a": 2, "b": 2, "c": 2})
    fleet.controller.edit(Edit(nodes={"a": NodeEdit(drained=True, seconds=1.0)}))
    most = 0
    for _ in range(40):
        fleet.controller.step()
        out = [name for name in fleet.controller.spec.units if fleet.process(name).phase != "ready"]
        most = max(most, len(out))
        fleet.settle()
    assert most == 1
    assert set(fleet.where) == set(fleet.controller.spec.units)
    assert "a" not in fleet.where.values()
    states = {one.name: one for one in node_states(fleet.controller.spec, fleet.controller.status)}
    assert (states["a"].state, states["a"].components) == ("drained", ())


def test_gateways_are_seen_to_node_by_node() -> None:
    fleet = Fleet(1, {"a": 1, "b": 1}, gateways=("a", "b", "c"), scheduler=1)
    ready = {name for name, one in fleet.controller.status.processes.items() if one.phase == "ready"}
    assert ready == {"u0", "gateway/1@a", "gateway/1@b", "scheduler"}
    assert fleet.process("scheduler").node == ""
    fleet.host.nodes["c"] = Node(memory=0)
    fleet.join("c")
    fleet.settle()
    assert fleet.process("gateway/1@c").phase == "ready"
    fleet.controller.edit(Edit(gateway=True))
    fleet.settle()
    assert {name for name in fleet.host.there if is_gateway(name)} == {f"gateway/2@{node}" for node in "abc"}
    fleet.controller.edit(Edit(nodes={"a": NodeEdit(drained=True)}))
    fleet.settle()
    assert fleet.process("scheduler").phase == "ready"
    assert "gateway/2@a" not in fleet.host.there
    fleet.controller.edit(Edit(nodes={"b": NodeEdit(drained=True)}))
    refused = fleet.controller.edit(Edit(nodes={"c": NodeEdit(drained=True)})).refused
    assert refused is not None
    assert refused.message.startswith("no gateway would be left")


def test_calls_are_summed_over_all_gateways() -> None:
    fleet = Fleet(2, {"a": 2, "b": 2}, gateways=("a", "b"))
    fleet.controller.edit(Edit(units={"u0": UnitEdit(drained=True)}))
    fleet.controller.step()
    seq = fleet.controller.snapshot.seq
    fleet.controller.count("gateway/1@a", Counted(seq, {"u0": 2}))
    assert fleet.process("u0").calls is None
    fleet.controller.count("gateway/1@b", Counted(seq, {"u0": 3}))
    assert fleet.process("u0").calls == 5
    fleet.controller.hear(NodeLost("b"))
    assert fleet.process("u0").calls == 2


class _Unseen:
    """Satisfies `Seeing`."""

    def state(self, unit: str) -> UnitState:
        return UnitState(name=unit, state="up", calls=0, models=())

    async def settled(self, unit: str) -> None:
        pass

    def client(self, unit: str) -> ScriptedEngine:
        return ScriptedEngine()

    async def ask_again(self, unit: str) -> None:
        pass


async def test_the_order_to_drain_a_node_is_over_when_it_is_empty() -> None:
    fleet = Fleet(2, {"a": 2, "b": 2})
    mirror = Mirror(fleet.controller.snapshot, lambda said: None)
    mirror.send = lambda said: mirror.heed(fleet.controller.edit(said)) if isinstance(said, Edit) else None
    fleet.host.follow = lambda news: mirror.heed(news) if isinstance(news, Change) else None
    orders = FleetOrders(mirror, _Unseen(), seconds=1.0)
    draining = asyncio.get_running_loop().create_task(orders.drain_node("a"))
    await asyncio.sleep(0)
    assert fleet.controller.spec.nodes["a"].drained
    assert not draining.done()
    fleet.settle()
    state = await draining
    assert (state.name, state.state, set(fleet.where.values())) == ("a", "drained", {"b"})
    assert (await orders.admit_node("a")).state == "there"
    with pytest.raises(Conflict, match="there is no node 'z'; the nodes: a, b"):
        await orders.drain_node("z")

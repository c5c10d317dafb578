"""The node on which a unit starts, by what it needs and what stands where."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvloom.cluster.placement import Place, needs, place, rooms
from kvloom.cluster.state import (
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    NodeSpec,
    NodeStatus,
    Phase,
    UnitSpec,
)
from tests.cluster.histories import engine

GIB = 1 << 30


def unit(size: int, *, model: str = "m", node: str = "", device: str = "cpu", ranks: int = 1) -> UnitSpec:
    made = replace(engine("x", model), kv_bytes=size * GIB, device=device, tensor_parallel=ranks)
    return UnitSpec(engine=made, node=node)


def at(node: str, phase: Phase = "ready") -> ComponentStatus:
    return ComponentStatus(phase=phase, generation=1, node=node)


def placed(
    wanted: UnitSpec,
    nodes: dict[str, NodeStatus],
    there: dict[str, tuple[UnitSpec, str]] | None = None,
    drained: tuple[str, ...] = (),
) -> str:
    """Returns the node, and the device if it is none of cores; or why there is none."""
    there = there or {}
    spec = FleetSpec(
        units={name: one for name, (one, _) in there.items()},
        nodes={name: NodeSpec(drained=name in drained) for name in nodes},
    )
    processes = {name: replace(at(node), memory=needs(one).memory) for name, (one, node) in there.items()}
    status = FleetStatus(nodes=nodes, processes=processes)
    made = place("new", needs(wanted), rooms(spec, status))
    if not isinstance(made, Place):
        return made
    return made.node if made.device == "cpu" else f"{made.node} {made.device}"


def node(size: int, *, cores: int = 8, gpus: int = 0) -> NodeStatus:
    return NodeStatus(memory=size * GIB, cores=cores, gpus=gpus)


AB = {"a": node(16), "b": node(8)}


@pytest.mark.parametrize(
    ("wanted", "nodes", "there", "found"),
    [
        (unit(4), AB, {}, "b"),  # It leaves the least there.
        (unit(12), AB, {}, "a"),
        (unit(4), {"b": node(8), "a": node(8)}, {}, "a"),
        (unit(4), AB, {"u": (unit(2), "b")}, "a"),  # A replica of it is on the other one.
        (unit(4), AB, {"u": (unit(2, model="n"), "b")}, "b"),
        (unit(4), AB, {"u": (unit(2), "b"), "v": (unit(12), "a")}, "a"),
        (unit(4), {"a": node(8, cores=0), "b": node(9)}, {}, "b"),  # It has cores of its own there.
        (unit(4, node="a"), AB, {}, "a"),
        (unit(12), AB, {"u": (unit(8), "a")}, "needs 12 GiB; the freest node, b, has 8 GiB left"),
        (unit(12, node="b"), AB, {}, "needs 12 GiB on b, which has 8 GiB left"),
        (unit(1, node="c"), AB, {}, "is to be on c, which has not joined"),
        (unit(1), {}, {}, "needs a node, and none has joined"),
        (unit(1), {"a": NodeStatus(phase="lost")}, {}, "needs a node that takes units; a is lost"),
    ],
)
def test_the_node(
    wanted: UnitSpec, nodes: dict[str, NodeStatus], there: dict[str, tuple[UnitSpec, str]], found: str
) -> None:
    assert placed(wanted, nodes, there) == found


def test_a_drained_node_gets_nothing() -> None:
    assert placed(unit(4), AB, drained=("b",)) == "a"
    assert placed(unit(4, node="b"), AB, drained=("b",)) == "is to be on b, which is drained"
    said = "needs a node that takes units; a is drained, b is drained"
    assert placed(unit(4), AB, drained=("a", "b")) == said


def test_gpus_are_side_by_side_and_nobody_elses() -> None:
    nodes = {"a": node(8, gpus=4), "b": node(8, gpus=2)}
    pair = unit(40, device="cuda:0", ranks=2)  # Its pool is not in the node's memory.
    assert placed(pair, nodes) == "b cuda:0"
    one = {"u": (unit(40, model="n", device="cuda:1"), "a"), "v": (unit(40, model="n", device="cuda:0"), "b")}
    assert placed(pair, nodes, one) == "a cuda:2"
    assert placed(unit(40, model="o", device="cuda:0"), nodes, one) == "b cuda:1"
    said = "needs 3 GPUs side by side, and 0 MiB, on one node; the freest, a, has 3, and 8 GiB left"
    assert placed(unit(40, device="cuda:0", ranks=3), nodes, one) == said
    assert placed(unit(40, node="a", device="cuda:1", ranks=2), nodes, one) == "a cuda:1"


def test_models_and_processes_take_their_part_of_a_node() -> None:
    """A unit on cores has its models beside its pool; one on GPUs has both in their memory."""
    made = unit(4).engine
    heavy = replace(made, memory=GIB, models=(replace(made.models[0], memory=2 * GIB),))
    assert placed(UnitSpec(engine=heavy), AB) == "b"
    assert placed(UnitSpec(engine=heavy), AB, {"u": (UnitSpec(engine=heavy), "b")}) == "a"
    said = "needs 7 GiB; the freest node, b, has 1 GiB left"
    assert placed(UnitSpec(engine=heavy), {"b": node(8)}, {"u": (UnitSpec(engine=heavy), "b")}) == said
    on_gpu = UnitSpec(engine=replace(heavy, device="cuda:0"))
    assert placed(on_gpu, {"a": node(1, gpus=1)}) == "a cuda:0"


def test_what_has_yet_to_end_takes_room_and_keeps_its_unit_away() -> None:
    nodes = {"a": replace(node(8), stale=("new",)), "b": node(6)}
    made = rooms(FleetSpec(units={"new": unit(4)}), FleetStatus(nodes=nodes))
    assert made["a"].memory == 4 * GIB
    assert place("new", needs(unit(4)), made) == Place("b", "cpu")
    assert place("new", needs(unit(4, node="a")), made) == (
        "is to be on a, where its last process has yet to end"
    )

"""A fleet of many machines in virtual time, of which a rack goes.

`KVLOOM_NODES=100 pytest -s tests/lab/sim/test_nodes.py` plays 100 nodes with 1,000 units, and prints how soon
their units serve again; CI plays a small fleet.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from kvloom.cluster.reconcile import TIMING
from kvloom.cluster.state import ABSENT
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.nodes import SimulatedNode, link_between
from kvloom.lab.sim.run import send_workload
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock
from kvloom.lab.workload.request import RequestResult
from kvloom.router.program import load_program
from tests.lab.sim.fleets import asks, prompt_of, unit, virtually

NODES = int(os.environ.get("KVLOOM_NODES", "10"))
RACK = max(1, NODES // 10)
UNITS = 10  # on each node; there is room for one more
START = 4.0


def machines() -> list[SimulatedNode]:
    room = (UNITS + 1) * unit().spec.kv_bytes
    return [SimulatedNode(f"n{i}", memory=room, cores=64, rack=f"r{i // RACK}") for i in range(NODES)]


def fleet_units(count: int) -> list[SimulatedUnit]:
    return [replace(unit(f"u{i}", ["small"]), start=START) for i in range(count)]


def ready(fleet: SimulatedFleet) -> dict[str, str]:
    """Returns the node of each unit that serves."""
    processes = fleet.controller.status.processes
    there = fleet.engines
    return {name: one.node for name, one in processes.items() if one.phase == "ready" and name in there}


@virtually
async def test_a_rack_goes_and_all_that_fits_is_served_again_within_a_minute() -> None:
    clock = LoopClock(asyncio.get_running_loop())
    wanted = fleet_units(NODES * UNITS)
    program = load_program("data_parallel", {})
    async with run_fleet(wanted, program, nodes=machines()) as fleet:
        await clock.sleep(2 * START)
        assert len(ready(fleet)) == len(wanted)
        assert fleet.nodes is not None
        gone = fleet.nodes.rack("r0")
        lost = [name for name, node in ready(fleet).items() if node in gone]
        assert len(lost) >= RACK
        fleet.nodes.lose(gone)
        at = clock.now()
        room = NODES - RACK  # of one more unit on each node that is left
        fits = len(wanted) - max(0, len(lost) - room)
        while len(ready(fleet)) < fits or set(ready(fleet).values()) & set(gone):
            assert clock.now() < at + 60
            await clock.sleep(0.5)
        took = clock.now() - at
        print(
            f"\n{NODES} nodes with {len(wanted)} units, {RACK} nodes lost: all {fits} units that fit serve "
            f"after {took:g} s of virtual time"
        )
        status = fleet.controller.status
        waiting = [name for name in lost if status.processes.get(name, ABSENT).lack]
        assert len(waiting) == len(wanted) - fits
        fleet.nodes.join(gone)
        await clock.sleep(2 * START)
        assert len(ready(fleet)) == len(wanted)


@virtually
async def test_a_lost_rack_is_reconciled_at_once() -> None:
    """As soon as its lease is over, all that fits elsewhere is starting."""
    clock = LoopClock(asyncio.get_running_loop())
    wanted = fleet_units(NODES * UNITS)
    async with run_fleet(wanted, load_program("data_parallel", {}), nodes=machines()) as fleet:
        await clock.sleep(2 * START)
        assert fleet.nodes is not None
        gone = fleet.nodes.rack("r0")
        lost = [name for name, node in ready(fleet).items() if node in gone]
        at = clock.now()
        fleet.nodes.lose(gone)
        phases = [fleet.controller.status.processes[name].phase for name in lost]
        assert set(phases) == {"ready"}  # They may serve, as far as anyone knows.
        await clock.sleep(TIMING.lease + 0.01)
        processes = [fleet.controller.status.processes[name] for name in lost]
        started = [one for one in processes if one.phase == "starting"]
        assert len(started) == min(len(lost), NODES - RACK)
        assert all(one.lack for one in processes if one.phase != "starting")
        moments = {one.since for one in started}
        assert moments == {at + TIMING.lease}, "they are started in one go"
        print(f"\n{len(started)} units are started in one go, {moments.pop() - at:g} s after the loss")


def test_units_of_one_machine_have_one_way_to_the_others() -> None:
    way = link_between({"a": "n0", "b": "n0", "c": "n1"})
    assert way("a", "b") is None
    assert way("a", "c") is way("b", "c") is not None
    assert way("c", "a") not in (None, way("a", "c"))
    assert way("a", "d") is way("d", "a") is None


@virtually
async def test_requests_of_a_lost_node_go_on_elsewhere() -> None:
    clock = LoopClock(asyncio.get_running_loop())
    nodes = [SimulatedNode(f"n{i}", memory=1 << 20, cores=8, rack=f"r{i}") for i in range(3)]
    told: list[RequestResult] = []
    asked = asks(200, seed=1, rate=400.0, models=["small"])
    program = load_program("data_parallel", {})
    async with run_fleet(fleet_units(4), program, nodes=nodes) as fleet:
        await clock.sleep(2 * START)
        assert fleet.nodes is not None
        assert sorted(set(ready(fleet).values())) == ["n0", "n1", "n2"]
        playing = asyncio.get_running_loop().create_task(
            send_workload(fleet.router, asked, prompt_of, clock, told.append)
        )
        await clock.sleep(0.05)
        gone = [name for name, node in ready(fleet).items() if node == "n1"]
        assert sum(fleet.router.units[name].calls for name in gone) > 0
        fleet.nodes.lose(["n1"])
        await playing
        assert len(told) == 200
        assert not [one.error for one in told if one.error]

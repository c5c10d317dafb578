"""A plan for the hosts of a Ray cluster, from what they have to a fleet that serves it; and the part of them
that Ray sets apart for units."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvloom.config.config import DEMO
from kvloom.plan.cost.profile import write_profile
from kvloom.plan.plan import read_plan, write_plan
from kvloom.types.service import Placement
from kvloom.types.spec import EngineSpec
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.fleets import DEADLINE, kvloom, of_kvloom, served, text_of, units_of
from tests.hosts.hosts import Host, eventually
from tests.plan.cost.profiles import make_profile

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
MODELS = f"""\
models:
  one: {{path: {DEMO}/guide, rate: 40, prompt: 50, output: 40}}
  two: {{path: {DEMO}/sums, rate: 40, prompt: 50, output: 40}}
"""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    """Hosts of one cluster, the head first."""
    with hosts_or_skip(2) as made:
        head, other = made
        told = kvloom(head, "cluster", "start", "--head", "--address", head.address)
        [token] = re.findall(r"RAY_AUTH_TOKEN=(\w+) ", told)
        kvloom(other, "cluster", "join", f"{head.address}:6379", token=token)
        yield made


def specs_at(head: Host) -> tuple[EngineSpec, ...]:
    """Returns the units of the fleet that serves from a host, which tells this to callers there alone."""
    asking = "import httpx; print(httpx.get('http://127.0.0.1:8000/admin/placement').text)"
    told = head.run(sys.executable, "-c", asking)
    return msgspec.json.decode(told, type=Placement).units


def test_a_plan_of_several_hosts_is_made_and_served(two: list[Host], tmp_path: Path) -> None:
    """Each unit is where the plan has it, with its cores, its quotas and its pool."""
    (tmp_path / "models.yaml").write_text(MODELS)
    write_profile(make_profile(), tmp_path / "profile.json")
    file = tmp_path / "plan.json"
    arguments = ("--profile", str(tmp_path / "profile.json"), "-o", str(file))
    kvloom(two[0], "plan", str(tmp_path / "models.yaml"), "--cluster", "auto", *arguments)
    plan = read_plan(file)
    assert {unit.node for unit in plan.units} == {host.address for host in two}
    # The hosts have one machine's memory, of which each takes itself to have all.
    plan = replace(plan, units=tuple(replace(unit, kv_bytes=16 << 20) for unit in plan.units))
    write_plan(file, plan)
    with served(two[0], str(file), "--host", "0.0.0.0", "--cluster", "auto") as fleet:
        for unit, spec in zip(plan.units, specs_at(two[0]), strict=True):
            assert (unit.name, unit.kv_bytes, unit.gpus) == (spec.unit, spec.kv_bytes, spec.threads)
            for model, served_as in zip(unit.models, spec.models, strict=True):
                assert model.share_of(served_as) == served_as
        for host in two:
            assert units_of(host) == [unit.name for unit in plan.units if unit.node == host.address]
        assert text_of(fleet.url, "two")
    eventually(lambda: not any(map(of_kvloom, two)), seconds=DEADLINE)


RESERVING = """\
import asyncio, os, sys, time
import ray
from kvloom.config.file import Settings
from kvloom.serve.nodes import ray_nodes
from kvloom.serve.nodes.attach import ResourceBundle
from kvloom.serve.nodes.home import FleetOrder
from kvloom.serve.processes.identity import FleetIdentity
from kvloom.types.clock import WallClock

def left(cpus):
    deadline = time.monotonic() + 120
    while (found := ray.available_resources().get("CPU", 0.0)) != cpus:
        assert time.monotonic() < deadline, f"{found} CPUs are left, and not {cpus}"
        time.sleep(0.05)

async def reserve(nodes, node):
    free = ray.cluster_resources()["CPU"]
    left(free)
    assert await nodes.reserve({"unit-0": ResourceBundle(node, 2, 0)}) == []
    left(free - 2)
    part = ResourceBundle(node, 1, 0)
    assert await nodes.reserve({"unit-0": part}) == [], "it takes another part of the node"
    left(free - 1)
    ray_nodes.RESERVE_SECONDS = 0.5
    for other in ResourceBundle(node, 64, 0), ResourceBundle(node, 1, 8), ResourceBundle("10.9.8.7", 1, 0):
        [problem] = await nodes.reserve({"unit-0": part, "unit-1": other})
        print(problem.name, problem.problem, flush=True)
        assert nodes.lacks
        assert await nodes.reserve({"unit-0": part, "unit-1": other}) == [], "it was told before"
    ray_nodes.RESERVE_SECONDS = 60.0
    assert await nodes.reserve({"unit-0": part}) == []
    assert not nodes.lacks
    left(free - 1)
    assert await nodes.reserve({}) == []
    left(free)
    assert await nodes.reserve({"unit-2": part}) == []

ray_nodes.RESERVE_SECONDS = 60.0
settings = Settings(values={}, folder="/", origin={})
identity = FleetIdentity.make()
order = FleetOrder(
    settings=settings, machines=(), node="", folder="/", secret="s", identity=identity
)
with ray_nodes.connected("auto"):
    nodes = ray_nodes.RayNodes(order, WallClock())
    match sys.argv[1]:
        case "reserve":
            asyncio.run(reserve(nodes, sys.argv[2]))
            os._exit(0)
        case "look":
            left(ray.cluster_resources()["CPU"] - 1)
        case "end":
            assert asyncio.run(nodes.reserve({"unit-0": ResourceBundle(sys.argv[2], 1, 0)})) == []
            nodes.end()
            left(ray.cluster_resources()["CPU"])
"""


def test_what_units_take_is_set_apart_in_ray(two: list[Host]) -> None:
    """What cannot be is told in one line. It outlives a process that dies, and not a fleet that ends."""
    head, other = two
    said = head.run(sys.executable, "-c", RESERVING, "reserve", other.address).splitlines()
    what, why = "unit-1: Ray has no more of what it takes", "so another job may have been given it"
    assert said == [
        f"{other.address} {what} (CPUs: 64), {why}",
        f"{other.address} {what} (CPUs: 1, GPUs: 8), {why}",
        f"10.9.8.7 {what} (CPUs: 1), {why}",
    ]
    head.run(sys.executable, "-c", RESERVING, "look")
    head.run(sys.executable, "-c", RESERVING, "end", other.address)

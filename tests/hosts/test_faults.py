"""What happens to hosts, and to what runs on them, costs no client anything.

Streams are under way in every scenario, and each must be what a lone engine makes of it: none wrong, none
lost, none doubled. Afterwards the fleet is whole, and no block is held by nobody. Some scenarios take long,
or are like another one here: `KVLOOM_FAULTS=all` plays these too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from kvloom.config.config import DEMO
from tests.authorities import Authority
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.fleets import (
    DEADLINE,
    RayCluster,
    Serving,
    commands,
    files_of,
    kvloom,
    lone,
    of_kind,
    of_kvloom,
    serving,
    units_of,
)
from tests.hosts.hosts import Host, eventually
from tests.hosts.streams import Answer, Asked, Clients, drawn, right_answers, under_way

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
long = pytest.mark.skipif(
    os.environ.get("KVLOOM_FAULTS") != "all", reason="takes long; KVLOOM_FAULTS=all plays it"
)
AT_ONCE = 8
LEASE = 12.0  # for a controller to come again on a busy machine
CONFIG = f"""\
kv_memory: 48MiB
node_lease: {LEASE:g}s
lease: 2s
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], replicas: 3, threads: 1}}]
"""


@dataclass(frozen=True)
class Scene:
    """A fleet over three hosts, and what is right to answer."""

    cluster: RayCluster
    fleet: Serving
    right: dict[Asked, Answer]

    @property
    def victim(self) -> Host:
        """Returns a host on which an engine runs, and that is not the head."""
        return next(host for host in self.cluster.workers if units_of(host))

    @contextmanager
    def streams(self, *, gateways_die: bool = False) -> Iterator[Clients]:
        """Holds streams under way, from before the block to when the fleet is whole after it. None breaks,
        unless gateways die."""
        clients = Clients(self.fleet.urls, self.right)
        with under_way(clients, lambda: clients.again_and_again(AT_ONCE)) as tally:
            eventually(lambda: clients.events.total() > 3 * AT_ONCE, DEADLINE)
            yield clients
            self.fleet.become_whole()
        assert not tally.bad, "\n".join(tally.told[:5])
        assert tally.streams >= AT_ONCE
        if not gateways_die:
            assert not tally.resumed, "the fleet has let streams of clients break"
        eventually(lambda: not self.fleet.leaked(), DEADLINE)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    asked = drawn(["sums"], 24, seed=1)
    with hosts_or_skip(3) as made:
        with lone(made[0], "--model", f"sums={DEMO}/sums") as url:
            right = asyncio.run(right_answers(url, asked))
        cluster = RayCluster(made, storage=tmp_path_factory.mktemp("head"))
        cluster.start()
        folder = tmp_path_factory.mktemp("faults")
        given = Authority(folder).sign("fleet")
        config = CONFIG + (
            f"gateways: {[host.address for host in made]}\n"
            f"node_tls: {{certificate: {given.certificate}, key: {given.key}}}\n"
        )
        with serving(cluster, config, folder) as fleet:
            yield Scene(cluster, fleet, right)


def kill(host: Host, kind: str, by: signal.Signals = signal.SIGKILL) -> None:
    """Kills a host's process of this kind, or gives it another signal."""
    [process] = of_kind(host, kind)
    os.kill(process, by)


def test_an_agent_is_killed(scene: Scene) -> None:
    """The engine of its host never notices."""
    victim = scene.victim
    engines = of_kind(victim, "engine")
    with scene.streams():
        kill(victim, "agent")
        eventually(lambda: len(of_kind(victim, "agent")) == 1, DEADLINE)
    assert of_kind(victim, "engine") == engines


def test_an_engine_is_killed(scene: Scene) -> None:
    """It starts again on its host, and its streams go on elsewhere meanwhile."""
    victim = scene.victim
    engines, units = of_kind(victim, "engine"), units_of(victim)
    with scene.streams():
        kill(victim, "engine")
        eventually(lambda: of_kind(victim, "engine") not in ([], engines), DEADLINE)
    assert units_of(victim) == units


def test_a_gateway_is_killed(scene: Scene) -> None:
    """Clients resume its streams at other gateways, and its host has another one soon."""
    victim = scene.victim
    gateways, engines = of_kind(victim, "gateway"), of_kind(victim, "engine")
    url = next(url for url in scene.fleet.urls if victim.address in url)
    with scene.streams(gateways_die=True) as clients:
        eventually(lambda: clients.under_way(url) > 1, DEADLINE)  # one of them might end just now
        kill(victim, "gateway")
        eventually(lambda: of_kind(victim, "gateway") not in ([], gateways), DEADLINE)
    assert clients.tally.resumed
    assert of_kind(victim, "engine") == engines


def test_the_controller_is_killed(scene: Scene) -> None:
    """Another one takes over what runs, and no stream notices."""
    running = [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts]
    [home] = [host for host in scene.cluster.hosts if of_kind(host, "controller")]
    with scene.streams():
        before = scene.fleet.shown.readies
        kill(home, "controller")
        eventually(lambda: scene.fleet.shown.readies > before, DEADLINE)
    assert [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts] == running


def test_the_command_that_shows_the_fleet_is_killed(scene: Scene) -> None:
    running = [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts]
    with scene.streams():
        scene.fleet.shown.process.signal(signal.SIGKILL)
        scene.fleet.shown.process.wait()
        scene.fleet.shown.start()
    assert [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts] == running


def test_the_head_loses_its_power_and_is_started_again(scene: Scene) -> None:
    """Ray's actor starts a controller there, which takes over what runs elsewhere."""
    head = scene.cluster.head
    with scene.streams(gateways_die=True):
        head.cut_power()
        head.boot()
        scene.cluster.start_head_again()
        eventually(lambda: bool(of_kind(head, "gateway")), DEADLINE)
        scene.fleet.shown.start()


@long
def test_the_controller_is_stopped(scene: Scene) -> None:
    """As one that hangs it is killed, and another one takes over what runs."""
    head = scene.cluster.head
    running = [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts]
    with scene.streams():
        before, stopped = scene.fleet.shown.readies, of_kind(head, "controller")
        kill(head, "controller", signal.SIGSTOP)
        eventually(lambda: scene.fleet.shown.readies > before, DEADLINE)
        assert of_kind(head, "controller") != stopped
    assert [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts] == running


@long
def test_the_head_of_ray_is_killed(scene: Scene) -> None:
    """The fleet serves on without Ray, which knows it again once the head is started with what it kept."""
    head = scene.cluster.head
    running = [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts]
    with scene.streams():
        kill(head, "gcs")
        for program in ("least_loaded", "data_parallel"):  # The controller cannot give Ray its copy of that.
            kvloom(head, "program", "set", program)
        time.sleep(2 * LEASE)
        scene.cluster.start_head_again()
        eventually(lambda: len(scene.cluster.alive()) == len(scene.cluster.hosts), DEADLINE)
    assert [(of_kind(host, "engine"), of_kind(host, "gateway")) for host in scene.cluster.hosts] == running


@long
def test_a_keeper_is_killed(scene: Scene) -> None:
    """Its engines end with it, and its host has another one soon."""
    victim = scene.victim
    keepers = of_kind(victim, "keeper")
    with scene.streams(gateways_die=True):
        kill(victim, "keeper")
        eventually(lambda: of_kind(victim, "keeper") not in ([], keepers), DEADLINE)


def test_a_raylet_is_killed(scene: Scene) -> None:
    """The engine of its host serves on. The host joins again, and the next agent finds what runs there."""
    victim = scene.victim
    engines = of_kind(victim, "engine")
    with scene.streams():
        kill(victim, "raylet")
        eventually(lambda: not of_kind(victim, "agent"), DEADLINE)
        scene.cluster.join(victim)
        eventually(lambda: len(of_kind(victim, "agent")) == 1, DEADLINE)
    assert of_kind(victim, "engine") == engines


@long
def test_ray_is_dead_on_a_host_for_longer_than_a_lease(scene: Scene) -> None:
    """Also after Ray has given the host up its engine serves on."""
    victim = scene.victim
    engines = of_kind(victim, "engine")
    with scene.streams():
        kill(victim, "raylet")
        eventually(lambda: victim.address not in scene.cluster.alive(), DEADLINE)
        time.sleep(2 * LEASE)
        assert of_kind(victim, "engine") == engines
        scene.cluster.join(victim)
        eventually(lambda: victim.address in scene.cluster.alive(), DEADLINE)
    assert of_kind(victim, "engine") == engines


def test_a_host_loses_its_power_and_joins_again(scene: Scene) -> None:
    """Its streams go on elsewhere, and its unit starts elsewhere once the lease is over."""
    victim = scene.victim
    with scene.streams(gateways_die=True):
        victim.cut_power()
        eventually(lambda: len(set(scene.fleet.units().values())) == 1, DEADLINE)
        victim.boot()
        scene.cluster.join(victim)


@long
def test_a_host_is_cut_off_for_less_than_its_lease(scene: Scene) -> None:
    """Nothing is started or ended, and no stream moves."""
    victim = scene.victim
    engines = of_kind(victim, "engine")
    with scene.streams(gateways_die=True):
        victim.cut_off()
        eventually(lambda: scene.fleet.nodes()[victim.address] == "silent", DEADLINE)
        victim.join_again()
    assert of_kind(victim, "engine") == engines


def test_a_host_is_cut_off_for_longer_than_its_lease(scene: Scene) -> None:
    """Its unit starts elsewhere, but not before nothing there can answer any more. When it is back, no unit
    has two processes."""
    victim = scene.victim
    cut = set(units_of(victim))
    others = [host for host in scene.cluster.hosts if host is not victim]
    with scene.streams(gateways_die=True):
        victim.cut_off()
        try:
            eventually(lambda: cut <= {unit for host in others for unit in units_of(host)}, DEADLINE)
            assert not units_of(victim), "two processes of a unit"
        finally:
            victim.join_again()


@long
def test_a_slow_link_loses_packets(scene: Scene) -> None:
    victim = scene.victim
    engines = of_kind(victim, "engine")
    with scene.streams() as clients, victim.slow(delay=0.03, loss=0.02):
        already = clients.tally.streams
        eventually(lambda: clients.tally.streams > already + AT_ONCE, DEADLINE)
    assert of_kind(victim, "engine") == engines


def test_a_host_is_drained_and_admitted(scene: Scene) -> None:
    """What runs there moves or comes to its end, its unit starts elsewhere, and units start there again."""
    victim = scene.victim
    with scene.streams():
        kvloom(scene.cluster.head, "node", "drain", victim.address)
        assert not units_of(victim)
        kvloom(scene.cluster.head, "node", "admit", victim.address)


@long
def test_a_host_leaves_its_cluster_and_joins_again(scene: Scene) -> None:
    victim = scene.victim
    with scene.streams(gateways_die=True):
        kvloom(victim, "cluster", "stop")
        eventually(lambda: not units_of(victim), DEADLINE)
        scene.cluster.join(victim)


def test_a_clean_stop_leaves_nothing(scene: Scene) -> None:
    """No process of the fleet, nor any file but logs; and when the hosts have left their
    cluster, no process at all."""
    scene.fleet.end()
    eventually(lambda: not any(map(of_kvloom, scene.cluster.hosts)), DEADLINE)
    assert [file for file in files_of(scene.cluster.hosts) if not file.endswith(".log")] == []
    scene.cluster.stop()
    assert [list(commands(host).values()) for host in scene.cluster.hosts] == [[], [], []]

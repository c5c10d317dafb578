"""Many streams over three hosts under faults of all kinds: `python -m tests.hosts.campaign`.

Faults are drawn by a seed, and each is healed before the next one. 500 clients ask all the while, and each
stream must be what a lone engine makes of it; those whose connection breaks are resumed by id. Prints each
fault with how long the fleet took to be whole again, and at last what became of all streams, and what was
left. Ends with 1 if anything was wrong, lost, doubled, leaked or left. It needs root, to make hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.config.config import DEMO
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
from tests.hosts.hosts import Host, eventually, hosts
from tests.hosts.streams import Clients, Tally, drawn, right_answers, under_way

SHOWN: Final = 20  # lines of what was wrong
LEASE: Final = 10.0
MODELS: Final = "sums", "stories"
CONFIG: Final = f"""\
kv_memory: 64MiB
block_bytes: 4KiB
node_lease: {LEASE:g}s
lease: 2s
max_waiting: 4096
patience: 120s
models: {{sums: {DEMO}/sums, stories: {DEMO}/stories}}
units: [{{models: [sums, stories], replicas: 3, threads: 1}}]
"""


@dataclass
class Scene:
    """A fleet over hosts, to which things happen."""

    cluster: RayCluster
    fleet: Serving
    draw: random.Random

    @property
    def victim(self) -> Host:
        """Returns a host that is drawn of those on which an engine runs, but for the head."""
        return self.draw.choice([host for host in self.cluster.workers if units_of(host)])

    def kill(self, host: Host, kind: str) -> None:
        for process in of_kind(host, kind):
            os.kill(process, signal.SIGKILL)

    def join_if_needed(self, host: Host) -> None:
        """Brings a host back into Ray's cluster if Ray has given it up."""
        if not of_kind(host, "raylet"):
            self.cluster.join(host)

    # -- what happens -----------------------------------------------------------------------------------

    def an_agent_is_killed(self) -> None:
        self.kill(self.draw.choice(self.cluster.hosts), "agent")

    def a_raylet_is_killed(self) -> None:
        host = self.victim
        self.kill(host, "raylet")
        time.sleep(self.draw.uniform(0.0, 2 * LEASE))
        self.cluster.join(host)

    def an_engine_is_killed(self) -> None:
        self.kill(self.draw.choice([host for host in self.cluster.hosts if units_of(host)]), "engine")

    def a_keeper_is_killed(self) -> None:
        self.kill(self.victim, "keeper")

    def a_host_loses_its_power(self) -> None:
        host = self.victim
        host.cut_power()
        time.sleep(self.draw.uniform(0.0, 2 * LEASE))
        host.boot()
        self.cluster.join(host)

    def a_host_is_cut_off_for_less_than_its_lease(self) -> None:
        host = self.victim
        host.cut_off()
        time.sleep(self.draw.uniform(0.2, LEASE - 3))
        host.join_again()

    def a_host_is_cut_off_for_longer_than_its_lease(self) -> None:
        """Ray's part of the host may end once it finds that it was given up."""
        host = self.victim
        host.cut_off()
        time.sleep(self.draw.uniform(LEASE + 2, 20.0))
        host.join_again()
        time.sleep(2.0)
        self.join_if_needed(host)

    def a_link_is_slow_and_loses_packets(self) -> None:
        delay, loss = self.draw.uniform(0.0, 0.05), self.draw.uniform(0.0, 0.03)
        with self.victim.slow(delay, loss, self.draw.randrange(2**31)):
            time.sleep(10.0)

    def a_host_is_drained_and_admitted(self) -> None:
        name = self.victim.address
        kvloom(self.cluster.head, "node", "drain", name)
        kvloom(self.cluster.head, "node", "admit", name)

    def a_host_leaves_and_joins(self) -> None:
        host = self.victim
        kvloom(host, "cluster", "stop")
        time.sleep(self.draw.uniform(0.0, 2 * LEASE))
        self.cluster.join(host)

    def a_gateway_is_killed(self) -> None:
        self.kill(self.draw.choice(self.cluster.hosts), "gateway")

    def the_controller_is_killed(self) -> None:
        before = self.fleet.shown.readies
        self.kill(self.cluster.head, "controller")
        eventually(lambda: self.fleet.shown.readies > before, DEADLINE)

    def the_controller_is_stopped(self) -> None:
        before = self.fleet.shown.readies
        for process in of_kind(self.cluster.head, "controller"):
            os.kill(process, signal.SIGSTOP)
        eventually(lambda: self.fleet.shown.readies > before, DEADLINE)

    def the_command_that_shows_the_fleet_is_killed(self) -> None:
        self.fleet.shown.process.signal(signal.SIGKILL)
        self.fleet.shown.process.wait()
        self.fleet.shown.start()

    def the_head_of_ray_is_killed(self) -> None:
        self.kill(self.cluster.head, "gcs")
        time.sleep(self.draw.uniform(0.0, 2 * LEASE))
        self.cluster.start_head_again()
        eventually(lambda: len(self.cluster.alive()) == len(self.cluster.hosts), DEADLINE)

    def the_head_loses_its_power(self) -> None:
        head = self.cluster.head
        head.cut_power()
        time.sleep(self.draw.uniform(0.0, 2 * LEASE))
        head.boot()
        self.cluster.start_head_again()
        eventually(lambda: bool(of_kind(head, "gateway")), DEADLINE)
        self.fleet.shown.start()

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [
            self.an_agent_is_killed,
            self.a_raylet_is_killed,
            self.an_engine_is_killed,
            self.a_keeper_is_killed,
            self.a_host_loses_its_power,
            self.a_host_is_cut_off_for_less_than_its_lease,
            self.a_host_is_cut_off_for_longer_than_its_lease,
            self.a_link_is_slow_and_loses_packets,
            self.a_host_is_drained_and_admitted,
            self.a_host_leaves_and_joins,
            self.a_gateway_is_killed,
            self.the_controller_is_killed,
            self.the_controller_is_stopped,
            self.the_command_that_shows_the_fleet_is_killed,
            self.the_head_of_ray_is_killed,
            self.the_head_loses_its_power,
        ]


@dataclass(frozen=True, slots=True)
class Effort:
    at_once: int = 500
    requests: int = 200
    """Unlike ones, which clients ask again and again."""
    longest: int = 300
    """Tokens of an answer."""
    rounds: int = 3
    """In each round all faults happen, in an order that is drawn."""
    seed: int = 0


def play(effort: Effort, say: Callable[[str], None]) -> list[str]:
    """Plays it all, and returns what was wrong."""
    wrong: list[str] = []
    asked = drawn(MODELS, effort.requests, effort.seed, effort.longest)
    with tempfile.TemporaryDirectory() as folder, hosts(3) as made:
        path = Path(folder, "lone.yaml")
        path.write_text(CONFIG.replace("replicas: 3", "replicas: 1"))
        with lone(made[0], str(path)) as url:
            right = asyncio.run(right_answers(url, asked))
        say(f"a lone engine has answered {len(right)} requests")
        cluster = RayCluster(made, storage=Path(folder, "head"))
        cluster.start()
        gateways = f"gateways: {[host.address for host in made]}\n"
        with serving(cluster, CONFIG + gateways, Path(folder)) as fleet:
            clients = Clients(fleet.urls, right, effort.seed)
            scene = Scene(cluster, fleet, random.Random(effort.seed))
            began = time.monotonic()
            with under_way(clients, lambda: clients.again_and_again(effort.at_once)) as tally:
                eventually(lambda: clients.events.total() > effort.at_once, DEADLINE)
                wrong += _suffer(scene, effort, tally, say)
            say(_told(tally, time.monotonic() - began))
            wrong += tally.told
            wrong += _leaked(fleet)
            fleet.end()
        wrong += _left(cluster)
    return wrong


def _suffer(scene: Scene, effort: Effort, tally: Tally, say: Callable[[str], None]) -> list[str]:
    """Lets all faults happen, each to a fleet that is whole, and returns what was not healed."""
    for number in range(effort.rounds):
        for fault in scene.draw.sample(scene.faults, len(scene.faults)):
            began, streams, name = time.monotonic(), tally.streams, fault.__name__.replace("_", " ")
            tally.quiet = 0.0
            try:
                fault()
                scene.fleet.become_whole()
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                return [f"after {name}: {error}"]
            say(
                f"{number}: {name}: whole after {time.monotonic() - began:.1f} s; "
                f"{tally.streams - streams} streams ended, {tally.bad.total()} of all not well; "
                f"at most {tally.quiet:.1f} s without a token"
            )
    return []


def _told(tally: Tally, seconds: float) -> str:
    wrong, lost, doubled = (tally.bad[kind] for kind in ("wrong", "lost", "doubled"))
    return (
        f"{tally.streams} streams of {tally.tokens} tokens in {seconds:.0f} s: {wrong} wrong, {lost} lost, "
        f"{doubled} doubled, {tally.resumed} resumptions, {tally.refused} refusals"
    )


def _leaked(fleet: Serving) -> list[str]:
    try:
        eventually(lambda: not fleet.leaked(), 30.0)
    except AssertionError:
        return [f"{unit}: {blocks} blocks are nobody's" for unit, blocks in fleet.leaked().items()]
    return []


def _left(cluster: RayCluster) -> list[str]:
    """Returns what is left of a fleet that has ended, and of its cluster."""
    left = []
    try:
        eventually(lambda: not any(map(of_kvloom, cluster.hosts)), DEADLINE)
    except AssertionError:
        left += [f"{host.name}: {line} is left" for host in cluster.hosts for line in of_kvloom(host)]
    left += [f"{file} is left" for file in files_of(cluster.hosts) if not file.endswith(".log")]
    cluster.stop()
    return left + [
        f"{host.name}: {line} is left" for host in cluster.hosts for line in commands(host).values()
    ]


def main() -> None:
    usual = Effort()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=usual.at_once, help="streams at the same time")
    parser.add_argument("--requests", type=int, default=usual.requests, help="unlike ones")
    parser.add_argument("--longest", type=int, default=usual.longest, help="tokens of an answer, at most")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="in each, all faults happen once")
    parser.add_argument("--seed", type=int, default=usual.seed)
    effort = Effort(**vars(parser.parse_args()))
    began = time.monotonic()
    wrong = play(effort, lambda line: print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True))
    for line in wrong[:SHOWN]:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

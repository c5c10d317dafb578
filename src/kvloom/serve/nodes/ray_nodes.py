"""The nodes of a Ray cluster, as hosts of a fleet.

Ray tells which nodes there are, and starts an agent on each, which starts the node's keeper. Nothing else
goes through Ray: neither orders to keepers, nor requests, tokens, K and V.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvloom.config.machine import Machine
from kvloom.serve.nodes.agent import KeeperOrder, NodeAgent
from kvloom.serve.nodes.launcher import Joins
from kvloom.serve.processes.identity import FleetIdentity
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError

NAMESPACE: Final = "kvloom"
LOOK_SECONDS: Final = 1.0  # between two looks at which nodes there are
REACH_SECONDS: Final = 5.0  # for the head to answer
AGENT_SECONDS: Final = 60.0  # for an agent to start the node's keeper
AGAIN_SECONDS: Final = 5.0  # for that on a node that may be cut off, while no other node joins
_CRASHED: Final = 2  # Ray's NodeDeathInfo.UNEXPECTED_TERMINATION


def connect(address: str) -> None:
    """Connects this process to a Ray cluster. address: `HOST:PORT` of its head, or `auto` for the cluster
    that runs on this host. Raises ConfigError with one line if that cannot be done."""
    if address != "auto":
        _reach(address)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"--cluster {address}: no Ray cluster can be reached, or it has another token than this host; "
            "`kvloom cluster start --head` starts one, and HOST:PORT of a head is right"
        ) from error
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"--cluster {address}: {' '.join(str(error).split())[:400]}") from error


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--cluster {address}: no address; `auto`, or HOST:PORT of a head, is right")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error) or f"no answer in {REACH_SECONDS:g} s"
        raise ConfigError(
            f"--cluster {address}: cannot be reached ({reason}); HOST:PORT of a cluster's head is right"
        ) from error


class RayNodes:
    """Satisfies `Cluster` with the nodes of the Ray cluster to which this process is connected."""

    def __init__(self, clock: Clock) -> None:
        self.secret = secrets.token_urlsafe(32)
        self.identity = FleetIdentity.make()
        self._clock = clock
        self._fleet = hashlib.sha256(self.secret.encode()).hexdigest()[:12]
        self._known: dict[str, str] = {}  # node's name by Ray's id of it
        self._problems: dict[str, str] = {}  # what was told of nodes without a keeper

    async def follow(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self.look(joins, told)

    async def look(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        alive = await asyncio.to_thread(_alive)
        for identifier in set(self._known) - set(alive):
            name = self._known.pop(identifier)
            # If Ray alone has died there, the keeper and its engines serve on; whether they do, it tells.
            if name not in alive.values() and await asyncio.to_thread(_was_stopped, identifier):
                joins.leave(name)
        silent = joins.silent()
        asked = {
            identifier: name
            for identifier, name in alive.items()
            if identifier not in self._known or name in silent
        }
        found = await asyncio.gather(*(asyncio.to_thread(self._keeper, *one) for one in asked.items()))
        for (identifier, name), (address, problem) in zip(asked.items(), found, strict=True):
            if address:
                self._known[identifier] = name
                self._problems.pop(name, None)
                joins.join(name, address)
            elif identifier not in self._known and self._problems.get(name) != problem:
                self._problems[name] = problem
                told(name, f"has no keeper: {problem}; it is tried again")

    def machines(self) -> list[Machine]:
        """Returns what the nodes have."""
        alive = _alive()
        asked = [self._agent(identifier).machine.remote() for identifier in alive]
        told = ray.get(asked, timeout=AGENT_SECONDS)
        return [
            Machine(cores, memory, gpus, name=name)
            for name, (cores, memory, gpus) in zip(alive.values(), told, strict=True)
        ]

    def require(self, models: Mapping[str, str]) -> None:
        """Raises ConfigError if a node lacks a model's folder. models: paths of folders by name."""
        for identifier, node in _alive().items():
            lacking = ray.get(self._agent(identifier).lacking.remote(models), timeout=AGENT_SECONDS)
            for name, path in lacking.items():
                raise ConfigError(
                    f"models.{name}: node {node} has no folder {path}; the same path on all nodes is right"
                )

    def _keeper(self, identifier: str, name: str) -> tuple[str, str]:
        """Returns the address of a node's keeper, or an empty one and why there is none."""
        seconds = AGAIN_SECONDS if identifier in self._known else AGENT_SECONDS
        order = KeeperOrder(host=name, secret=self.secret, identity=self.identity, fleet=self._fleet)
        try:
            asked = self._agent(identifier).keeper.remote(msgspec.json.encode(order))
            return str(ray.get(asked, timeout=seconds)), ""
        except (RayError, RuntimeError, ValueError) as error:
            cause = getattr(error, "cause", None) or error  # what the agent has raised
            return "", " ".join(str(cause).split())[:300] or type(cause).__name__

    def _agent(self, identifier: str) -> Any:
        """Returns the agent on a node, which is started if there is none."""
        return (
            ray.remote(NodeAgent)
            .options(
                name=f"agent-{self._fleet}-{identifier}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=-1,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(identifier, soft=False),
            )
            .remote()
        )

    async def end(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends the agents, and this process's connection to the cluster, unless that is done."""
        if not ray.is_initialized():
            return
        for identifier in _alive():
            ray.kill(self._agent(identifier))
        ray.shutdown()


def _was_stopped(identifier: str) -> bool:
    """Returns whether a node that is not alive any more was told to end, as `ray stop` does."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == identifier and node["DeathReason"] != _CRASHED for node in nodes)


def _alive() -> dict[str, str]:
    """Returns the nodes that are there: their addresses by Ray's ids of them."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}

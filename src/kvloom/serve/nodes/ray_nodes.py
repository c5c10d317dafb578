"""The nodes of a Ray cluster, as hosts of a fleet.

Ray tells which nodes there are, and starts an agent on each, which starts the node's keeper. Nothing else
goes through Ray: neither orders to keepers, nor requests, tokens, K and V.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvloom.config.machine import Machine
from kvloom.serve.nodes.agent import KeeperOrder, NodeAgent
from kvloom.serve.nodes.attach import Joins, NodeProblem, ResourceBundle
from kvloom.serve.nodes.home import FleetOrder
from kvloom.serve.nodes.reach import require_head
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError

NAMESPACE: Final = "kvloom"
FIRST_SECONDS: Final = 10.0  # for all nodes to answer first
LOOK_SECONDS: Final = 1.0  # between two looks at which nodes there are
AGENT_SECONDS: Final = 60.0  # for an agent to start the node's keeper
MOST_ASKED: Final = 32  # nodes, at the same time
END_SECONDS: Final = 15.0  # for agents to end what keepers are left
RESERVE_SECONDS: Final = 5.0  # for Ray to set apart what a unit takes
_ON: Final = 0.001  # of a node's own resource, by which an actor or a group is bound to it


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this process to a Ray cluster for the time of the block. address: `HOST:PORT` of its head, or
    `auto` for the cluster that runs on this host. Raises ConfigError with one line if that cannot be done."""
    if address != "auto":
        require_head(address, f"--cluster {address}")
    # Ray would say each time that it uses its token, which is as it should be.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"--cluster {address}: no Ray cluster can be reached, or it has another token than this host; "
            "`kvloom cluster start --head` starts one, and HOST:PORT of a head is right"
        ) from error
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"--cluster {address}: {' '.join(str(error).split())[:400]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> list[Machine]:
    """Returns the memory, cores and GPUs of the cluster's nodes. Raises ConfigError if a node does not tell
    them."""
    alive = _alive()
    told = _asked([_agent(identifier).machine.remote() for identifier in alive])
    return [
        Machine(cores, memory, gpus, name=name)
        for name, (cores, memory, gpus) in zip(alive.values(), told, strict=True)
    ]


def require(models: Mapping[str, str], gateways: Collection[str], needs: Mapping[str, str]) -> None:
    """Raises ConfigError if a node lacks a model's folder or file, or one of those with a gateway what
    gateways need. models: paths by name; gateways: nodes; needs: paths by key."""
    alive = _alive()
    checkpoints = {f"models.{name}": path for name, path in models.items()}
    wanted = [checkpoints | dict(needs if node in gateways else {}) for node in alive.values()]
    told = _asked([_agent(one).lacking.remote(paths) for one, paths in zip(alive, wanted, strict=True)])
    for node, lacking in zip(alive.values(), told, strict=True):
        for key, path in lacking.items():
            kind = "file " if Path(path).is_file() else "folder "
            what, which = (kind, "all nodes") if key in checkpoints else ("", "each node with a gateway")
            raise ConfigError(f"{key}: node {node} has no {what}{path}; the same path on {which} is right")


def own_address() -> str:
    """Returns the address by which the cluster knows this host."""
    return _alive()[ray.get_runtime_context().get_node_id()]


def keep_controller(order: FleetOrder, actor: type) -> str:
    """Lets an actor on this host keep the fleet's controller alive, and returns the path of the controller's
    socket. Raises ConfigError if it does not start."""
    # Ray gives each node a resource of its own, by which this actor comes to its host again.
    there = {"resources": {f"node:{order.node}": _ON}}
    kept = _detached(f"controller-{order.fleet}", actor, there).remote(msgspec.json.encode(order))
    try:
        return str(ray.get(kept.address.remote(), timeout=AGENT_SECONDS))
    except (RayError, RuntimeError) as error:
        ray.kill(kept)
        raise ConfigError(_why(error)) from error


class RayNodes:
    """Tells a fleet's controller which nodes a cluster has, and lets a keeper run on each."""

    def __init__(self, order: FleetOrder, clock: Clock) -> None:
        self._order = order
        self._clock = clock
        self._known: dict[str, str] = {}  # node's name by Ray's id of it
        self._problems: dict[str, str] = {}  # what was told of nodes without a keeper
        # A node that is lost takes a thread for long.
        self._asking = ThreadPoolExecutor(MOST_ASKED, "keepers")
        self._tried: set[str] = set()  # units for which something may be set apart
        self._reserved: dict[str, ResourceBundle] = {}
        self._lacking: dict[str, NodeProblem] = {}  # by the unit for which Ray sets nothing apart

    async def follow(self, joins: Joins, looked: Callable[[], None]) -> None:
        """Tells of the nodes that come and go, and once of each problem, until it is cancelled. looked: is
        called once the nodes that there are have been told. A node that is slow holds up no other one."""
        async with asyncio.TaskGroup() as tasks:
            asking: dict[str, asyncio.Task[None]] = {}
            first = True
            while True:
                alive = await asyncio.to_thread(_alive)
                for identifier in set(self._known) - set(alive):
                    name = self._known.pop(identifier)
                    if name not in alive.values():  # else Ray was started anew there
                        joins.leave(name)
                asking = {identifier: task for identifier, task in asking.items() if not task.done()}
                for identifier in alive.keys() - self._known.keys() - asking.keys():
                    asking[identifier] = tasks.create_task(self._ask(identifier, alive[identifier], joins))
                if first:
                    if asking:
                        await asyncio.wait(asking.values(), timeout=FIRST_SECONDS)
                    looked()
                first = False
                await self._clock.sleep(LOOK_SECONDS)

    async def _ask(self, identifier: str, name: str, joins: Joins) -> None:
        """Asks a node for its keeper."""
        loop = asyncio.get_running_loop()
        address, problem = await loop.run_in_executor(self._asking, self._keeper, identifier, name)
        if address:
            self._known[identifier] = name
            self._problems.pop(name, None)
            joins.join(name, address)
        elif self._problems.get(name) != problem:
            self._problems[name] = problem
            joins.warn(name, f"has no keeper: {problem}; it is tried again")

    def forget(self) -> None:
        """Tells of all nodes anew: another controller is to hear of them."""
        self._known.clear()
        self._problems.clear()
        self._lacking.clear()

    def again(self, name: str) -> None:
        """Asks a node for its keeper again with the next look."""
        self._known = {identifier: node for identifier, node in self._known.items() if node != name}

    async def reserve(self, units: Mapping[str, ResourceBundle]) -> list[NodeProblem]:
        """Sets apart in Ray what units take of their nodes, so that no other job of the cluster is given it,
        and gives back what was set apart for units that are not there any more. Returns what cannot be set
        apart, and why, if that was not returned before. The units run either way. It is called once at a
        time."""
        for unit in self._tried - units.keys():
            await asyncio.to_thread(_release, self._group(unit))
            self._tried.discard(unit)
            self._reserved.pop(unit, None)
        told, self._lacking = self._lacking, {}
        wanted = [unit for unit, bundle in units.items() if self._reserved.get(unit) != bundle]
        for unit in sorted(wanted, key=lambda unit: unit in told):  # Each that Ray lacks takes a while.
            self._tried.add(unit)
            self._reserved.pop(unit, None)
            if problem := await asyncio.to_thread(self._reserve, self._group(unit), units[unit]):
                self._lacking[unit] = NodeProblem(units[unit].node, f"{unit}: {problem}")
            else:
                self._reserved[unit] = units[unit]
        return [problem for unit, problem in self._lacking.items() if told.get(unit) != problem]

    @property
    def lacks(self) -> bool:
        """Returns whether Ray has not set apart all that was wanted."""
        return bool(self._lacking)

    def _group(self, unit: str) -> str:
        return f"{self._order.fleet}-{unit}"

    def _reserve(self, name: str, wanted: ResourceBundle) -> str:
        """Makes a placement group that belongs to no process, so that it outlives each controller. Returns
        why that cannot be done, in one line; nothing if it is."""
        bundle = {"CPU": wanted.cpus, "GPU": wanted.gpus, f"node:{wanted.node}": _ON}
        bundle = {resource: count for resource, count in bundle.items() if count}
        try:
            _release(name)
            group = placement_group([bundle], "STRICT_PACK", name=name, lifetime="detached")
            if group.wait(RESERVE_SECONDS):
                return ""
            remove_placement_group(group)
        except (RayError, RuntimeError, ValueError) as error:
            return f"Ray does not reserve what it takes: {' '.join(str(error).split())[:200]}"
        taken = f"CPUs: {wanted.cpus}" + (f", GPUs: {wanted.gpus}" if wanted.gpus else "")
        return f"Ray has no more of what it takes ({taken}), so another job may have been given it"

    def _keeper(self, identifier: str, name: str) -> tuple[str, str]:
        """Returns the address of a node's keeper, or an empty one and why there is none."""
        fleet = self._order
        order = KeeperOrder(host=name, secret=fleet.secret, identity=fleet.identity, fleet=fleet.fleet)
        try:
            asked = _agent(identifier).keeper.remote(msgspec.json.encode(order))
            return str(ray.get(asked, timeout=AGENT_SECONDS)), ""
        except (RayError, RuntimeError, ValueError) as error:
            return "", _why(error)

    def end(self) -> None:
        """Ends the agents, with keepers that are still there, and gives back what was set apart. Agents of
        another fleet start again when they are asked for."""
        agents = []
        for identifier in _alive():
            with suppress(ValueError):  # There is none.
                agents.append(ray.get_actor(_agent_name(identifier), NAMESPACE))
        with suppress(RayError):  # A keeper ends by itself once nobody gives it a lease.
            ray.get([agent.end.remote(self._order.fleet) for agent in agents], timeout=END_SECONDS)
        for agent in agents:
            ray.kill(agent)
        for group in placement_group_table().values():
            if group["name"].startswith(self._group("")) and group["state"] != "REMOVED":
                _release(group["name"])


def _agent(identifier: str) -> Any:
    """Returns the agent on a node, which is started if there is none."""
    there = {"scheduling_strategy": NodeAffinitySchedulingStrategy(identifier, soft=False)}
    return _detached(_agent_name(identifier), NodeAgent, there).remote()


def _agent_name(identifier: str) -> str:
    return f"agent-{identifier}"


def _detached(name: str, actor: type, there: Mapping[str, Any]) -> Any:
    """Returns a handle that starts an actor, or finds it. The actor outlives the process that has started it,
    and Ray starts it again when it dies. there: the options that say on which node."""
    return ray.remote(actor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        **there,
    )


def _asked(calls: Sequence[Any]) -> list[Any]:
    """Returns the answers of agents. Raises ConfigError."""
    try:
        return list(ray.get(calls, timeout=AGENT_SECONDS))
    except RayError as error:
        raise ConfigError(f"--cluster: a node does not answer: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Returns an actor's error in one line."""
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def _release(group: str) -> None:
    with suppress(ValueError):  # There is none.
        remove_placement_group(get_placement_group(group))


def _alive() -> dict[str, str]:
    """Returns the nodes that are there: their addresses by Ray's ids of them."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}

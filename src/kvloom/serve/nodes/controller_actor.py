"""The actor of Ray that keeps a fleet's controller alive, and tells it of the cluster's nodes.

It is on the controller's host, detached from who has made it, and is started again by Ray whenever it dies.
It gives Ray's key-value store a copy of what the fleet is to be, from which it makes the file anew on a host
that has lost it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from kvloom.serve.nodes.attach import (
    AttachActor,
    KeeperMissed,
    Looked,
    NodeFound,
    NodeGone,
    NodeProblem,
    Over,
    ResourceBundles,
    SpecCopy,
    ToActor,
    attach,
)
from kvloom.serve.nodes.detached import environment_of_ray, find_or_start
from kvloom.serve.nodes.home import FleetHome, FleetOrder
from kvloom.serve.nodes.ray_nodes import NAMESPACE, RayNodes
from kvloom.serve.nodes.wire import Wire
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import KvloomError, Unavailable

CONTROLLER_MODULE: Final = "kvloom.serve.nodes.controller_process"
PAUSE_SECONDS: Final = 1.0  # before a controller that has died is started again


class ControllerActor:
    """Lives until the fleet is ended."""

    def __init__(self, order: bytes) -> None:
        """order: a `FleetOrder` as JSON."""
        self._order = order
        self._address = Future[str]()
        threading.Thread(target=lambda: asyncio.run(self._keep()), daemon=True).start()

    def address(self) -> str:
        """Returns the path of the socket at which the controller is attached to, once it has started. Raises
        RuntimeError with what it has said last if it has ended as it started."""
        return self._address.result()

    async def _keep(self) -> None:
        """Keeps a controller alive until the fleet is ended."""
        kept = KeptController(self._order, WallClock())
        try:
            self._address.set_result(await kept.started())
        except (KvloomError, OSError) as error:
            self._address.set_exception(RuntimeError(str(error)))
            if kept.ended:
                return  # Whoever waits for the address ends this actor.
        await kept.follow()
        ray.kill(ray.get_runtime_context().current_actor)


class KeptController:
    """A controller's process, as the actor sees it."""

    def __init__(self, order: bytes, clock: Clock) -> None:
        self._order = order
        self._told = msgspec.json.decode(order, type=FleetOrder)
        self._home = FleetHome(Path(self._told.folder))
        self._key = f"fleet-{self._told.fleet}".encode()
        self._clock = clock

    @property
    def ended(self) -> bool:
        """Whether the fleet was ended. A host that has lost its files knows nothing of it."""
        return self._home.folder.exists() and self._home.ended

    async def started(self) -> str:
        """Returns where it is attached to; it is started if it does not run. Raises Unavailable if it ends as
        it starts, or the fleet is ended, and ConfigError if the fleet's files cannot be written."""
        if self.ended:
            raise Unavailable("the fleet is ended")
        if not self._home.folder.exists():
            self._home.begin(self._told)
            if spec := await asyncio.to_thread(_internal_kv_get, self._key, namespace=NAMESPACE):
                self._home.spec.write_bytes(spec)
        home, environment = self._home, environment_of_ray()
        return await asyncio.to_thread(
            find_or_start, home.lock, CONTROLLER_MODULE, self._order, home.log, environment
        )

    async def follow(self) -> None:
        """Tells it of nodes, and starts it again when it has died, until the fleet is ended."""
        while not self.ended:
            with suppress(KvloomError, OSError):
                if await self._attached(await attach(await self.started(), ToActor)):
                    break
            await self._clock.sleep(PAUSE_SECONDS)
        await asyncio.to_thread(_internal_kv_del, self._key, namespace=NAMESPACE)

    async def _attached(self, wire: Wire[ToActor]) -> bool:
        """Follows one life of the process. Returns whether the fleet is ended."""
        nodes = RayNodes(self._told, self._clock)
        wire.send(AttachActor())
        told = _Told(wire)
        looking = asyncio.create_task(nodes.follow(told, lambda: wire.send(Looked())))
        try:
            async for message in wire.messages():
                match message:
                    case SpecCopy(content):
                        await asyncio.to_thread(
                            _internal_kv_put, self._key, content, overwrite=True, namespace=NAMESPACE
                        )
                    case ResourceBundles(units):
                        for problem in await nodes.reserve(units):
                            wire.send(problem)
                    case KeeperMissed(name):
                        nodes.again(name)
                    case Over():
                        await asyncio.to_thread(nodes.end)
                        return True
            return False
        finally:
            looking.cancel()
            wire.close()
            await asyncio.wait([looking])


class _Told:
    """Satisfies `Joins` by telling the controller's process."""

    def __init__(self, wire: Wire[ToActor]) -> None:
        self._wire = wire

    def join(self, name: str, address: str) -> None:
        self._wire.send(NodeFound(name, address))

    def leave(self, name: str) -> None:
        self._wire.send(NodeGone(name))

    def warn(self, name: str, problem: str) -> None:
        self._wire.send(NodeProblem(name, problem))

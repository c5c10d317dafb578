"""The actor of Ray that keeps a fleet's controller alive, and tells it of the cluster's nodes.

It is on the controller's host, detached from who has made it, and is started again by Ray whenever it dies.
It gives Ray's key-value store a copy of what the fleet is to be, from which it makes the file anew on a host
that has lost it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import ray
from ray.exceptions import RayError
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
    SignOfLife,
    SpecCopy,
    ToActor,
    attach,
)
from kvloom.serve.nodes.detached import end, environment_of_ray, find_or_start
from kvloom.serve.nodes.home import FleetHome, FleetOrder
from kvloom.serve.nodes.ray_nodes import NAMESPACE, RayNodes
from kvloom.serve.nodes.wire import Message, Wire
from kvloom.types.clock import Clock, WallClock, together
from kvloom.types.errors import KvloomError

CONTROLLER_MODULE: Final = "kvloom.serve.nodes.controller_process"
PAUSE_SECONDS: Final = 1.0  # before a controller that has died is started again
STUCK_PART: Final = 0.5  # of a node's lease, for which a controller may give no sign of life, but at least
LEAST_SECONDS: Final = 5.0
FIRST_SECONDS: Final = 30.0  # for its first one
LATE_SECONDS: Final = 1.0  # for what this process has not read yet, because it stood still itself
SIGN_SECONDS: Final = 1.0  # between two times that it is asked for one
LACKING_SECONDS: Final = 30.0  # before what Ray has not set apart is tried again
_log = logging.getLogger(__name__)


class ControllerActor:
    """Lives until the fleet is ended."""

    def __init__(self, order: bytes) -> None:
        """order: a `FleetOrder` as JSON."""
        self._order = order
        self._address = Future[str]()
        threading.Thread(target=self._keep, daemon=True).start()

    def address(self) -> str:
        """Returns the path of the controller's socket once it has started. Raises RuntimeError with what it
        has said last if it has ended as it started."""
        return self._address.result()

    def _keep(self) -> None:
        """Keeps a controller alive until the fleet is ended, and then ends this actor."""
        try:
            asyncio.run(KeptController(self._order, WallClock()).keep(self._address))
            ray.kill(ray.get_runtime_context().current_actor)
        except Exception:  # noqa: BLE001 -- whatever it is, this actor is of no use any more
            _log.exception("what keeps the fleet's controller has failed; Ray starts it again")
            os._exit(1)


class KeptController:
    """The controller's process, as the actor starts and watches it."""

    def __init__(self, order: bytes, clock: Clock) -> None:
        self._order = order
        self._fleet = msgspec.json.decode(order, type=FleetOrder)
        self._home = FleetHome(Path(self._fleet.folder))
        self._key = f"fleet-{self._fleet.fleet}".encode()
        self._clock = clock
        self._nodes = RayNodes(self._fleet, clock)

    @property
    def ended(self) -> bool:
        """Whether the fleet was ended. A host that has lost its files knows nothing of it."""
        return self._home.folder.exists() and not self._home.has(self._fleet)

    async def keep(self, address: Future[str]) -> None:
        """Starts it, tells it of nodes, and starts it again when it has died, until the fleet is ended.
        address: gets the path of its socket once it has started for the first time, or the reason why it has
        not."""
        while not self.ended:
            try:
                path = await self._started()
                if not address.done():
                    address.set_result(path)
                if await self._followed(await attach(path, ToActor)):
                    break
            except (KvloomError, OSError) as error:
                _log.warning("the fleet's controller: %s", error)
                if not address.done():
                    address.set_exception(RuntimeError(str(error)))
            await self._clock.sleep(PAUSE_SECONDS)
        if not address.done():
            address.set_exception(RuntimeError("the fleet was ended"))
        await asyncio.to_thread(self._nodes.end)
        await asyncio.to_thread(_internal_kv_del, self._key, namespace=NAMESPACE)

    async def _started(self) -> str:
        """Returns the path of its socket; it is started if it does not run. Raises Unavailable if it ends as
        it starts, and ConfigError if the fleet's files cannot be written."""
        if not self._home.folder.exists():
            self._home.begin(self._fleet)
            if spec := await asyncio.to_thread(_internal_kv_get, self._key, namespace=NAMESPACE):
                self._home.spec.write_bytes(spec)
        home, environment = self._home, environment_of_ray()
        return await asyncio.to_thread(
            find_or_start, home.lock, CONTROLLER_MODULE, self._order, home.log, environment
        )

    async def _followed(self, wire: Wire[ToActor]) -> bool:
        """Follows one life of the process. Returns whether the fleet is ended."""
        self._nodes.forget()
        wire.send(AttachActor())
        told, signs = _Told(wire), asyncio.Queue[SignOfLife]()
        wanted, copies = asyncio.Queue[ResourceBundles](), asyncio.Queue[SpecCopy]()
        async with together() as tasks:
            beside = [
                tasks.create_task(self._nodes.follow(told, lambda: wire.send(Looked()))),
                tasks.create_task(self._reserve(wire, wanted)),
                tasks.create_task(self._copy(copies)),
                tasks.create_task(self._watch(wire, signs)),
            ]
            try:
                async for message in wire.messages():
                    match message:
                        case SpecCopy():
                            copies.put_nowait(message)
                        case ResourceBundles():
                            wanted.put_nowait(message)
                        case KeeperMissed(name):
                            self._nodes.again(name)
                        case SignOfLife():
                            signs.put_nowait(message)
                        case Over():
                            return True
            finally:
                wire.close()
                for task in beside:
                    task.cancel()
        return False

    async def _watch(self, wire: Wire[ToActor], signs: asyncio.Queue[SignOfLife]) -> None:
        """Kills the process once it gives no sign of life, because it hangs or was stopped, in time for the
        next one to renew the nodes' leases."""
        patience = FIRST_SECONDS
        while True:
            wire.send(SignOfLife())
            try:
                async with asyncio.timeout(patience):
                    sign = await signs.get()
            except TimeoutError:
                await self._clock.sleep(LATE_SECONDS)
                if signs.empty():
                    _log.warning("the fleet's controller hangs, and is killed")
                    await asyncio.to_thread(end, self._home.lock, 0.0, signal.SIGKILL)
                    return
                sign = signs.get_nowait()
            patience = max(LEAST_SECONDS, STUCK_PART * sign.lease)
            await self._clock.sleep(SIGN_SECONDS)

    async def _copy(self, copies: asyncio.Queue[SpecCopy]) -> None:
        """Gives Ray what came last, which takes as long as Ray's head is away."""
        while True:
            content = (await _latest(copies)).content
            with suppress(RayError, RuntimeError):  # The next one tells it all again.
                await asyncio.to_thread(
                    _internal_kv_put, self._key, content, overwrite=True, namespace=NAMESPACE
                )

    async def _reserve(self, wire: Wire[ToActor], wanted: asyncio.Queue[ResourceBundles]) -> None:
        """Sets apart in Ray what was wanted last, which may take long, and tries again what Ray lacks."""
        latest = ResourceBundles({})
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LACKING_SECONDS if self._nodes.lacks else None):
                    latest = await _latest(wanted)
            for problem in await self._nodes.reserve(latest.units):
                wire.send(problem)


async def _latest(queue: asyncio.Queue[Message]) -> Message:
    """Waits until something was put there, and returns the latest of it."""
    latest = await queue.get()
    while not queue.empty():
        latest = queue.get_nowait()
    return latest


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

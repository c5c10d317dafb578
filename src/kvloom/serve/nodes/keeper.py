"""The keeper of one host: it starts, watches and ends a fleet's engines and gateways there, as the controller
says.

It is a process in a session of its own. The controller may go and come again: what runs meanwhile goes on,
and the next controller is told of it. The engines end when the host's lease is over
(`serve/processes/lease.py`), and the keeper with all that is left if no controller comes for long.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Edited, Ended
from kvloom.cluster.state import is_gateway
from kvloom.config.machine import Machine
from kvloom.config.tls import TlsFiles
from kvloom.serve.local import (
    ENGINE_MODULE,
    Doors,
    Heard,
    LocalLauncher,
    Role,
    StartChild,
    doors,
    gateway_role,
)
from kvloom.serve.nodes.wire import (
    VERSION,
    Begin,
    EndOrder,
    ForgetOrder,
    FromController,
    Granted,
    HeardAt,
    KillOrder,
    LeaseAsked,
    Leaving,
    Logged,
    NodeHere,
    Refused,
    StartGateway,
    StartOrder,
    StopOrder,
    Tell,
    Wire,
)
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.identity import serving_context
from kvloom.serve.processes.lease import leased_time
from kvloom.serve.processes.messages import EngineOrder, GatewayNews, GatewaySpec, Lease, RetireOrder
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.spec import EngineSpec

ASK_SECONDS: Final = 1.0  # between two askings for a lease
ABANDONED_SECONDS: Final = 60.0  # without a controller, once the lease is over; then the keeper ends
BEGIN_SECONDS: Final = 5.0  # for a caller's first words
END_SECONDS: Final = 4.0  # for all processes, once the keeper is to end
_AWAY: Final = "the fleet's controller is away, and takes orders again when it is back; nothing is changed"
_LEFT: Final = "the fleet's controller went before it had answered; see what there is, and ask again"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """The host of a keeper, and the certificate and secrets of its fleet."""

    host: str
    """The address at which others reach this host."""
    folder: Path
    """The fleet's own folder at this host."""
    identity: TlsFiles
    secret: str
    """The secret that callers of engines must know."""
    running: Path
    """The file by which its engines count as running for the host's next keeper."""


class Keeper:
    """Follows the orders of the latest controller."""

    def __init__(
        self,
        place: Place,
        machine: Machine,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        start: StartChild = ChildProcess.start,
    ) -> None:
        """start: starts a process."""
        self._place = place
        self._machine = machine
        self._clock = clock
        self._launcher = LocalLauncher(
            self._role, tasks, clock, hear=self._hear, log=self._logged, start=start
        )
        self._wire: Wire[FromController] | None = None
        self._begin: Begin | None = None
        self._until = 0.0  # the end of the lease
        self._heard_of = clock.now()  # when a controller was last heard of
        self._over = asyncio.Event()
        self._gateways: dict[str, GatewaySpec] = {}  # what each is to be of which something is kept
        self._edits: set[tuple[str, int]] = set()  # gateways' edits that the controller has yet to answer
        self._doors: Doors | None = None  # where the gateways are called, if there is to be one
        self._closing = ExitStack()  # closes the doors

    async def serve(self, ready: Callable[[str], None]) -> None:
        """Serves until a controller says that this is the end, `end` is called, or no controller has come for
        long. ready: called with the address at which it listens. Raises ConfigError if it cannot listen."""
        place = self._place
        try:
            server = await asyncio.start_server(
                self._take, place.host, 0, ssl=serving_context(place.identity)
            )
        except OSError as error:
            raise ConfigError(
                f"the address {place.host} cannot be listened at: {error.strerror}; one of this host is right"
            ) from error
        asking = asyncio.create_task(self._ask_for_leases())
        try:
            ready(f"{place.host}:{server.sockets[0].getsockname()[1]}")
            await self._over.wait()
        finally:
            asking.cancel()
            server.close()
            await self._launcher.end(END_SECONDS)
            await self._launcher.ended()
            self._closing.close()
            if self._wire is not None:
                self._wire.send(Leaving())
                await self._wire.end()

    def end(self) -> None:
        self._over.set()

    # -- controllers ------------------------------------------------------------------------------------

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lets a controller give its orders until it is gone, or a later one comes."""
        wire: Wire[FromController] = Wire(reader, writer, FromController)
        orders = wire.messages()
        try:
            async with asyncio.timeout(BEGIN_SECONDS):
                begin = await anext(orders, None)
            if not isinstance(begin, Begin) or not self._follows(wire, begin):
                return
            async for order in orders:
                if self._wire is not wire:
                    return
                self._heard_of = self._clock.now()
                self._obey(order)
        except (Unavailable, TimeoutError) as error:
            _log.warning("a controller is cut off: %s", error)
        finally:
            if self._wire is wire:
                self._wire = None
                self._give_up_edits()
            wire.close()

    def _follows(self, wire: Wire[FromController], begin: Begin) -> bool:
        """Returns whether this controller's orders are followed from now on."""
        if begin.version != VERSION:
            wire.send(Refused(f"it speaks version {VERSION}, and the controller {begin.version}"))
            return False
        if self._begin is not None and begin.life < self._begin.life:
            wire.send(Refused(f"controller {self._begin.life} has come after controller {begin.life}"))
            return False
        if self._wire is not None:
            self._wire.close()
            self._give_up_edits()
        self._wire, self._begin, self._heard_of = wire, begin, self._clock.now()
        machine = self._machine
        wire.send(
            NodeHere(
                cores=machine.cores,
                memory=machine.memory,
                gpus=machine.gpus,
                running=tuple(self._launcher.running()),
            )
        )
        wire.send(LeaseAsked(leased_time()))
        return True

    def _obey(self, order: object) -> None:
        if self._over.is_set():
            return  # What would start now would not be ended.
        match order:
            case StartOrder(component, generation, engine):
                self._launcher.start(component, generation, engine)
            case StartGateway():
                self._start_gateway(order)
            case Tell(component, news):
                self._tell(component, news)
            case ForgetOrder(component):
                self._forget(component)
            case StopOrder(component):
                self._launcher.stop(component)
            case KillOrder(component):
                self._launcher.kill(component)
            case Granted(asked):
                self._renew(asked)
            case EndOrder():
                self.end()

    # -- gateways ---------------------------------------------------------------------------------------

    def _start_gateway(self, order: StartGateway) -> None:
        """Starts a gateway, or tells that the address at which it is to listen cannot be had."""
        name, spec = order.component, order.gateway
        self._gateways[name] = spec
        try:
            if self._doors is None:
                self._doors = self._closing.enter_context(doors(spec.host, spec.port, self._place.folder))
        except ConfigError as error:
            problem = error.message.partition(";")[0]
            right = "what each node with a gateway can listen at is right"
            self._hear(name, Ended(name, f"{problem} (on {self._place.host}); {right}", refused=True))
        else:
            self._launcher.start(name, order.generation, None)

    def _tell(self, component: str, news: GatewayNews) -> None:
        if isinstance(news, RetireOrder):
            self._launcher.retire(component)
            return
        if isinstance(news, Edited):
            self._edits.discard((component, news.number))
        self._launcher.tell(component, news)

    def _forget(self, component: str) -> None:
        """Nobody may wait at this host for a gateway any more once it is to have none."""
        self._gateways.pop(component, None)
        if not self._gateways:
            self._closing.close()
            self._doors = None

    def _give_up_edits(self) -> None:
        """Tells gateways that nobody will answer their edits."""
        for component, number in self._edits:
            self._refuse(component, number, _LEFT)
        self._edits.clear()

    def _refuse(self, component: str, number: int, why: str) -> None:
        refused = Unavailable(why, retry_after=1).to_wire()
        self._launcher.tell(component, Edited(number, refused=refused))

    # -- leases -----------------------------------------------------------------------------------------

    async def _ask_for_leases(self) -> None:
        while True:
            await self._clock.sleep(ASK_SECONDS)
            if self._wire is not None:
                self._wire.send(LeaseAsked(leased_time()))
            if self._is_abandoned:
                _log.warning("no controller has come for long: this host's part of the fleet ends")
                self.end()

    @property
    def _is_abandoned(self) -> bool:
        lease = 0.0 if self._begin is None else self._begin.lease
        return self._clock.now() - self._heard_of > lease + ABANDONED_SECONDS

    def _renew(self, asked: float) -> None:
        assert self._begin is not None
        self._until = max(self._until, asked + self._begin.lease)
        for found in self._launcher.running():
            if not is_gateway(found.component):  # which have no unit that another process may have elsewhere
                self._launcher.tell(found.component, Lease(self._until))

    # -- processes --------------------------------------------------------------------------------------

    def _role(self, component: str, engine: EngineSpec | None) -> Role:
        place = self._place
        if engine is None:
            assert self._doors is not None
            return gateway_role(
                component,
                self._gateways[component],
                self._doors,
                place.folder,
                place.secret,
                address=place.host,
                identity=place.identity,
            )
        path = str(place.folder / f"{engine.unit}.sock")
        order = EngineOrder(
            spec=replace(engine, transport_host=place.host),
            socket=path,
            secret=place.secret,
            host=place.host,
            identity=place.identity,
            running=str(place.running),
            lease=self._until,
        )
        return Role(engine.unit, ENGINE_MODULE, order, socket=path)

    def _hear(self, component: str, heard: Heard) -> None:
        if isinstance(heard, Edit) and heard.number:
            if self._wire is None:
                self._refuse(component, heard.number, _AWAY)
            else:
                self._edits.add((component, heard.number))
        if isinstance(heard, Ended):
            self._edits = {one for one in self._edits if one[0] != component}
        if self._wire is not None:
            self._wire.send(HeardAt(component, heard))

    def _logged(self, name: str, line: str) -> None:
        if self._wire is not None:
            self._wire.send(Logged(name, line))
        else:
            print(name, line, file=sys.stderr, flush=True)

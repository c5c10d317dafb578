"""`kvloom serve --cluster`: begins a fleet on the nodes of a Ray cluster, or finds it, and shows it.

The fleet is not this process's: if it dies, the fleet stays, and the same command finds it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console

from kvloom.config.file import Settings
from kvloom.config.machine import Machine
from kvloom.serve.local import gateway_paths
from kvloom.serve.nodes import ray_nodes
from kvloom.serve.nodes.attach import AttachView, EndFleet, Over, ToView, attach, show
from kvloom.serve.nodes.controller_actor import ControllerActor
from kvloom.serve.nodes.detached import address_at, end
from kvloom.serve.nodes.home import FleetHome, FleetOrder
from kvloom.serve.nodes.wire import Wire
from kvloom.serve.screen import FleetReady, Screen
from kvloom.serve.supervisor import END_SECONDS, Outcome, heeded, shown
from kvloom.serve.systemd import READY, STOPPING, ServiceManager
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import Unavailable

AGAIN_SECONDS: Final = 60.0  # for a controller that has died to come again
PAUSE_SECONDS: Final = 0.5  # between two looks whether it has


def serve_over(cluster: str, settings: Settings) -> Outcome:
    """Lets a cluster serve a fleet, and shows it until it ends. cluster: as `connected` has it. Returns how
    it ended. Raises ConfigError."""
    signal.signal(signal.SIGTERM, _interrupt)  # until the view heeds it
    with ray_nodes.connected(cluster):  # and no longer, so that Ray's end is not this process's
        home, order, address = _begun(settings, ray_nodes.machines(), ray_nodes.own_address())
    clock = WallClock()
    screen = Screen(Console(highlight=False), clock)
    view = View(screen, clock, home, order, ServiceManager.named_by(os.environ))
    return shown(screen, lambda: asyncio.run(view.run(address)))


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _begun(settings: Settings, machines: Sequence[Machine], node: str) -> tuple[FleetHome, FleetOrder, str]:
    """Returns the fleet's folder and its order, and the path of its controller's socket. A fleet that was
    there before is found. Raises ConfigError."""
    config = settings.config(Machine.together(machines))
    here = {name: model.path for name, model in config.models.items() if Path(model.path).exists()}
    ray_nodes.require(here, config.gateways or (node,), gateway_paths(config))
    home = FleetHome.of(config.port)
    with home.beginning():
        tls = None if config.node_tls is None else config.node_tls.files
        kept, order = home.kept(), home.order(settings, machines, node, tls)
        try:
            return home, order, ray_nodes.keep_controller(order, ControllerActor)
        except BaseException:
            if kept != order:  # It began just now.
                home.end()
                end(home.lock, END_SECONDS)
            raise


class View:
    """Shows a fleet, whose controller may die and come again meanwhile."""

    def __init__(
        self, screen: Screen, clock: Clock, home: FleetHome, order: FleetOrder, manager: ServiceManager
    ) -> None:
        """Lets the screen show lines as the fleet's settings have it."""
        config = order.config()
        screen.show_as(config.log_level, config.log_format)
        self._screen = screen
        self._clock = clock
        self._home = home
        self._order = order
        self._manager = manager
        self._wire: Wire[ToView] | None = None
        self._gives_up = False  # A second signal has come.
        self._end: EndFleet | None = None  # what the controller is to be told

    async def run(self, address: str) -> Outcome:
        """Shows the fleet until it ends. address: the path of its controller's socket. A signal to end ends
        the fleet."""
        for number in heeded():
            asyncio.get_running_loop().add_signal_handler(number, partial(self._order_end, number.name))
        telling = asyncio.create_task(self._manager.keep_told(self._clock))
        try:
            while True:
                if outcome := await self._shown(address):
                    return outcome
                if not self._home.has(self._order):
                    return Outcome(1, "the fleet was ended")
                if self._gives_up:
                    return Outcome(1, f"the fleet has not ended yet (see {self._home.log})")
                self._screen.warn("fleet", "its controller has died; what it has started serves on")
                if not (address := await self._again(address)):
                    return Outcome(
                        1,
                        f"the fleet's controller has not come again in {AGAIN_SECONDS:g} s "
                        f"(see {self._home.log}); the same command starts it",
                    )
        finally:
            telling.cancel()

    def _order_end(self, why: str) -> None:
        if self._end is not None:  # It was told before, and has not ended.
            self._gives_up = True
            if self._wire is not None:
                self._wire.close()
        self._manager.tell(STOPPING)
        self._end = EndFleet(why)
        if self._wire is not None:
            self._wire.send(self._end)

    async def _shown(self, address: str) -> Outcome | None:
        """Shows what one life of the controller tells. Returns how the fleet has ended, if it has."""
        try:
            wire = self._wire = await attach(address, ToView)
        except Unavailable:
            return None
        try:
            wire.send(AttachView())
            if self._end is not None:
                wire.send(self._end)
            async for message in wire.messages():
                show(self._screen, message)
                match message:
                    case FleetReady():
                        self._manager.tell(READY)
                    case Over(code, why):
                        return Outcome(code, why)
        except Unavailable as error:
            self._screen.warn("fleet", error.message)
        finally:
            self._wire = None
            wire.close()
        return None

    async def _again(self, before: str) -> str:
        """Returns the path of the controller's socket once it has come again; nothing if it does not. before:
        the path that it had."""
        until = self._clock.now() + AGAIN_SECONDS
        while (address := address_at(self._home.lock)) in ("", before):
            if self._gives_up or self._clock.now() >= until:
                return ""
            await self._clock.sleep(PAUSE_SECONDS)
        return address

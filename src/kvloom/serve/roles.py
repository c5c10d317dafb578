"""What each process of a fleet is there for, and what it is told."""

from __future__ import annotations

import functools
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvloom.config.config import Config
from kvloom.serve.engines import Engines
from kvloom.serve.health import answers
from kvloom.serve.orders import EngineOrder, GatewayOrder, SchedulerOrder, Standing
from kvloom.serve.supervised import Role
from kvloom.types.spec import EngineSpec, SchedulerSpec

ENGINE: Final = "kvloom.serve.engine_process"
GATEWAY: Final = "kvloom.serve.gateway_process"
SCHEDULER: Final = "kvloom.serve.scheduler_process"


class Roles:
    """Of one fleet. All of its processes share a secret that is made here. listener: where clients connect.
    folder: for sockets, theirs alone."""

    def __init__(self, config: Config, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._listener = listener
        self._folder = folder
        self._secret = secrets.token_urlsafe(32)
        self._api_keys = dict(config.api_keys())
        self._admin_keys = config.admin_keys()

    def engine(self, spec: EngineSpec) -> Role:
        """A new process serves at the same path, by which the gateway finds it."""
        path = self._socket(spec.unit)
        return Role(
            name=spec.unit,
            module=ENGINE,
            order=lambda: EngineOrder(spec=spec, socket=path, secret=self._secret),
            check=functools.partial(answers, path, self._secret),
        )

    def gateway(self, standing: Callable[[], Standing], engines: Engines) -> Role:
        """standing: what was set until now."""
        return Role(
            name="gateway",
            module=GATEWAY,
            order=lambda: self._gateway_order(standing(), engines),
            inherit=[self._listener.fileno()],
            held=True,
        )

    def scheduler(self, spec: SchedulerSpec) -> Role:
        order = SchedulerOrder(spec=spec, gateway=self.url, secret=self._secret, folder=str(self._folder))
        return Role(name="scheduler", module=SCHEDULER, order=lambda: order, spare=True)

    @property
    def url(self) -> str:
        """Of the gateway, from this machine."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _gateway_order(self, standing: Standing, engines: Engines) -> GatewayOrder:
        specs = tuple(engines.specs.values())
        scheduled = self._config.scheduler_for(specs) is not None
        leaving = {unit: given for unit, given in standing.leaving.items() if unit not in engines.away}
        return GatewayOrder(
            engines={spec.unit: f"unix://{self._socket(spec.unit)}" for spec in specs},
            specs=specs,
            away=engines.away,
            groups=dict(self._config.groups),
            memory=self._config.machine.memory,
            cores=self._config.machine.cores,
            secret=self._secret,
            listener=self._listener.fileno(),
            api_keys=self._api_keys,
            admin_keys=self._admin_keys,
            max_body=self._config.max_body,
            program=self._config.program,
            folder=str(self._config.folder),
            sockets=str(self._folder),
            drain=self._config.drain,
            patience=self._config.patience,
            beside=("scheduler", "gateway") if scheduled else ("gateway",),
            standing=replace(standing, leaving=leaving),
        )

    def _socket(self, unit: str) -> str:
        return str(self._folder / f"{unit}.sock")

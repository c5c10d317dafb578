"""The files of a fleet of several hosts, on the host of its controller: the settings with which it was begun,
its present specification, and its controller's address.

They last until the fleet is ended, so that a controller that comes again, after its process, Ray or the host
has died, goes on with the fleet that there was.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.config.config import Config
from kvloom.config.file import Settings
from kvloom.config.machine import Machine
from kvloom.config.tls import TlsFiles
from kvloom.serve.nodes.detached import address_at
from kvloom.serve.processes.identity import FleetIdentity
from kvloom.types.errors import ConfigError
from kvloom.types.files import replacing

STATE: Final = "XDG_STATE_HOME"
"""The variable that names the folder for such files, which is `~/.local/state` otherwise."""


def state_folder() -> Path:
    """Returns the folder of this user for what outlives a process, and a host's temporary files."""
    return Path(os.environ.get(STATE) or Path.home() / ".local" / "state") / "kvloom"


class FleetOrder(Struct, frozen=True, kw_only=True):
    """Tells a fleet's controller all that it needs."""

    settings: Settings
    machines: tuple[Machine, ...]
    """The memory, cores and GPUs that the nodes had as the fleet began."""
    node: str
    """The node of the controller."""
    folder: str
    """The fleet's own folder, that of a `FleetHome`."""
    secret: str
    """The secret that the fleet's processes tell each other."""
    identity: FleetIdentity

    @property
    def fleet(self) -> str:
        """Returns a name that no other fleet has."""
        return hashlib.sha256(self.secret.encode()).hexdigest()[:12]

    def config(self) -> Config:
        """Raises ConfigError."""
        return self.settings.config(Machine.together(self.machines))


class FleetHome:
    """A fleet's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "spec.json"
        """The file that keeps the fleet's present specification."""
        self.lock = folder / "controller"
        """The file that the controller's process locks, and in which it writes where it listens."""
        self.log = folder / "controller.log"
        self._order = folder / "order.json"

    @classmethod
    def of(cls, port: int) -> FleetHome:
        """Returns the folder of the fleet that is served at a port from this host."""
        return cls(state_folder() / "fleets" / str(port))

    @classmethod
    def all(cls) -> list[FleetHome]:
        """Returns the folders of all fleets that were served from this host."""
        return [cls(folder) for folder in cls.of(0).folder.parent.glob("*")]

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Lets nobody else begin a fleet here during the block. Raises ConfigError if the folder cannot be
        made."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def order(
        self,
        settings: Settings,
        machines: Sequence[Machine],
        node: str,
        tls: TlsFiles | None = None,
    ) -> FleetOrder:
        """Returns the order of the fleet that was begun with these settings and has not been ended, or that
        of a new one. tls: the certificate of a new one and its key; left out, they are made. Raises
        ConfigError if a fleet with others is served, or nothing can be kept."""
        kept = self.kept()
        if kept is not None and kept.node == node and _same(kept.settings, settings):
            return kept
        if address_at(self.lock):
            raise ConfigError(
                f"port: a fleet of another config is served at it (see {self.log}); `kvloom serve` with that "
                "config and Ctrl-C end it, or another port is right"
            )
        order = FleetOrder(
            settings=settings,
            machines=tuple(machines),
            node=node,
            folder=str(self.folder),
            secret=secrets.token_urlsafe(32),
            identity=FleetIdentity.make() if tls is None else FleetIdentity.read(tls),
        )
        self.end()
        self.begin(order)
        return order

    def begin(self, order: FleetOrder) -> None:
        """Keeps the order. Raises ConfigError if it cannot."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._order) as file:
                file.write(msgspec.json.encode(order))
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.folder}: the fleet's order cannot be written ({error.strerror}); a folder with room is "
            f"right, which {STATE} names"
        )

    def has(self, order: FleetOrder) -> bool:
        """Returns whether this fleet was begun here, and has not been ended."""
        kept = self.kept()
        return kept is not None and kept.secret == order.secret

    def end(self) -> None:
        """Removes all that is kept of the fleet, except the log of its controller."""
        for path in (self._order, self.spec, self.lock):
            with suppress(OSError):
                path.unlink()

    def kept(self) -> FleetOrder | None:
        """Returns the order of the fleet that was begun here and has not been ended, if there is one."""
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._order.read_bytes(), type=FleetOrder)
        return None


def _same(one: Settings, other: Settings) -> bool:
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")

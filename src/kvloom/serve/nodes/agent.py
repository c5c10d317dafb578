"""The agent of one node: an actor of Ray that starts the node's keeper, or finds the one that runs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.config.machine import Machine
from kvloom.serve.processes.identity import FleetIdentity

# The shell ends at once, so that the keeper is nobody's child. It gives the null device to what it leaves in
# the background, so the order comes by another descriptor.
_DETACHED: Final = 'exec 3<&0; "$@" <&3 3<&- &'


class KeeperOrder(Struct, frozen=True, kw_only=True):
    """Tells a keeper where it is, and with what it knows its fleet."""

    host: str
    """The address at which others reach this host."""
    secret: str
    identity: FleetIdentity
    fleet: str
    """Names the fleet among those that this host may have a part of."""


class NodeAgent:
    """Lives as long as Ray lets it. A keeper outlives it, and the next agent finds that."""

    def keeper(self, order: bytes) -> str:
        """Returns the address of this node's keeper, which is started if none runs. order: a `KeeperOrder` as
        JSON. Raises RuntimeError if it does not start."""
        told = msgspec.json.decode(order, type=KeeperOrder)
        if address := found(told.fleet):
            return address
        path = place(told.fleet).with_suffix(".log")
        with path.open("wb") as log:
            process = subprocess.Popen(
                [
                    "sh",
                    "-c",
                    _DETACHED,
                    "sh",
                    sys.executable,
                    "-P",
                    "-m",
                    "kvloom.serve.nodes.keeper_process",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )
        said, _ = process.communicate(order + b"\n")
        address = said.decode().strip()
        if not address:
            lines = path.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"the node's keeper has ended as it started: {lines[-1] if lines else path}")
        return address

    def lacking(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Returns those files and folders that this node does not have, or that cannot be read. paths: by
        key."""
        return {key: path for key, path in paths.items() if not os.access(path, os.R_OK)}

    def machine(self) -> tuple[int, int, int]:
        """Returns what this node has, as `Machine` does."""
        here = Machine.here()
        return here.cores, here.memory, here.gpus


def place(fleet: str) -> Path:
    """Returns the file that a running keeper of the fleet has locked, and in which its address stands."""
    return Path(tempfile.gettempdir(), f"kvloom-keeper-{os.getuid()}-{fleet}")


def found(fleet: str) -> str:
    """Returns the address of the keeper that runs here; nothing if none does."""
    try:
        file = os.open(place(fleet), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # It is alive.
        return os.read(file, 1 << 10).decode().strip()
    else:
        return ""
    finally:
        os.close(file)


def _environment() -> dict[str, str]:
    """Returns the environment with which Ray was started on this node, and not what Ray has added for its
    workers, as bounds on threads and devices."""
    raw = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="surrogateescape")
    pairs = (line.partition("=") for line in raw.split("\0") if "=" in line)
    return {name: value for name, _, value in pairs if not name.startswith("RAY_")}

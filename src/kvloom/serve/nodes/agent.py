"""The agent of one node: an actor of Ray that starts the node's keeper, or finds the one that runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.config.machine import Machine
from kvloom.serve.nodes.detached import end, environment_of_ray, find_or_start
from kvloom.serve.nodes.home import state_folder
from kvloom.serve.processes.identity import FleetIdentity
from kvloom.types.errors import Unavailable

KEEPER_MODULE: Final = "kvloom.serve.nodes.keeper_process"
KEEPER_SECONDS: Final = 10.0  # for a keeper to end


class KeeperOrder(Struct, frozen=True, kw_only=True):
    """The order to a keeper: its host's address, and the secret, the certificate and the name of its
    fleet."""

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
        lock = keeper_lock(msgspec.json.decode(order, type=KeeperOrder).fleet)
        try:
            return find_or_start(lock, KEEPER_MODULE, order, keeper_log(lock), environment_of_ray())
        except Unavailable as error:
            raise RuntimeError(f"the node's keeper has ended as it started: {error.message}") from error

    def end(self, fleet: str) -> None:
        """Ends this node's keeper of a fleet, also one that this agent has just started."""
        end(keeper_lock(fleet), KEEPER_SECONDS)

    def lacking(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Returns those files and folders that this node does not have, or that cannot be read. paths: by
        key."""
        return {key: path for key, path in paths.items() if not os.access(path, os.R_OK)}

    def machine(self) -> tuple[int, int, int]:
        """Returns this node's cores, memory and GPUs, as `Machine` has them."""
        here = Machine.here()
        return here.auto_cores, here.memory, here.gpus


def keeper_lock(fleet: str) -> Path:
    """Returns the file that a running keeper of the fleet has locked on this host, and in which its address
    stands. Other hosts may have the same folder."""
    folder = state_folder() / "keepers"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{fleet}@{platform.node()}"


def keeper_log(lock: Path) -> Path:
    """Returns the file in which a keeper says what is wrong."""
    return lock.with_name(f"{lock.name}.log")


def keeper_locks() -> list[Path]:
    """Returns the files of all keepers that this user has had on this host."""
    return list((state_folder() / "keepers").glob(f"*@{platform.node()}"))

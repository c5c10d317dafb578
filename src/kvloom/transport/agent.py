"""NIXL, as far as the KV plane needs it: an agent that writes into other agents' memory and sends messages.

Sources: `nixl_cu13/_api.py` 1.5.1, and its errors as they came when peers were killed.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvloom.core.arrays import I64
from kvloom.core.errors import ConfigError, Unavailable

Spans = npt.NDArray[np.uint64]  # [n, 3]: address, bytes, device

Transfer = Any  # NIXL's own handle


class Agent:
    """On one thread at a time. Its progress thread stays on, or a peer's write would wait for this unit."""

    def __init__(self, unit: str, address: int, size: int) -> None:
        """address, size: the memory that peers may write to, and that is sent from."""
        try:
            api = importlib.import_module("nixl_cu13._api")
            bindings = importlib.import_module("nixl_cu13._bindings")
        except ImportError as error:
            raise ConfigError(
                f"transport: nixl is not installed here ({error}); pip install 'kvloom[cluster]', or use shm"
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on stdout
        kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
        self._errors = tuple(kind for kind in kinds if issubclass(kind, Exception))
        self.name = f"{unit}-{secrets.token_hex(4)}"
        config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        self._nixl = api.nixl_agent(self.name, config)
        self._memory = self._nixl.register_memory([(address, size, 0, "")], "DRAM")
        self.metadata: bytes = self._nixl.get_agent_metadata()
        self._known: set[str] = set()

    def meet(self, name: str, metadata: bytes) -> None:
        """Raises Unavailable where the agent cannot be reached, or is not called so."""
        if name in self._known:
            return
        try:
            found = self._nixl.add_remote_agent(metadata)
        except self._errors as error:
            raise Unavailable(f"NIXL cannot reach {name}: {error}") from error
        found = found.decode() if isinstance(found, bytes) else str(found)
        self._known.add(found)
        if found != name:
            self.part(found)
            raise Unavailable(f"NIXL reached {found} instead of {name}")

    def part(self, name: str) -> None:
        """Keep nothing of an agent, which may be gone."""
        if name in self._known:
            self._known.remove(name)
            try:
                self._nixl.remove_remote_agent(name)
            except self._errors as error:
                logging.getLogger(__name__).debug("parting from %s: %s", name, error)

    def tell(self, name: str, message: bytes) -> None:
        """Raises Unavailable where it is known that this cannot arrive."""
        try:
            self._nixl.send_notif(name, message)
        except self._errors as error:
            raise Unavailable(f"{name} cannot be reached: {error}") from error

    def heard(self) -> list[tuple[str, bytes]]:
        """Messages since the last call, each agent's in order."""
        news: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        return [(name, message) for name, messages in news.items() for message in messages]

    def write(self, name: str, own: Spans, peer: Spans) -> Transfer:
        """Begin to write; own[i] and peer[i] are of one length. Raises Unavailable."""
        try:
            sides = (self._nixl.get_xfer_descs(spans, "DRAM") for spans in (own, peer))
            transfer = self._nixl.initialize_xfer("WRITE", *sides, name)
            if self._nixl.transfer(transfer) == "ERR":
                raise Unavailable(f"writing to {name} failed")
        except self._errors as error:
            raise Unavailable(f"writing to {name} failed: {error}") from error
        return transfer

    def written(self, name: str, transfer: Transfer) -> bool:
        """Raises Unavailable where it failed. True only once; what it held is given back."""
        state: Literal["DONE", "PROC", "ERR"]
        try:
            state = self._nixl.check_xfer_state(transfer)
            if state != "PROC":
                transfer.release()
        except self._errors as error:
            raise Unavailable(f"writing to {name} failed: {error}") from error
        if state == "ERR":
            raise Unavailable(f"writing to {name} failed")
        return state == "DONE"

    def close(self) -> None:
        for name in list(self._known):
            self.part(name)
        self._nixl.deregister_memory(self._memory)


def spans(starts: I64, sizes: I64) -> Spans:
    return np.stack((starts, sizes, np.zeros_like(starts)), axis=1).astype(np.uint64)

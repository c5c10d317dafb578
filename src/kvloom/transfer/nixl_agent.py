"""NIXL, as far as the KV plane needs it: an agent that writes into other agents' memory and sends messages.

By the bindings under NIXL's Python API 1.5.1 (`nixl_cu13/_api.py`, which is thin): the API leaves no say in
the progress thread's pace, and then that takes a third of a core while nothing happens.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from kvloom.kernels.driver import DriverError
from kvloom.kv.arena import ArenaMemory
from kvloom.transfer.cuda_ipc import CudaEvent, open_driver
from kvloom.types.address import EndpointKind
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.geometry import I64
from kvloom.types.transfer import DeviceEvent

Spans = npt.NDArray[np.uint64]  # [n, 3]: address, bytes, device
Handle = int  # NIXL's, of one write

Segment = Literal["DRAM", "VRAM"]

_log = logging.getLogger(__name__)
_RDMA = Path("/sys/class/infiniband")  # the devices that UCX is to choose from, if there are any
_SIOCGIFADDR = 0x8915  # netdevice(7)
_PACE = 200  # microseconds between two looks of the progress thread


class NixlEndpoint(Struct, frozen=True, array_like=True):
    """The address of an endpoint of kind `nixl` or `nixl-cuda`: its agent, and the beginning of its arena in
    its own memory, which is the host's, or that of its GPU `index`."""

    agent: str
    metadata: bytes
    index: int
    address: int
    blocks: int
    block_bytes: int
    staging: int = 0
    """The address at which its staging buffer begins; 0 if it has none."""
    half: int = 0
    """Bytes of half a window there."""


class NixlProbe(NamedTuple):
    """A write into the sink of a peer, by which somebody measures how long it takes."""

    where: NixlEndpoint
    sizes: I64
    """[n], of its descriptors"""
    done: Future[None]
    """Raises Unavailable; if it is cancelled, nothing is written any more."""


class ArenaPlace(Protocol):
    """The memory that a unit's arena lies in, as NIXL has to know it."""

    @property
    def kind(self) -> EndpointKind:
        """The endpoint's kind; units of one kind exchange K and V."""

    @property
    def segment(self) -> Segment:
        """NIXL's name of the memory."""

    @property
    def index(self) -> int:
        """The memory's number in its segment."""

    @property
    def piece(self) -> int:
        """Bytes that are written at once."""

    @property
    def progress(self) -> bool:
        """Whether a thread of NIXL's own looks for what comes; without it what comes waits for the plane's
        thread."""

    def enter(self) -> None:
        """Prepares the calling thread for calls to NIXL. Raises ConfigError."""

    def mark(self) -> DeviceEvent | None:
        """Returns the point up to which this thread has asked the device for something; None if there is
        nothing to wait for. Raises RuntimeError."""


class HostPlace:
    """The `ArenaPlace` of an arena in the host's memory."""

    kind: EndpointKind = "nixl"
    segment: Segment = "DRAM"
    index = 0
    progress = True

    def __init__(self, piece: int = 1 << 20) -> None:
        self.piece = piece

    def enter(self) -> None:
        pass

    def mark(self) -> DeviceEvent | None:
        return None


class GpuPlace:
    """The `ArenaPlace` of an arena in a GPU's memory.

    UCX takes the CUDA transports, and with them NVLink, only on threads with a current context (vLLM's pull
    request 36475). A progress thread of NIXL 1.5.1 has none, and dies of that (NIXL's issue 2102): so there
    is none, and the plane's own thread, which has one, looks often enough.
    """

    kind: EndpointKind = "nixl-cuda"
    segment: Segment = "VRAM"
    progress = False

    def __init__(self, device: torch.device, piece: int = 8 << 20) -> None:
        """Raises ConfigError if the driver cannot be used."""
        self.index: int = device.index
        self.piece = piece
        self._device = device
        self._driver = open_driver()

    def enter(self) -> None:
        try:
            self._driver.enter(self.index)
        except DriverError as error:
            raise ConfigError(f"transport: GPU {self.index} cannot be used: {error}") from error

    def mark(self) -> DeviceEvent:
        with torch.cuda.device(self._device):
            return CudaEvent()


def place_of(arena: ArenaMemory) -> ArenaPlace:
    """Raises ConfigError."""
    device = arena.bytes.device
    return HostPlace() if device.type == "cpu" else GpuPlace(device)


class Agent:
    """NIXL's agent of one unit, on one thread at a time, which has entered its place."""

    def __init__(
        self, unit: str, memory: Sequence[tuple[int, int]], place: ArenaPlace, host: str = ""
    ) -> None:
        """memory: the addresses and sizes of what peers may write to, and what is sent from. host: as of
        `interface_of`. Raises ConfigError if NIXL is not there, or cannot use this memory."""
        for name, value in _settings(host).items():
            os.environ.setdefault(name, value)  # UCX is told nothing in any other way
        try:
            nixl: Any = importlib.import_module("nixl_cu13._bindings")
        except ImportError as error:
            raise ConfigError(
                f"transport: nixl is not installed here ({error}); "
                "pip install '.[cluster]' in kvloom's checkout, or use shm"
            ) from error
        self._nixl = nixl
        kinds = [kind for kind in vars(nixl).values() if isinstance(kind, type)]
        self._errors = tuple(kind for kind in kinds if issubclass(kind, Exception))
        self.name = f"{unit}-{secrets.token_hex(4)}"
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = place.progress, _PACE
        self._agent = nixl.nixlAgent(self.name, config)
        try:
            self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise ConfigError(f"transport: NIXL cannot use UCX here: {error}") from error
        self._segment = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}[place.segment]
        self._memory = nixl.nixlRegDList(self._segment, [(*part, place.index, "") for part in memory])
        try:
            self._agent.registerMem(self._memory, [])
        except self._errors as error:
            hint = "; its UCX has to be built for GPUs" if place.segment == "VRAM" else ""
            raise ConfigError(
                f"transport: NIXL cannot use this unit's {place.segment}, {memory[0][1]:,} bytes: "
                f"{error}{hint}"
            ) from error
        self.metadata: bytes = self._agent.getLocalMD()
        self._known: set[str] = set()

    def meet(self, name: str, metadata: bytes) -> None:
        """Raises Unavailable if the agent cannot be reached, or is not called so."""
        if name in self._known:
            return
        try:
            found = self._agent.loadRemoteMD(metadata)
        except self._errors as error:
            raise Unavailable(f"NIXL cannot reach {name}: {error}") from error
        found = found.decode() if isinstance(found, bytes) else str(found)
        self._known.add(found)
        if found != name:
            self.part(found)
            raise Unavailable(f"NIXL reached {found} instead of {name}")

    def part(self, name: str) -> None:
        """Keeps nothing of an agent, which may be gone."""
        if name in self._known:
            self._known.remove(name)
            try:
                self._agent.invalidateRemoteMD(name)
            except self._errors as error:
                _log.debug("parting from %s: %s", name, error)

    def tell(self, name: str, message: bytes) -> None:
        """Raises Unavailable if it is known that this cannot arrive, as to one that was never met, or that
        was parted from since."""
        try:
            self._agent.genNotif(name, message)
        except self._errors as error:
            raise Unavailable(f"{name} cannot be reached: {error}") from error

    def heard(self) -> list[tuple[str, bytes]]:
        """Returns the messages since the last call, each agent's in order."""
        news: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        return [(name, message) for name, messages in news.items() for message in messages]

    def write(self, name: str, own: Spans, peer: Spans) -> Handle:
        """Begins to write; own[i] and peer[i] are of one length, and both lie in places of one kind. Raises
        Unavailable."""
        nixl = self._nixl
        try:
            sides = (nixl.nixlXferDList(self._segment, spans) for spans in (own, peer))
            handle: int = self._agent.createXferReq(nixl.NIXL_WRITE, *sides, name, b"", [])
        except self._errors as error:
            raise Unavailable(f"writing to {name} cannot begin: {error}") from error
        try:
            self._agent.postXferReq(handle, b"")
        except self._errors as error:
            self.drop(handle)
            raise Unavailable(f"writing to {name} failed: {error}") from error
        return handle

    def written(self, name: str, handle: Handle) -> bool:
        """Raises Unavailable if it failed."""
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors as error:
            raise Unavailable(f"writing to {name} failed: {error}") from error
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise Unavailable(f"writing to {name} failed: {status}")
        return bool(status == self._nixl.NIXL_SUCCESS)

    def drop(self, handle: Handle) -> None:
        """Gives back what a write holds; one that is under way is ended."""
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            _log.debug("dropping a write: %s", error)

    def close(self) -> None:
        """Ends the agent with its threads, of which none must outlive the interpreter. Nothing else may be
        called any more."""
        for name in list(self._known):
            self.part(name)
        self._agent.deregisterMem(self._memory, [])
        self._agent = None


def _settings(host: str) -> dict[str, str]:
    """Returns the settings of UCX and NIXL for those that the operator has not set. Left to itself UCX offers
    all interfaces to peers, also those that lead nowhere. It says nothing of what this unit says itself."""
    quiet = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
    name = "" if _RDMA.is_dir() and any(_RDMA.iterdir()) else interface_of(host)
    return quiet | ({"UCX_NET_DEVICES": name} if name else {})


def interface_of(host: str) -> str:
    """Returns the network interface that has this address; nothing for a loopback address, for one that is
    not of this host, and for one of IPv6."""
    try:
        wanted = socket.inet_aton(host)
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if found[20:24] == wanted and name != "lo":
                    return name
    return ""


def spans(starts: I64, sizes: I64, index: int) -> Spans:
    return np.stack((starts, sizes, np.full_like(starts, index)), axis=1).astype(np.uint64)

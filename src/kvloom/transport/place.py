"""Where a unit's arena lies, as NIXL has to know it."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from kvloom.kernels.driver import DriverError
from kvloom.kv.arena import Store
from kvloom.transport.cuda import open_driver
from kvloom.transport.marks import CudaMark, Mark, Passed
from kvloom.types.errors import ConfigError
from kvloom.types.transfer import Kind

Segment = Literal["DRAM", "VRAM"]


class Place(Protocol):
    """kind: of the endpoint; units of one kind exchange K and V. segment, index: NIXL's names of the memory.
    piece: bytes of one transfer. progress: whether a thread of NIXL's own looks for what comes; without it
    what comes waits for the plane's thread."""

    @property
    def kind(self) -> Kind: ...

    @property
    def segment(self) -> Segment: ...

    @property
    def index(self) -> int: ...

    @property
    def piece(self) -> int: ...

    @property
    def progress(self) -> bool: ...

    def enter(self) -> None:
        """On each thread that calls NIXL, before it does. Raises ConfigError."""

    def mark(self) -> Mark:
        """What this thread has asked the device for, up to now. Raises RuntimeError."""


class HostPlace:
    """Satisfies Place for the host's memory."""

    kind: Kind = "nixl"
    segment: Segment = "DRAM"
    index = 0
    progress = True

    def __init__(self, piece: int = 1 << 20) -> None:
        self.piece = piece

    def enter(self) -> None:
        pass

    def mark(self) -> Mark:
        return Passed()


class GpuPlace:
    """Satisfies Place for a GPU's memory.

    UCX takes the CUDA transports, and with them NVLink, only on threads with a current context (vLLM's pull
    request 36475). A progress thread of NIXL 1.5.1 has none, and dies of that (NIXL's issue 2102): so there
    is none, and the plane's own thread, which has one, looks often enough.
    """

    kind: Kind = "nixl-cuda"
    segment: Segment = "VRAM"
    progress = False

    def __init__(self, device: torch.device, piece: int = 8 << 20) -> None:
        """Raises ConfigError where the driver cannot be used."""
        self.index: int = device.index
        self.piece = piece
        self._device = device
        self._driver = open_driver()

    def enter(self) -> None:
        try:
            self._driver.enter(self.index)
        except DriverError as error:
            raise ConfigError(f"transport: GPU {self.index} cannot be used: {error}") from error

    def mark(self) -> Mark:
        with torch.cuda.device(self._device):
            return CudaMark()


def place_of(arena: Store) -> Place:
    """Raises ConfigError."""
    device = arena.bytes.device
    return HostPlace() if device.type == "cpu" else GpuPlace(device)

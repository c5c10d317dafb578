"""Points in what a thread has asked a device for, after which blocks may be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvloom.types.transfer import Parcel


class Mark(Protocol):
    """A point in what a thread has asked the device for."""

    def wait(self) -> None:
        """Until what is before it is done; raises RuntimeError where that failed."""

    def done(self) -> bool:
        """Whether what is before it is done; raises RuntimeError where that failed."""


class CudaMark:
    """Satisfies Mark, for the calling thread's current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Passed:
    """Satisfies Mark where all is done by the time it is asked for."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class MarkedParcel(Parcel):
    """A parcel whose blocks may still have to be written by what is before the mark."""

    mark: Mark

    @staticmethod
    def of(parcel: Parcel, mark: Mark) -> MarkedParcel:
        return MarkedParcel(parcel.own, parcel.peer, parcel.offsets, parcel.counts, mark)

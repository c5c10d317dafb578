"""The CUDA driver, called through cuda-bindings for what torch does not offer: partitions and memory for
peers."""

from __future__ import annotations

import ctypes
import importlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

OLDEST_BINDINGS: Final = (12, 9)  # as the extra `gpu` has them in pyproject.toml
BEYOND_BINDINGS: Final = (14,)


class DriverError(Exception):
    """The driver, or its bindings, cannot do what was asked; the text says what, and the driver's reason."""


class Driver:
    """Calls functions of the driver by their names, `driver("cuDeviceGet", 0)`, and returns what they return,
    without the status.

    Most want the primary context of a device to be current in the calling thread: see `enter`.
    """

    def __init__(self) -> None:
        """Raises DriverError if there are no bindings that are known, or no driver."""
        self._contexts: dict[int, Any] = {}
        _refuse_unknown()
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
            self("cuInit", 0)
        except (ImportError, RuntimeError) as error:
            raise DriverError(f"cuda-bindings cannot be used here: {error}") from error

    def enter(self, index: int) -> None:
        """Makes the primary context of GPU `index` the calling thread's. torch sets a thread's device without
        that, until the thread asks the runtime for something. Raises DriverError."""
        if index not in self._contexts:
            number = self("cuDeviceGet", index)
            self._contexts[index] = self("cuDevicePrimaryCtxRetain", number)  # for the process' life
        self("cuCtxSetCurrent", self._contexts[index])

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Returns one result by itself, several as a tuple. Raises DriverError."""
        call = getattr(self.api, name, None)
        if call is None:
            raise DriverError(f"these cuda-bindings have no {name}")
        try:
            status, *results = call(*arguments)
        except (RuntimeError, TypeError) as error:  # the driver lacks the function, or it takes others
            raise DriverError(f"{name}: {error}") from error
        if int(status):
            raise DriverError(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else tuple(results)


def _refuse_unknown() -> None:
    """Raises DriverError for bindings whose names and structs nobody has compared with what is asked here;
    none at all are told of when they are imported."""
    with suppress(PackageNotFoundError):
        found = version("cuda-bindings")
        numbers = tuple(int(one) if one.isdecimal() else 0 for one in found.split(".")[:2])
        if not OLDEST_BINDINGS <= numbers < BEYOND_BINDINGS:
            oldest, beyond = (".".join(map(str, one)) for one in (OLDEST_BINDINGS, BEYOND_BINDINGS))
            raise DriverError(
                f"cuda-bindings {found} are not known here; {oldest} or newer, below {beyond}, is right"
            )


def read_struct(struct: Any, size: int) -> bytes:
    """Returns the first `size` bytes of a driver's struct, which not all bindings let be read as a field."""
    return ctypes.string_at(int(struct.getPtr()), size)


def write_struct(struct: Any, content: bytes) -> None:
    """Sets the first bytes of a driver's struct, which is not to be shorter."""
    ctypes.memmove(int(struct.getPtr()), content, len(content))

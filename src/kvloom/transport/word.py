"""A 32-bit word that two processes share: stored, looked at, and slept on.

Sleeping is by futex, because it needs nothing but the word: no descriptor has to reach the peer (an eventfd
cannot be opened through /proc), it goes with the memory, and the kernel looks at the word itself once more
before the caller sleeps, so no wake is lost. A peer that dies wakes nobody: sleep in bounded slices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from functools import cache
from typing import Any

from kvloom.kernels.signals import SignalArguments, look, spin, swap, tell, try_take
from kvloom.types.errors import ConfigError

MASK = 0xFFFFFFFF
_CALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # of words that processes share


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def futex_number() -> int:
    """Of the system call. Raises ConfigError where this kind of machine has none that is known here."""
    machine = platform.machine()
    if machine not in _CALLS:
        raise ConfigError(f"weave: this machine is {machine}; want one of {', '.join(_CALLS)}")
    return _CALLS[machine]


@cache
def _futex() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = ctypes.c_long(futex_number())

    def futex(address: int, operation: int, value: int, timeout: Any) -> int:
        found: int = call(
            number,
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            ctypes.c_uint32(0),
        )
        return found

    return futex


class Word:
    """At `address`, a multiple of 4, for as long as the caller keeps the memory. Any thread may use it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def get(self) -> int:
        """With acquire order: what its writer stored before is seen from here on."""
        call = SignalArguments(self.address, 0, 0)
        look(call, 1)
        return int(call.value)

    def set(self, value: int) -> None:
        """With release order: who sees it, sees what was stored before."""
        tell(SignalArguments(self.address, value & MASK, 0), 1)

    def swap(self, value: int) -> int:
        """Store, and return what was there; what is read after this is read after the store is seen."""
        call = SignalArguments(self.address, value & MASK, 0)
        swap(call, 1)
        return int(call.value)

    def try_take(self) -> bool:
        """Store 1 where it is 0, and say whether it was."""
        call = SignalArguments(self.address, 0, 0)
        try_take(call, 1)
        return bool(call.value)

    def spin(self, seen: int, spins: int) -> int:
        """Look until it is another than `seen`, `spins` times at most, without the GIL."""
        call = SignalArguments(self.address, seen & MASK, spins)
        spin(call, 1)
        return int(call.value)

    def sleep(self, seen: int, seconds: float) -> None:
        """Until `wake`, at most so long; not at all where it is another than `seen`. May return early."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        if _futex()(self.address, _WAIT, seen & MASK, ctypes.byref(limit)) < 0:
            reason = ctypes.get_errno()
            if reason not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(reason, os.strerror(reason))

    def wake(self) -> None:
        """All who sleep on it."""
        _futex()(self.address, _WAKE, 0x7FFFFFFF, None)

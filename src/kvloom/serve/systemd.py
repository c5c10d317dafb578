"""Tells systemd, or whoever started this process as systemd does, that it serves and that it lives.

The protocol is that of sd_notify(3) and sd_watchdog_enabled(3): datagrams of `KEY=VALUE` lines to the socket
that the environment names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final, Self

from kvloom.types.clock import Clock

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
_SECONDS: Final = 1.0
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """Tells whoever has started this process how it is, if they want to hear of it."""

    def __init__(self, address: str = "", interval: float | None = None) -> None:
        """address: of the socket at which it listens; it begins with @ if it is an abstract one, and is empty
        if nobody listens. interval: seconds between two signs of life; None if none is wanted."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.interval = interval

    @classmethod
    def named_by(cls, environment: MutableMapping[str, str]) -> Self:
        """Returns the one that the environment names, and takes the variables out of it: they are meant for
        this process and not for its children. What is malformed counts as not there."""
        address, usec, pid = (environment.pop(name, "") for name in _VARIABLES)
        meant = pid in ("", str(os.getpid()))
        microseconds = int(usec) if usec.isdecimal() and meant else 0
        if address[:1] not in ("/", "@"):
            address = ""
        return cls(address, microseconds / 2e6 if address and microseconds else None)

    def tell(self, state: str) -> None:
        """Sends a line. If it cannot be sent soon it is lost; a sign of life does not wait at all, because
        another one follows."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.settimeout(0.0 if state == ALIVE else _SECONDS)
            end.sendto(state.encode(), self._address)

    async def keep_told(self, clock: Clock) -> None:
        """Tells again and again that the event loop turns, if that is wanted, until it is cancelled."""
        while self.interval is not None:
            self.tell(ALIVE)
            await clock.sleep(self.interval)

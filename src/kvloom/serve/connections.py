"""How many connections a server holds open: in all, and for each address."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_network
from typing import Final

from uvicorn.server import ServerState

from kvloom.api.access.proxies import is_loopback, is_one_of, network_of

SPARE_FILES: Final = 128
"""Open files that are no connections: libraries, logs, pipes."""
FILES_EACH: Final = 2
"""Open files of a connection: one to the client, and one to the engine that answers."""
RESERVED: Final = 16
"""Connections, of all, that only callers on this machine may have, so that its operator gets in."""


def most_connections() -> int:
    """Returns the number of connections for which this process may open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(8, (files - SPARE_FILES) // FILES_EACH)


class OpenConnections(ServerState):
    """Holds what a server's connections share, and counts them."""

    def __init__(self, each: int, proxies: Iterable[str] = (), most: int | None = None) -> None:
        """each: the connections of one address. An address has no more than half of all, whatever `each` is.
        proxies: addresses and networks that speak for others, and may have all. most: all connections; None
        for as many as there may be open files."""
        super().__init__()
        self._proxies = [ip_network(one) for one in proxies]
        self._most = most_connections() if most is None else most
        self._each = min(each, max(1, self._most // 2))
        self._for_all = self._most - min(RESERVED, self._most // 4)
        self._open: Counter[str] = Counter()
        self._all = 0

    def enter(self, address: str) -> str | None:
        """Counts a connection of an address, which leaves with `leave`. Returns a sentence that says why if
        there may be no further one, and counts nothing then."""
        network, proxy = network_of(address), is_one_of(address, self._proxies)
        if self._all >= (self._most if is_loopback(address) and not proxy else self._for_all):
            return f"{self._all} connections are open, which is the most that this server holds; come again."
        if self._open[network] >= self._each and not proxy:
            return f"{self._each} connections from {network} are open, which is the most for one address."
        self._open[network] += 1
        self._all += 1
        return None

    def leave(self, address: str) -> None:
        """Forgets a connection that `enter` has counted."""
        network = network_of(address)
        self._all -= 1
        self._open[network] -= 1
        if not self._open[network]:
            del self._open[network]

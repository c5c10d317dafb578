"""How many connections a server holds open: in all, and for each address."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Final

from uvicorn.server import ServerState

from kvloom.api.access.proxies import network_of

SPARE_FILES: Final = 128
"""Open files that are no connections: libraries, logs, pipes."""
FILES_EACH: Final = 2
"""Open files of a connection: one to the client, and one to the engine that answers."""


def most_connections() -> int:
    """Returns the number of connections for which this process may open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(8, (files - SPARE_FILES) // FILES_EACH)


class OpenConnections(ServerState):
    """What a server's connections share, with how many there are."""

    def __init__(self, each: int, most: int | None = None) -> None:
        """each: the connections of one address. An address has no more than half of all, whatever `each` is.
        most: all connections; None for as many as there may be open files."""
        super().__init__()
        self._most = most_connections() if most is None else most
        self._each = min(each, max(1, self._most // 2))
        self._open: Counter[str] = Counter()
        self._all = 0

    def enter(self, address: str) -> str | None:
        """Counts a connection of an address, which leaves with `leave`. Returns a sentence that says why if
        there may be no further one, and counts nothing then."""
        network = network_of(address)
        if self._all >= self._most:
            return f"{self._all} connections are open, which is the most that this server holds; come again."
        if self._open[network] >= self._each:
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

"""The hosts that a fleet has for its engines, as the supervisor sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvloom.serve.processes.identity import FleetIdentity


class Joins(Protocol):
    """Hears of hosts, each with the address of its keeper."""

    def join(self, name: str, address: str) -> None: ...

    def leave(self, name: str) -> None: ...


class Cluster(Protocol):
    """Knows which hosts there are, and lets a keeper of the fleet run on each."""

    @property
    def identity(self) -> FleetIdentity: ...

    @property
    def secret(self) -> str: ...

    async def look(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        """Tells of the hosts that have come and gone since the last look. told: called with a host and what
        is wrong with it, once for each problem."""

    async def follow(self, joins: Joins, told: Callable[[str, str], None]) -> None:
        """Looks again and again, until it is cancelled."""

    async def end(self) -> None:
        """Leaves nothing of the fleet with whoever knows the hosts."""

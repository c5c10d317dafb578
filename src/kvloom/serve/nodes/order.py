"""What a keeper is told when it is started."""

from __future__ import annotations

from msgspec import Struct

from kvloom.serve.processes.identity import FleetIdentity


class KeeperOrder(Struct, frozen=True, kw_only=True):
    """Tells a keeper where it is, and with what it knows its fleet."""

    host: str
    """The address at which others reach this host."""
    secret: str
    identity: FleetIdentity
    fleet: str
    """Names the fleet among those that this host may have a part of."""

"""The end of the KV plane of a unit that has none."""

from __future__ import annotations

from kvloom.types.errors import BadRequest
from kvloom.types.transfer import Endpoint, KVAddress, Shipment, Ticket


class Apart:
    """A `Transport` of a tensor-parallel unit, whose K and V lie in several arenas: it takes none and sends
    none. `open` and `ship` raise BadRequest."""

    def __init__(self, unit: str) -> None:
        self.endpoint = Endpoint(unit=unit, kind="shm", where=b"")

    def open(self, begin: int, digest: int) -> Ticket:
        raise self._refusal()

    def received(self, ticket: Ticket) -> int:
        raise self._refusal()

    def close(self, ticket: Ticket) -> bool:
        return True

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Shipment:
        raise self._refusal()

    def close_all(self) -> None:
        """Nothing is open."""

    def _refusal(self) -> BadRequest:
        return BadRequest(
            f"unit {self.endpoint.unit} is tensor-parallel: its K and V are neither sent nor received; a "
            "router program that computes a request at one unit, as data_parallel, is right"
        )

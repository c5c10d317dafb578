"""The thread that copies, and what a shipment is on it."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty

import numpy as np
import numpy.typing as npt

from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.transport.delivery import Delivery
from kvloom.transport.peer import Peer, PeerProcess
from kvloom.transport.room import Room
from kvloom.transport.worker import Worker
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.transfer import Parcel, Ticket

PIECE = 4 << 20  # bytes copied between two looks at the ledger: a millisecond or less
_RETRY = 0.002  # seconds until a shipment that is ahead of another's asks again


class FencedShipment(Delivery):
    """Tokens [begin, end) of a ticket, claimed already, into the memory of a peer with a ledger."""

    def __init__(
        self, plane: Plane, peer: PeerProcess, room: Room, ticket: Ticket, begin: int, end: int
    ) -> None:
        super().__init__(plane.submit)
        self.peer = peer
        self.room = room
        self.ticket = ticket
        self.begin = begin
        self.end = end

    def copy(self, parcel: Parcel) -> None:
        """In pieces, each of which a fence precedes."""
        try:
            self.room.check(parcel)
            rows = max(1, self.piece // self.room.block_bytes)
            for first in range(0, len(parcel.own), rows):
                if self.failure is not None:
                    return
                self._copy(parcel, slice(first, first + rows))
        except KvloomError as error:
            self.fail(error)
        except (OSError, ValueError) as error:
            self.fail(self._failed(error))

    @property
    def piece(self) -> int:
        """Bytes copied between two looks at the ledger."""
        return PIECE

    def _copy(self, parcel: Parcel, piece: slice) -> None:
        self.peer.refuse_gone()
        with self.peer.ledger.writing(self.ticket):
            self._write(parcel, piece)

    def _write(self, parcel: Parcel, piece: slice) -> None:
        """Copy these of the parcel's blocks; they are there when it returns."""
        raise NotImplementedError

    def finish(self) -> bool:
        """Nothing more is copied: tell ledger and sender. False: what goes before is on its way still."""
        failure = self.failure
        try:
            if failure is None:
                self.peer.refuse_gone()
                if not self.peer.ledger.deliver(self.ticket, self.begin, self.end):
                    return False
        except KvloomError as error:
            failure = error
        except OSError as error:
            failure = self._failed(error)
        if failure is None:
            self.settle(None)
        else:
            self.refuse(failure)
        return True

    def refuse(self, error: KvloomError) -> None:
        try:
            with suppress(KvloomError, OSError):
                self.peer.ledger.give_back(self.ticket, self.begin, self.end)
        finally:
            super().refuse(error)

    def _failed(self, error: Exception) -> Unavailable:
        return Unavailable(f"copying to {self.peer.endpoint.unit} failed: {error}")


class ShmShipment(FencedShipment):
    """source: all bytes of this unit's arena."""

    def __init__(
        self,
        source: npt.NDArray[np.uint8],
        plane: Plane,
        peer: Peer,
        room: Room,
        ticket: Ticket,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(plane, peer, room, ticket, begin, end)
        self._source = source
        self._target = peer.memory

    def _write(self, parcel: Parcel, piece: slice) -> None:
        copy_blocks(
            self._source,
            self._target,
            parcel.own[piece],
            parcel.peer[piece],
            parcel.offsets[piece],
            parcel.counts[piece],
            block_bytes=self.room.block_bytes,
            page_tokens=self.room.page_tokens,
            token_bytes=self.room.token_bytes,
        )


class Plane(Worker[PeerProcess]):
    """Copies parcels in the order in which they were put, whatever shipment they are of."""

    def __init__(self) -> None:
        super().__init__("kv-plane")
        self._ended: list[FencedShipment] = []  # all put, but not told: what goes before is on its way
        self._new: list[PeerProcess] = []  # not yet wholly in the page table
        self._start()

    def greet(self, peer: PeerProcess) -> None:
        """Prepare for copies to this peer while there is nothing else to do."""
        self.order(peer)

    def _step(self) -> None:
        """Its variables hold no peer's memory while the thread waits."""
        match self._next():
            case PeerProcess() as peer:
                self._new.append(peer)
            case FencedShipment() as shipment, None:
                self._ended.append(shipment)
            case FencedShipment() as shipment, Parcel() as parcel:
                shipment.copy(parcel)
        for shipment in list(self._ended):
            if shipment.finish():
                self._ended.remove(shipment)

    def _next(self) -> tuple[Delivery, Parcel | None] | PeerProcess | None:
        """None: nothing came."""
        try:
            return self._queue.get(timeout=0 if self._new else _RETRY if self._ended else None)
        except Empty:
            self._new = [peer for peer in self._new if peer.populate()]
            return None

    def _left(self) -> list[Delivery]:
        left: list[Delivery] = [*self._ended]
        self._ended, self._new = [], []
        return left

"""The thread that copies, and what a shipment is on it."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from kvloom.core.address import Ticket
from kvloom.core.errors import KvloomError, Unavailable
from kvloom.core.shipment import Parcel
from kvloom.kernels.block_copy import copy_blocks
from kvloom.transport.delivery import Delivery
from kvloom.transport.peer import Peer
from kvloom.transport.room import Room

PIECE = 4 << 20  # bytes copied between two looks at the ledger: a millisecond or less
_RETRY = 0.002  # seconds until a shipment that is ahead of another's asks again


class ShmShipment(Delivery):
    """Tokens [begin, end) of a ticket, claimed already."""

    def __init__(self, plane: Plane, peer: Peer, room: Room, ticket: Ticket, begin: int, end: int) -> None:
        super().__init__(plane.submit)
        self.peer = peer
        self.room = room
        self.ticket = ticket
        self.begin = begin
        self.end = end

    def copy(self, source: npt.NDArray[np.uint8], parcel: Parcel) -> None:
        """In pieces, each of which a fence precedes."""
        try:
            self.room.check(parcel)
            rows = max(1, PIECE // self.room.block_bytes)
            for first in range(0, len(parcel.own), rows):
                if self.failure is not None:
                    return
                self._copy(source, parcel, slice(first, first + rows))
        except KvloomError as error:
            self.fail(error)
        except (OSError, ValueError) as error:
            self.fail(Unavailable(f"copying to {self.peer.endpoint.unit} failed: {error}"))

    def _copy(self, source: npt.NDArray[np.uint8], parcel: Parcel, piece: slice) -> None:
        self.peer.refuse_gone()
        with self.peer.ledger.writing(self.ticket):
            copy_blocks(
                source,
                self.peer.memory,
                parcel.own[piece],
                parcel.peer[piece],
                parcel.offsets[piece],
                parcel.counts[piece],
                block_bytes=self.room.block_bytes,
                page_tokens=self.room.page_tokens,
                token_bytes=self.room.token_bytes,
            )

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
        if failure is not None:
            with suppress(KvloomError):
                self.peer.ledger.give_back(self.ticket, self.begin, self.end)
        self.settle(failure)
        return True


class Plane:
    """Copies parcels in the order in which they were put, whatever shipment they are of."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        """source: all bytes of this unit's arena."""
        self._source = source
        self._queue: SimpleQueue[tuple[Delivery, Parcel | None] | Peer | None] = SimpleQueue()
        self._ended: list[
            ShmShipment
        ] = []  # those that have not been told, for what goes before is on its way
        self._new: list[Peer] = []  # not yet wholly in the page table
        self._closed = False
        # a daemon: no process waits for it at its end
        self._thread = threading.Thread(target=self._run, name="kv-plane", daemon=True)
        self._thread.start()

    def submit(self, shipment: Delivery, parcel: Parcel | None) -> None:
        self._queue.put((shipment, parcel))
        if self._closed:
            self._refuse_rest()

    def greet(self, peer: Peer) -> None:
        """Prepare for copies to this peer while there is nothing else to do."""
        self._queue.put(peer)

    def close(self) -> None:
        """End the thread. Shipments that have not arrived fail."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._refuse_rest()

    def _run(self) -> None:
        while not self._closed:
            self._step()  # whose variables hold no peer's memory while the thread waits

    def _step(self) -> None:
        match self._next():
            case Peer() as peer:
                self._new.append(peer)
            case ShmShipment() as shipment, None:
                self._ended.append(shipment)
            case ShmShipment() as shipment, Parcel() as parcel:
                shipment.copy(self._source, parcel)
        self._ended = [shipment for shipment in self._ended if not shipment.finish()]

    def _next(self) -> tuple[Delivery, Parcel | None] | Peer | None:
        """None: nothing came."""
        try:
            return self._queue.get(timeout=0 if self._new else _RETRY if self._ended else None)
        except Empty:
            self._new = [peer for peer in self._new if peer.populate()]
            return None

    def _refuse_rest(self) -> None:
        """There is no thread any more: fail what it has left, and what is put from now on."""
        rest, self._ended = self._ended, []
        with suppress(Empty):
            while True:
                match self._queue.get_nowait():
                    case ShmShipment() as shipment, None:
                        rest.append(shipment)
        for shipment in rest:
            shipment.fail(Unavailable("this unit is stopping"))
            shipment.finish()

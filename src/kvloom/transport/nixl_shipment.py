"""A shipment over NIXL, as the plane's thread keeps it."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from kvloom.transport.agent import Spans, Transfer, spans
from kvloom.transport.delivery import Delivery, Submit
from kvloom.transport.marks import MarkedParcel
from kvloom.transport.place import Place
from kvloom.transport.room import Room
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.transfer import Endpoint, Parcel, Ticket


class Where(msgspec.Struct, frozen=True, array_like=True):
    """An endpoint of kind `nixl` or `nixl-cuda`: its agent, and where its arena begins in its own memory: the
    host's, or that of its GPU `index`."""

    agent: str
    metadata: bytes
    index: int
    address: int
    blocks: int
    block_bytes: int


class NixlShipment(Delivery):
    """deadline: until when this may write. asked: when it asked for that, where the answer is out.
    writing: a write has begun, and is not known to have ended."""

    def __init__(
        self,
        submit: Submit,
        place: Place,
        peer: Endpoint,
        where: Where,
        room: Room,
        ticket: Ticket,
        digest: int,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(submit)
        self._place = place
        self.peer, self.where, self.room = peer, where, room
        self.ticket, self.digest, self.begin, self.end = ticket, digest, begin, end
        self.number = -1
        self.pieces: deque[MarkedParcel] = deque()
        self.transfer: Transfer | None = None
        self.asked: float | None = None
        self.deadline = 0.0
        self.granted = self.ended = self.told = self.writing = False

    def put(self, parcel: Parcel) -> None:
        """What is put may be written to before it, on the current stream of the thread that puts it."""
        try:
            mark = self._place.mark()
        except RuntimeError as error:
            self.fail(_failed(error))
            return
        super().put(MarkedParcel.of(parcel, mark))

    # on the transport's thread

    def seal(self) -> None:
        """All that was put has been taken."""
        self.ended = True

    def take(self, parcel: MarkedParcel) -> None:
        try:
            self.room.check(parcel)
        except BadRequest as error:
            self.fail(error)
        rows = max(1, self._place.piece // self.room.block_bytes)
        for first in range(0, len(parcel.own), rows):
            cut = slice(first, first + rows)
            arrays = parcel.own[cut], parcel.peer[cut], parcel.offsets[cut], parcel.counts[cut]
            self.pieces.append(MarkedParcel(*arrays, parcel.mark))

    def computed(self) -> bool:
        """Whether there is a next piece, and it can be sent."""
        try:
            return bool(self.pieces) and self.pieces[0].mark.done()
        except RuntimeError as error:
            self.fail(_failed(error))
            return False

    def spans(self, piece: Parcel, address: int) -> tuple[Spans, Spans]:
        """Own and peer's: a whole block is one, a run of tokens two. address: where the own arena begins."""
        room = self.room
        whole = piece.counts == room.page_tokens
        at = np.where(whole, 0, piece.offsets.astype(np.int64) * room.token_bytes)
        size = np.where(whole, room.block_bytes, piece.counts.astype(np.int64) * room.token_bytes)
        part = ~whole & (size > 0)
        half = room.page_tokens * room.token_bytes
        sides = []
        for base, blocks, index in (
            (address, piece.own, self._place.index),
            (self.where.address, piece.peer, self.where.index),
        ):
            starts = base + blocks.astype(np.int64) * room.block_bytes + at
            starts = np.concatenate((starts[size > 0], starts[part] + half))
            sides.append(spans(starts, np.concatenate((size[size > 0], size[part])), index))
        return sides[0], sides[1]


def _failed(error: RuntimeError) -> Unavailable:
    return Unavailable(f"what is to be sent was not computed: {error}")

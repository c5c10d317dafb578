"""A shipment over NIXL, as the plane's thread keeps it."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from kvloom.core.address import Endpoint, Ticket
from kvloom.core.errors import BadRequest
from kvloom.core.shipment import Parcel
from kvloom.transport.agent import Spans, Transfer, spans
from kvloom.transport.delivery import Delivery, Submit
from kvloom.transport.room import Room

PIECE = 1 << 20  # bytes of one transfer


class Where(msgspec.Struct, frozen=True, array_like=True):
    """An endpoint of kind `nixl`: its agent, and where its arena begins in its own memory."""

    agent: str
    metadata: bytes
    address: int
    blocks: int
    block_bytes: int


class NixlShipment(Delivery):
    """deadline: until when this may write. asked: when it asked for that, where the answer is out.
    writing: a write has begun, and is not known to have ended."""

    def __init__(
        self,
        submit: Submit,
        peer: Endpoint,
        where: Where,
        room: Room,
        ticket: Ticket,
        digest: int,
        begin: int,
        end: int,
    ) -> None:
        super().__init__(submit)
        self.peer, self.where, self.room = peer, where, room
        self.ticket, self.digest, self.begin, self.end = ticket, digest, begin, end
        self.number = -1
        self.pieces: deque[Parcel] = deque()
        self.transfer: Transfer | None = None
        self.asked: float | None = None
        self.deadline = 0.0
        self.granted = self.ended = self.told = self.writing = False

    def take(self, parcel: Parcel | None) -> None:
        if parcel is None:
            self.ended = True
            return
        try:
            self.room.check(parcel)
        except BadRequest as error:
            self.fail(error)
        rows = max(1, PIECE // self.room.block_bytes)
        for first in range(0, len(parcel.own), rows):
            cut = slice(first, first + rows)
            arrays = parcel.own[cut], parcel.peer[cut], parcel.offsets[cut], parcel.counts[cut]
            self.pieces.append(Parcel(*arrays))

    def spans(self, piece: Parcel, address: int) -> tuple[Spans, Spans]:
        """Own and peer's: a whole block is one, a run of tokens two. address: where the own arena begins."""
        room = self.room
        whole = piece.counts == room.page_tokens
        at = np.where(whole, 0, piece.offsets.astype(np.int64) * room.token_bytes)
        size = np.where(whole, room.block_bytes, piece.counts.astype(np.int64) * room.token_bytes)
        part = ~whole & (size > 0)
        half = room.page_tokens * room.token_bytes
        sides = []
        for base, blocks in ((address, piece.own), (self.where.address, piece.peer)):
            starts = base + blocks.astype(np.int64) * room.block_bytes + at
            starts = np.concatenate((starts[size > 0], starts[part] + half))
            sides.append(spans(starts, np.concatenate((size[size > 0], size[part]))))
        return sides[0], sides[1]

"""Blocks of a peer's arena that this unit has borrowed: mapped, and copied to and from as long as they are
lent."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvloom.core.address import KVAddress
from kvloom.core.arrays import I32
from kvloom.core.errors import BadRequest
from kvloom.core.weaving import Borrow, Loan
from kvloom.kernels.block_copy import copy_blocks
from kvloom.transport.mailbox import MailboxForm
from kvloom.transport.peer import Peer
from kvloom.transport.plane import PIECE
from kvloom.transport.room import Room
from kvloom.transport.tasks import TaskSender


class BorrowedBlocks:
    """The borrower's end of a loan. Blocks are counted from 0 here; tasks: attention over them."""

    def __init__(self, borrow: Borrow, loan: Loan, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest where the loan is not what
        was asked for, Unavailable where the lender is gone."""
        self._peer = Peer(loan.peer)
        self._ticket = loan.ticket
        form = borrow.form
        address = KVAddress(
            model=borrow.model,
            form=form,
            begin=0,
            end=loan.pages * form.tokens_per_block,
            blocks=loan.blocks,
            ticket=loan.ticket,
        )
        self.pages = loan.pages
        self.tasks = TaskSender(self._peer, loan.mailbox, patience)
        try:
            self._room = Room.of(address, 0, address.end, own=self._peer, peer=self._peer)
            self._blocks = address.block_map.ravel()
            self._refuse_other(borrow)
        except BaseException:
            self.tasks.close()  # else it would be lent for nothing
            raise
        self._copying = threading.Lock()  # a ledger's locks do not keep one process' threads apart

    def _refuse_other(self, borrow: Borrow) -> None:
        """A mailbox that is not for what was asked for."""
        form = borrow.form
        made = self.tasks.form
        asked = MailboxForm(
            made.slots,
            borrow.rows,
            borrow.width,
            self.pages,
            form.layers,
            borrow.heads,
            form.kv_heads,
            form.head_dim,
        )
        if made != asked:
            raise BadRequest(f"loan: the mailbox of {self._peer.endpoint.unit} is for another model")

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def put(self, source: npt.NDArray[np.uint8], own: I32, away: I32, counts: I32) -> None:
        """The first counts[i] tokens of block own[i] of `source`, all bytes of this unit's arena, into block
        away[i] of the loan. Raises BadRequest where the loan is over, Unavailable where the lender is
        gone."""
        self._copy(source, self._peer.memory, own, self._blocks[away], counts)

    def take(self, target: npt.NDArray[np.uint8], own: I32, away: I32, counts: I32) -> None:
        """The way back."""
        self._copy(self._peer.memory, target, self._blocks[away], own, counts)

    def _copy(
        self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], from_: I32, to: I32, counts: I32
    ) -> None:
        room, rows = self._room, max(1, PIECE // self._room.block_bytes)
        for first in range(0, len(to), rows):
            piece = slice(first, first + rows)
            self._peer.refuse_gone()
            with self._copying, self._peer.ledger.writing(self._ticket):
                copy_blocks(
                    source,
                    target,
                    np.ascontiguousarray(from_[piece]),
                    np.ascontiguousarray(to[piece]),
                    np.zeros(len(to[piece]), np.int32),
                    np.ascontiguousarray(counts[piece]),
                    block_bytes=room.block_bytes,
                    page_tokens=room.page_tokens,
                    token_bytes=room.token_bytes,
                )

"""Blocks of a peer's arena that this unit has borrowed: mapped, and copied to and from as long as they are
lent."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvloom.core.transfer import BlockCopies
from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.transfer.fenced import PeerProcess
from kvloom.transfer.shared_memory import PIECE, ShmPeer
from kvloom.transfer.target import Blocks, Target
from kvloom.transport.mailbox import MailboxForm
from kvloom.transport.tasks import TaskSender
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32
from kvloom.types.offload import Borrow, Loan, Move
from kvloom.types.transfer import KVAddress

Bytes = TypeVar("Bytes")  # an arena's, where its device has them


class LentMemory(ABC, Generic[Bytes]):
    """The borrower's end of a loan. Blocks are counted from 0 here."""

    def __init__(self, borrow: Borrow, loan: Loan, peer: PeerProcess, arena: Blocks, memory: Bytes) -> None:
        """arena, memory: the peer's. Raises BadRequest where the loan is not what was asked for."""
        form = borrow.form
        address = KVAddress(
            model=borrow.model,
            form=form,
            begin=0,
            end=loan.pages * form.tokens_per_block,
            blocks=loan.blocks,
            ticket=loan.ticket,
        )
        self.room = Target.of(address, 0, address.end, own=arena, peer=arena)
        self._peer = peer
        self._memory = memory
        self._ticket = loan.ticket
        self._blocks = address.block_map.ravel()
        self._copying = threading.Lock()  # a ledger's locks do not keep one process' threads apart

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def move(self, arena: Bytes, home: I32, away: I32, move: Move) -> None:
        """Copy pages between `arena`, all bytes of this unit's, and the loan. home, away: [pages, layers,
        kv_heads]. Raises BadRequest where the loan is over, Unavailable where the lender is gone."""
        own, lent = home[move.home], away[move.away]
        counts = np.repeat(move.tokens, own[0].size)
        copy = self.put if move.out else self.take
        copy(arena, own.ravel(), lent.ravel(), counts)

    def put(self, source: Bytes, own: I32, away: I32, counts: I32) -> None:
        """The first counts[i] tokens of block own[i] of `source` into block away[i] of the loan. Raises as
        `move`."""
        self._copy(source, self._memory, own, self._blocks[away], counts)

    def take(self, target: Bytes, own: I32, away: I32, counts: I32) -> None:
        """The way back."""
        self._copy(self._memory, target, self._blocks[away], own, counts)

    def _copy(self, source: Bytes, target: Bytes, from_: I32, to: I32, counts: I32) -> None:
        rows = max(1, self._piece // self.room.block_bytes)
        for first in range(0, len(to), rows):
            part = slice(first, first + rows)
            lists = (from_[part], to[part], np.zeros(len(to[part]), np.int32), counts[part])
            own, peer, offsets, sizes = map(np.ascontiguousarray, lists)
            self._peer.refuse_gone()
            with self._copying, self._peer.ledger.writing(self._ticket):
                self._write(source, target, BlockCopies(own, peer, offsets, sizes))

    @property
    def _piece(self) -> int:
        """Bytes copied between two looks at the ledger."""
        return PIECE

    @abstractmethod
    def _write(self, source: Bytes, target: Bytes, copies: BlockCopies) -> None:
        """Copy blocks copies.own of `source` to blocks copies.peer of `target`; they are there when it
        returns."""


class BorrowedBlocks(LentMemory[npt.NDArray[np.uint8]]):
    """Between CPUs. tasks: attention over the blocks."""

    def __init__(self, borrow: Borrow, loan: Loan, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest where the loan is not what
        was asked for, Unavailable where the lender is gone."""
        peer = ShmPeer(loan.peer)
        self.tasks = TaskSender(peer, loan.mailbox, patience)
        try:
            super().__init__(borrow, loan, peer, peer, peer.memory)
            refuse_other(self.tasks.form, borrow, loan.pages, loan.peer.unit)
        except BaseException:
            self.tasks.close()  # else it would be lent for nothing
            raise

    def _write(
        self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], copies: BlockCopies
    ) -> None:
        copy_blocks(
            source,
            target,
            copies.own,
            copies.peer,
            copies.offsets,
            copies.counts,
            block_bytes=self.room.block_bytes,
            page_tokens=self.room.page_tokens,
            token_bytes=self.room.token_bytes,
        )


def refuse_other(made: MailboxForm, borrow: Borrow, pages: int, unit: str) -> None:
    """Raises BadRequest for a mailbox of the lender `unit` that is not for what was asked for."""
    form = borrow.form
    sizes = form.layers, borrow.heads, form.kv_heads, form.head_dim
    if made != MailboxForm(made.slots, borrow.rows, borrow.width, pages, *sizes):
        raise BadRequest(f"loan: the mailbox of {unit} is for another model")

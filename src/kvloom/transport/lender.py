"""The lender's end of a loan, but for what is computed in it."""

from __future__ import annotations

import numpy as np

from kvloom.core.transfer import Transport
from kvloom.transport.attending import TaskReceiver
from kvloom.transport.mailbox import FLOATS, START, MailboxForm, OwnMailbox, size_of
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32
from kvloom.types.offload import Borrow, Loan
from kvloom.types.transfer import KVAddress, digest_of

MOST = 64 << 20  # bytes of a mailbox beyond what is lent
SLOTS = 2  # a task is posted when the one before it is collected; one more costs nothing


def mailbox_form(borrow: Borrow, blocks: I32, slots: int, values: np.dtype[np.generic]) -> MailboxForm:
    """Of a mailbox for tasks over `blocks`, with q, k, v and outputs of `values`. Raises BadRequest where
    `borrow` makes no sense."""
    form = borrow.form
    if borrow.heads % form.kv_heads:
        raise BadRequest(f"borrow: {borrow.heads} heads over {form.kv_heads}; want a multiple")
    pages = len(blocks) // (form.layers * form.kv_heads)
    sizes = form.layers, borrow.heads, form.kv_heads, form.head_dim
    made = MailboxForm(slots, borrow.rows, borrow.width, pages, *sizes)
    most = MOST + len(blocks) * form.block_bytes
    if size_of(made, values) > most:
        raise BadRequest(
            f"borrow: {borrow.rows} rows of {borrow.width} pages make a mailbox of {size_of(made, values):,} "
            f"bytes for {pages} pages; {most:,} at most are right"
        )
    return made


class LentBlocks:
    """Blocks lent to one model of one other unit, for as long as its ticket is open. loan: what the borrower
    is told."""

    def __init__(self, borrow: Borrow, blocks: I32, transport: Transport, mailbox: bytes) -> None:
        """blocks: [pages · layers · kv_heads] of the own arena. Raises QueueFull where the ledger is full."""
        form = borrow.form
        pages = len(blocks) // (form.layers * form.kv_heads)
        runs = KVAddress.compress(blocks.reshape(pages, form.layers, form.kv_heads))
        digest = digest_of(
            model=borrow.model,
            form=form,
            begin=0,
            end=0,
            blocks=runs,
            where=transport.endpoint.where,
            prompt=(),
        )
        self._transport = transport
        self._ticket = transport.open(0, digest)
        self.loan = Loan(
            peer=transport.endpoint, ticket=self._ticket, pages=pages, blocks=runs, mailbox=mailbox
        )

    def close(self) -> bool:
        """The borrower begins no copy any more. False: it is at one, for milliseconds; ask again."""
        return self._transport.close(self._ticket)


class Lending:
    """Between CPUs, with the mailbox."""

    def __init__(
        self, borrow: Borrow, blocks: I32, transport: Transport, *, slots: int = SLOTS, start: int = START
    ) -> None:
        """blocks: [pages · layers · kv_heads] of the own arena. start: of the mailbox' counters. Raises
        BadRequest where `borrow` makes no sense, QueueFull where the ledger is full, ConfigError where
        there is no memory for the mailbox."""
        form = borrow.form
        if form.dtype != "float32":
            raise BadRequest(f"borrow: {form.dtype}; want float32")
        self.blocks = blocks
        self.mailbox = OwnMailbox(mailbox_form(borrow, blocks, slots, FLOATS), start)
        self.receiver = TaskReceiver(self.mailbox.memory, blocks, form.tokens_per_block)
        try:
            self._lent = LentBlocks(borrow, blocks, transport, self.mailbox.place)
        except BaseException:
            self.mailbox.close()
            raise
        self.loan = self._lent.loan

    def close(self) -> bool:
        """The borrower begins no copy any more. False: it is at one, for milliseconds; ask again."""
        if not self._lent.close():
            return False
        self.mailbox.close()
        return True

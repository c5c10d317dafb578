"""A loan between two devices of one host, at both ends, but for what is computed in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from kvloom.core.transfer import BlockCopies
from kvloom.kernels.mail import Trouble
from kvloom.transfer.cuda_ipc import PIECE, CudaIpcTransport
from kvloom.transport.device_mailbox import BorrowedMailbox, MailDtype, OwnDeviceMailbox, value_dtype
from kvloom.transport.lender import SLOTS, LentBlocks, mailbox_form
from kvloom.transport.loan import LentMemory, refuse_other
from kvloom.transport.mailbox import ENDS, START, end_of
from kvloom.types.clock import has_ended
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.offload import Borrow, Loan

_DTYPES: Final[dict[str, MailDtype]] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
_ENDS: Final[Mapping[int, str]] = {
    **ENDS,
    Trouble.LATE: "has not attended for as long as is waited for",
    Trouble.FULL: "has not attended, and its mailbox is full",
    Trouble.WRONG: "has done tasks that nobody has posted",
    Trouble.GONE: "is gone",
}


class BorrowedDeviceBlocks(LentMemory[Tensor]):
    """The borrower's end. mailbox: for attention over the blocks; process: readable once the lender's has
    ended."""

    def __init__(self, borrow: Borrow, loan: Loan, transport: CudaIpcTransport) -> None:
        """Raises BadRequest where the loan is not what was asked for, Unavailable where the lender is
        gone."""
        self._device = transport.device
        self.unit = loan.peer.unit
        peer = transport.peer(loan.peer)
        self.process = peer.process
        self.mailbox = BorrowedMailbox(loan.mailbox, self.unit, self._device)
        try:
            super().__init__(borrow, loan, peer, peer, peer.memory)
            refuse_other(self.mailbox.form, borrow, loan.pages, self.unit)
            if self.mailbox.dtype != borrow.form.dtype:
                raise BadRequest(
                    f"loan: the mailbox of {self.unit} has {self.mailbox.dtype}; {borrow.form.dtype} is right"
                )
        except BaseException:
            self.mailbox.close()  # else it would be lent for nothing
            raise

    def close(self) -> None:
        """Tell the lender that no more comes. What a process had that is gone is not written to."""
        if not has_ended(self.process):
            self.mailbox.close()

    def why(self, status: int) -> str | None:
        """In words, of the mailbox' status; None where all is well."""
        return end_of(self.unit, status, _ENDS) if status else None

    @property
    def _piece(self) -> int:
        return PIECE

    def _write(self, source: Tensor, target: Tensor, copies: BlockCopies) -> None:
        try:
            self._device.copy(source, target, copies, self.room)
        except RuntimeError as error:
            raise Unavailable(f"copying to or from {self.unit} failed: {error}") from error


class DeviceLending:
    """The lender's: blocks lent to one model of one other unit, for as long as the ticket is open."""

    def __init__(
        self,
        borrow: Borrow,
        blocks: I32,
        transport: CudaIpcTransport,
        arena: Tensor,
        *,
        slots: int = SLOTS,
        start: int = START,
    ) -> None:
        """blocks: [pages · layers · kv_heads] of the own `arena`, its bytes. start: of the mailbox' counters.
        Raises BadRequest where `borrow` makes no sense, OSError where its process is gone, QueueFull where
        the ledger is full, ConfigError where there is no memory for the mailbox."""
        form = borrow.form
        if form.dtype not in _DTYPES:
            raise BadRequest(f"borrow: {form.dtype}; want {', '.join(_DTYPES)}")
        dtype = _DTYPES[form.dtype]
        self._process = os.pidfd_open(borrow.pid)
        weakref.finalize(self, os.close, self._process)
        made = mailbox_form(borrow, blocks, slots, value_dtype(dtype))
        self.start = start
        self.mailbox = OwnDeviceMailbox(made, dtype, arena.device, start)
        place = self.mailbox.place(transport.device)
        transport.device.mark().wait()  # it is as it is to be before anybody is told of it
        self._lent = LentBlocks(borrow, blocks, transport, place)
        self.blocks = blocks
        self.loan = self._lent.loan

    @property
    def unused(self) -> bool:
        """The borrower writes to the mailbox no more. Until then its memory must not become anything
        else."""
        return self.mailbox.left or has_ended(self._process)

    def close(self) -> bool:
        """The borrower begins no copy any more. False: it is at one, for milliseconds; ask again."""
        return self._lent.close()

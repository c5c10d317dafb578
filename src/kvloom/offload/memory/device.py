"""A loan between two units of one GPU, at both ends, without the attention that is computed in it.

Its mailbox lies in the device's memory: the words and arrays of `mailbox.py`, worked by kernels on both
sides. The lender makes it, and exports it as it does its arena; the borrower maps it, and says so by the word
`waiting`, for nobody sleeps here. Neither host looks into it but for the task descriptor, which the
borrower's writes once an iteration.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from kvloom.kernels.mailbox import LINE, WORDS, BorrowerState, End, MailboxTensors, Trouble, signed
from kvloom.offload.memory.borrower import LentMemory, refuse_other
from kvloom.offload.memory.lender import SLOTS, mailbox_form
from kvloom.offload.memory.mailbox import (
    ENDS,
    START,
    MailboxForm,
    changed_pages,
    end_of,
    layout,
    refuse_slots,
    size_of,
)
from kvloom.offload.terms import Borrow, LentBlocks, Loan
from kvloom.transfer.cuda_ipc import PIECE, CudaIpcTransport, DeviceMemory
from kvloom.types.clock import has_ended
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.geometry import I32, I64, AnyArray
from kvloom.types.transfer import BlockCopies

MailboxDtype = Literal["bfloat16", "float16", "float32"]
_VALUES: Final[dict[str, np.dtype[np.generic]]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}


_ENDS: Final[Mapping[int, str]] = {
    **ENDS,
    Trouble.LATE: "has not attended for as long as is waited for",
    Trouble.FULL: "has not attended, and its mailbox is full",
    Trouble.WRONG: "has done tasks that nobody has posted",
    Trouble.GONE: "is gone",
}
_ARRAYS: Final = ("head", "lengths", "tables", "map", "notes", "qkv", "out")


class DevicePlace(Struct, frozen=True, array_like=True):
    """The place of a mailbox: `handle` as `DeviceMemory` of process `pid` has exported it; q, k, v and the
    output are of `dtype`."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    handle: Annotated[bytes, Meta(max_length=1 << 10)]
    form: MailboxForm
    dtype: MailboxDtype


def tensors_of(memory: Tensor, form: MailboxForm, dtype: MailboxDtype) -> MailboxTensors:
    """Returns `memory`, flat bytes, as kernels take it."""
    words = memory[: len(WORDS) * LINE].view(torch.int32).view(len(WORDS), -1)
    parts = {
        name: memory[part.at : part.at + part.size]
        .view(getattr(torch, dtype) if name in ("qkv", "out") else torch.int32)
        .view(*part.shape, *(() if part.dtype.names is None else (part.dtype.itemsize // 4,)))
        for name, part in layout(form, _VALUES[dtype]).items()
        if name in _ARRAYS
    }
    return MailboxTensors(words, **parts)


class LenderDeviceMailbox:
    """The lender's mailbox, which is there for as long as this object."""

    def __init__(
        self, form: MailboxForm, dtype: MailboxDtype, device: torch.device, start: int = START
    ) -> None:
        """start: the number at which the counters begin. Raises ConfigError if the device has no memory for
        it."""
        refuse_slots(form)
        self.form = form
        self._dtype: MailboxDtype = dtype
        size = size_of(form, _VALUES[dtype])
        try:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"weave: {device} gives no {size:,} bytes for a mailbox") from error
        self.tensors = tensors_of(self.memory, form, dtype)
        for name in ("posted", "done"):
            self.tensors.word(name).fill_(signed(start))

    @property
    def left(self) -> bool:
        """Whether the borrower writes nothing any more."""
        return bool(self.tensors.word("left"))

    def place(self, device: DeviceMemory) -> bytes:
        """Returns the place for the borrower. Raises ConfigError if the memory cannot be shared."""
        return msgspec.msgpack.encode(
            DevicePlace(os.getpid(), device.export(self.memory), self.form, self._dtype)
        )


class BorrowerDeviceMailbox:
    """The borrower's end of the mailbox."""

    def __init__(self, place: bytes, unit: str, device: DeviceMemory) -> None:
        """unit: the lender, for errors. Raises BadRequest for a place that never was one, Unavailable for one
        that is gone."""
        try:
            where = msgspec.msgpack.decode(place, type=DevicePlace)
            refuse_slots(where.form)
        except (msgspec.MsgspecError, ConfigError) as error:
            raise BadRequest(f"mailbox: that of {unit} cannot be read: {error}") from error
        memory = device.map(where.handle)
        if memory.numel() != size_of(where.form, _VALUES[where.dtype]):
            raise BadRequest(f"mailbox: that of {unit} contradicts itself")
        self.form = where.form
        self.dtype: str = where.dtype
        self.tensors = tensors_of(memory, where.form, where.dtype)
        self.state = BorrowerState(int(self.tensors.word("posted")), memory.device)
        self.tensors.word("waiting").fill_(1)
        self._iteration = 0
        self._told: I64 = np.zeros(where.form.pages, np.int64)  # versions of map rows; real ones > 0

    def describe(
        self, lengths: I32, tables: I32, page_map: I32, versions: I64, first: int
    ) -> dict[str, AnyArray]:
        """Returns the arrays that `begin` needs on the device for the next iteration: lengths [B], the new
        token counted, tables [B, P], page_map [pages, layers, kv_heads] of blocks as the loan counts them,
        versions [pages] of its rows. first: the row of q, k and v that is the first offloaded one. Raises
        BadRequest if the mailbox takes fewer rows or pages."""
        changed, count = changed_pages(self.form, tables, versions, self._told), len(tables)
        self._iteration = signed(self._iteration + 1)
        return {
            "offloaded_lengths": lengths,
            "offloaded_tables": tables,
            "offloaded_pages": changed,
            "offloaded_map": page_map[changed],
            "offloaded_head": np.asarray([self._iteration, count, len(changed)], dtype=np.int32),
            "offloaded_step": np.asarray([self._iteration, count, first], dtype=np.int32),
        }

    def begin(self, rows: Mapping[str, Tensor]) -> None:
        """Writes the descriptor of the tasks that follow, on the current stream, once all before are
        collected. rows: the arrays of `describe` on the device."""
        tensors, tables = self.tensors, rows["offloaded_tables"]
        if len(rows["offloaded_pages"]):
            tensors.map.index_copy_(0, rows["offloaded_pages"], rows["offloaded_map"])
        tensors.lengths[: len(tables)].copy_(rows["offloaded_lengths"])
        tensors.tables[: len(tables), : tables.shape[1]].copy_(tables)
        tensors.head[0].copy_(rows["offloaded_head"])
        self.state.step.copy_(rows["offloaded_step"])

    def rest(self) -> None:
        """Lets no row be offloaded until the next `begin`, on the current stream."""
        self.state.step.zero_()

    def fail(self, why: Trouble) -> None:
        """Lets nothing be posted and nobody wait any more, from here on the current stream."""
        self.state.status.fill_(why)

    def close(self) -> None:
        """Tells the lender that no more tasks come, and that this side writes to its memory no more."""
        self.tensors.word("left").fill_(End.CLOSED)


class BorrowedDeviceBlocks(LentMemory[Tensor]):
    """The borrower's end of a loan between devices."""

    piece = PIECE

    def __init__(self, borrow: Borrow, loan: Loan, transport: CudaIpcTransport) -> None:
        """Raises BadRequest if the loan is not what was asked for, Unavailable if the lender is gone."""
        self._device = transport.device
        self.unit = loan.peer.unit
        peer = transport.peer(loan.peer)
        self.process = peer.process
        """A descriptor that is readable once the lender's process has ended."""
        self.mailbox = BorrowerDeviceMailbox(loan.mailbox, self.unit, self._device)
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
        """Tells the lender that no more tasks come, unless its process is gone."""
        if not has_ended(self.process):
            self.mailbox.close()

    def why(self, status: int) -> str | None:
        """Returns in words what the mailbox' status says; None if all is well."""
        return end_of(self.unit, status, _ENDS) if status else None

    def _write(self, source: Tensor, target: Tensor, copies: BlockCopies) -> None:
        try:
            self._device.copy(source, target, copies, self.room)
        except RuntimeError as error:
            raise Unavailable(f"copying to or from {self.unit} failed: {error}") from error


class DeviceLending:
    """The lender's end: blocks lent to one model of another unit, for as long as the ticket is open."""

    def __init__(
        self,
        borrow: Borrow,
        blocks: I32,
        transport: CudaIpcTransport,
        arena: Tensor,
    ) -> None:
        """blocks: [pages · layers · kv_heads] of the own `arena`, its bytes. Raises BadRequest if `borrow`
        makes no sense, OSError if its process is gone, QueueFull if the ledger is full, ConfigError if there
        is no memory for the mailbox."""
        form = borrow.form
        if form.dtype not in _VALUES:
            raise BadRequest(f"borrow: {form.dtype}; want {', '.join(_VALUES)}")
        dtype = msgspec.convert(form.dtype, MailboxDtype)
        self._process = os.pidfd_open(borrow.pid)
        weakref.finalize(self, os.close, self._process)
        made = mailbox_form(borrow, blocks, SLOTS, _VALUES[dtype])
        self.mailbox = LenderDeviceMailbox(made, dtype, arena.device)
        place = self.mailbox.place(transport.device)
        transport.device.mark().wait()  # it is as it is to be before anybody is told of it
        self._lent = LentBlocks(borrow, blocks, transport, place)
        self.blocks = blocks
        self.loan = self._lent.loan

    @property
    def unused(self) -> bool:
        """Whether the borrower writes to the mailbox no more. Until then its memory must not become anything
        else."""
        return self.mailbox.left or has_ended(self._process)

    def close(self) -> bool:
        """Lets the borrower begin no copy any more. Returns False while a copy is under way, for
        milliseconds."""
        return self._lent.close()

"""A mailbox in a device's memory: the words and arrays of `mailbox.py`, worked by kernels on both sides.

The lender makes it, and exports it as it does its arena; the borrower maps it, and says so by the word
`waiting`, for nobody sleeps here. Neither host looks into it but for the sheet, which the borrower's writes
once an iteration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from kvloom.kernels.mail import LINE, WORDS, End, Mail, Pad, Trouble, signed
from kvloom.transfer.cuda_ipc import DeviceMemory
from kvloom.transport.mailbox import START, MailboxForm, layout, refuse_slots, size_of
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.geometry import I32, I64, AnyArray

MailDtype = Literal["bfloat16", "float16", "float32"]
_VALUES: Final[dict[str, np.dtype[np.generic]]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}


def value_dtype(dtype: MailDtype) -> np.dtype[np.generic]:
    """As the layout counts it: of its size."""
    return _VALUES[dtype]


_ARRAYS: Final = ("head", "lengths", "tables", "map", "notes", "qkv", "out")


class DevicePlace(Struct, frozen=True, array_like=True):
    """Where a mailbox is: `handle` as `DeviceMemory` of process `pid` has exported it; q, k, v and the output
    are of `dtype`."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    handle: Annotated[bytes, Meta(max_length=1 << 10)]
    form: MailboxForm
    dtype: MailDtype


def mail_of(memory: Tensor, form: MailboxForm, dtype: MailDtype) -> Mail:
    """`memory`, flat bytes, as kernels take it."""
    words = memory[: len(WORDS) * LINE].view(torch.int32).view(len(WORDS), -1)
    parts = {
        name: memory[part.at : part.at + part.size]
        .view(getattr(torch, dtype) if name in ("qkv", "out") else torch.int32)
        .view(*part.shape, *(() if part.dtype.names is None else (part.dtype.itemsize // 4,)))
        for name, part in layout(form, _VALUES[dtype]).items()
        if name in _ARRAYS
    }
    return Mail(words, **parts)


class OwnDeviceMailbox:
    """The lender's: made here, and there for as long as this is."""

    def __init__(self, form: MailboxForm, dtype: MailDtype, device: torch.device, start: int = START) -> None:
        """start: what the counters begin with. Raises ConfigError where the device has no memory for it."""
        refuse_slots(form)
        self.form = form
        self._dtype: MailDtype = dtype
        size = size_of(form, _VALUES[dtype])
        try:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"weave: {device} gives no {size:,} bytes for a mailbox") from error
        self.mail = mail_of(self.memory, form, dtype)
        for name in ("posted", "done"):
            self.mail.word(name).fill_(signed(start))

    @property
    def left(self) -> bool:
        """The borrower writes nothing any more."""
        return bool(self.mail.word("left"))

    def place(self, device: DeviceMemory) -> bytes:
        """For the borrower. Raises ConfigError where the memory cannot be shared."""
        return msgspec.msgpack.encode(
            DevicePlace(os.getpid(), device.export(self.memory), self.form, self._dtype)
        )


class BorrowedMailbox:
    """The borrower's end."""

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
        self.mail = mail_of(memory, where.form, where.dtype)
        self.pad = Pad(int(self.mail.word("posted")), memory.device)
        self.mail.word("waiting").fill_(1)
        self._iteration = 0
        self._told: I64 = np.zeros(where.form.pages, np.int64)  # versions of map rows; real ones > 0

    def sheet(
        self, lengths: I32, tables: I32, page_map: I32, versions: I64, first: int
    ) -> dict[str, AnyArray]:
        """What `begin` needs on the device, of the next iteration: lengths [B], the new token counted, tables
        [B, P], page_map [pages, layers, kv_heads] of blocks as the loan counts them, versions [pages] of its
        rows. first: which row of q, k and v is the first that is away. Raises BadRequest where the mailbox
        takes fewer rows or pages."""
        form = self.form
        count, width = tables.shape
        if not 0 < count <= form.rows or width > form.width:
            raise BadRequest(
                f"weave: {count} rows of {width} pages; want {form.rows} of {form.width} at most"
            )
        used = np.unique(tables)
        changed = used[versions[used] != self._told[used]]
        self._told[changed] = versions[changed]
        self._iteration = signed(self._iteration + 1)
        return {
            "away_lengths": lengths,
            "away_tables": tables,
            "away_pages": changed.astype(np.int64),
            "away_map": page_map[changed],
            "away_head": np.asarray([self._iteration, count, len(changed)], dtype=np.int32),
            "away_step": np.asarray([self._iteration, count, first], dtype=np.int32),
        }

    def begin(self, sheet: Mapping[str, Tensor]) -> None:
        """What the tasks that follow are over, on the current stream, once all before are collected. sheet:
        the arrays on the device."""
        mail, tables = self.mail, sheet["away_tables"]
        if len(sheet["away_pages"]):
            mail.map.index_copy_(0, sheet["away_pages"], sheet["away_map"])
        mail.lengths[: len(tables)].copy_(sheet["away_lengths"])
        mail.tables[: len(tables), : tables.shape[1]].copy_(tables)
        mail.head[0].copy_(sheet["away_head"])
        self.pad.step.copy_(sheet["away_step"])

    def rest(self) -> None:
        """On the current stream: until the next `begin` no row is away."""
        self.pad.step.zero_()

    def fail(self, why: Trouble) -> None:
        """By the current stream: nothing is posted any more, and nobody waits."""
        self.pad.status.fill_(why)

    def close(self) -> None:
        """Tell the lender that no more comes, and that nothing of this side writes to its memory any
        more."""
        self.mail.word("left").fill_(End.CLOSED)

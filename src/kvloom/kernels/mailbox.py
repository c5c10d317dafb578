"""The memory of a mailbox, as processors of any kind read and write it: its words, its records, and its
arrays as tensors.

Each word has one writer and a cache line of its own. Counters have 32 bits and wrap; a ring has a power of
two slots, so that a slot stays count mod slots when they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor

MASK: Final = 0xFFFFFFFF
LINE: Final = 64  # bytes of a cache line
WORDS: Final = ("posted", "done", "asleep", "waiting", "left", "over")
NOTE: Final = np.dtype(
    [
        ("iteration", "<u4"),
        ("layer", "<i4"),
        ("rows", "<i4"),
        ("window", "<i4"),
        ("scale", "<f8"),
        ("softcap", "<f8"),
        ("posted", "<i8"),  # when it was, in nanoseconds of the host's monotonic clock; 0 for nobody knows
    ]
)
HEAD: Final = np.dtype([("iteration", "<u4"), ("rows", "<i4"), ("changed", "<i4")])


class End(IntEnum):
    """The reason for which a side takes no more part; NONE if it does."""

    NONE = 0
    CLOSED = 1  # it wants no more
    FORGED = 2  # the other's writings cannot be
    FAILED = 3  # it could not compute


class Trouble(IntEnum):
    """The reason for which a borrower on a device goes on without its lender, besides the lender's own
    `End`."""

    LATE = 16  # it has not answered within the looks that were allowed
    FULL = 17  # as many tasks as there are slots are not collected yet, or a task has more rows than fit
    WRONG = 18  # it has done tasks that nobody has posted
    GONE = 19  # its process has ended, as the borrower's host says


@dataclass(frozen=True, slots=True)
class MailboxTensors:
    """The words and arrays of a mailbox."""

    words: Tensor  # [words, LINE / 4] int32
    head: Tensor  # [1, 3] int32
    lengths: Tensor  # [rows] int32
    tables: Tensor  # [rows, width] int32
    map: Tensor  # [pages, layers, kv_heads] int32
    notes: Tensor  # [slots, NOTE's size / 4] int32
    qkv: Tensor  # [slots, rows, heads + 2 kv_heads, D] of the model's dtype
    out: Tensor  # [slots, rows, heads, D] of the model's dtype

    @property
    def slots(self) -> int:
        return self.qkv.shape[0]

    @property
    def heads(self) -> int:
        return self.out.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.map.shape[2]

    def word(self, name: str) -> Tensor:
        """Returns one of WORDS: [1] int32."""
        return self.words[WORDS.index(name), :1]

    @property
    def places(self) -> Tensor:
        """The iteration, layer, rows and window of each note: [slots, 4] int32."""
        return self.notes[:, :4]

    @property
    def scoring(self) -> Tensor:
        """The scale and softcap of each note: [slots, 2] float64."""
        first = NOTE.fields["scale"][1] // 8  # type: ignore[index]
        return self.notes.view(torch.float64)[:, first : first + 2]


@dataclass(frozen=True, slots=True)
class LentArena:
    """The blocks that a borrower may name."""

    blocks: Tensor  # [n] int32, own blocks in the borrower's order
    arena: Tensor  # [blocks, 2, T, D]


SPAN: Final = 256  # tokens of a row that are worth a part of their own
PARTS: Final = 32  # of a task, up to which its rows are cut


class LenderState:
    """The state that a lender's device keeps for itself of one loan: which task is next, or being done, and
    how many of its parts are taken; how many are done; and why no more tasks are taken. A part is a row and a
    KV head; of a task of few rows, of which one is long, a run of its tokens, whose sums are kept until the
    last is done.

    Sums and scales have room for the queries of a KV head and for the dimensions, each up to a power of two.
    """

    def __init__(self, start: int, mailbox: MailboxTensors, span: int = SPAN) -> None:
        """start: what the mailbox' counters begin with. span: tokens that a run has at least."""
        device, head_dim = mailbox.words.device, mailbox.out.shape[3]
        queries = _padded(mailbox.heads // mailbox.kv_heads)
        self.span = span
        self.claim = torch.zeros(1, dtype=torch.int64, device=device)
        """Tasks done before in the high half, parts taken in the low one."""
        self.words = torch.zeros(2, LINE // 4, dtype=torch.int32, device=device)
        self.counts = torch.zeros(PARTS, dtype=torch.int32, device=device)
        """The runs that are done of a row and a KV head."""
        self.sums = torch.zeros(PARTS, queries, _padded(head_dim), dtype=torch.float32, device=device)
        """The sums of each run, not divided by their norms."""
        self.scales = torch.zeros(PARTS, 2, queries, dtype=torch.float32, device=device)
        """The norms of each run, then the largest scores (base 2) that they are relative to."""
        self.claim.fill_(signed(start) << 32)

    def most(self, mailbox: MailboxTensors, tokens: int) -> int:
        """Returns the runs that a row may be cut into, if pages have so many tokens."""
        return -(-mailbox.tables.shape[1] * tokens // self.span)

    @property
    def finished(self) -> Tensor:
        """The parts of the task that are done."""
        return self.words[0, :1]

    @property
    def over(self) -> Tensor:
        """An `End`."""
        return self.words[1, :1]


class BorrowerState:
    """The state that a borrower's device keeps for itself of one loan."""

    def __init__(self, start: int, device: torch.device) -> None:
        self.words = torch.zeros(4, dtype=torch.int32, device=device)
        """Tasks posted, tasks collected, an `End` or a `Trouble`, and the programs of the launch that have
        ended."""
        self.step = torch.zeros(3, dtype=torch.int32, device=device)
        """The iteration's number, its offloaded rows, and the first of them; written once an iteration."""
        self.words[:2] = signed(start)

    @property
    def status(self) -> Tensor:
        return self.words[2:3]


def _padded(size: int) -> int:
    """Returns a size as kernels hold it: a power of two, 16 at least."""
    return 1 << max(4, (size - 1).bit_length())


def signed(count: int) -> int:
    """Returns a counter as an int32 holds it."""
    return ((count & MASK) ^ (1 << 31)) - (1 << 31)

"""A loan whose two ends are in this process, or whose lender is in another; nothing attends but an echo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvloom.kv.arena import Arena
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.memory.lender import Lending, Task
from kvloom.offload.memory.mailbox import OffloadMailbox
from kvloom.offload.terms import Borrow, Loan
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.address import KVForm
from kvloom.types.geometry import I32, Geometry
from tests.forks import FORKS, preload
from tests.processes import DEADLINE

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=512)  # 8 tokens a page
FORM = KVForm.of(GEOMETRY, "float32")
HEADS, ROWS, WIDTH, PAGES = 4, 3, 4, 6
BLOCKS = 64
LENT: I32 = np.random.default_rng(5).permutation(BLOCKS)[: PAGES * GEOMETRY.blocks_per_page].astype(np.int32)
preload(__name__)


def asked(pid: int) -> Borrow:
    return Borrow(model="m", pid=pid, form=FORM, heads=HEADS, rows=ROWS, width=WIDTH, pages=PAGES)


class Lender:
    """The lending end, with an arena of its own. start: of the counters, which wrap at 2³²."""

    def __init__(self, start: int = 0, slots: int = 2) -> None:
        self.arena = Arena(BLOCKS, GEOMETRY.block_bytes)
        self.transport = ShmTransport("lender", self.arena, slots=8)
        self.lending = Lending(asked(os.getpid()), LENT, self.transport, slots=slots, start=start)

    def echo(self, task: Task) -> None:
        """In place of attention: q · (layer + 1), which shows what was seen and when."""
        memory, rows = self.lending.mailbox.memory, len(task.descriptor.lengths)
        memory.out[task.slot, :rows] = memory.qkv[task.slot, :rows, :HEADS] * (task.layer + 1)
        self.lending.receiver.answer(task)

    def rest(self, seconds: float) -> None:
        """Until there is a task, the borrower leaves, or the time is over; may return early."""
        memory = self.lending.mailbox.memory
        memory.asleep.swap(1)
        if not self.lending.receiver.left:
            memory.posted.sleep(memory.done.get(), seconds)
        memory.asleep.set(0)

    def end(self) -> None:
        assert self.lending.close()
        self.transport.close_all()


@contextmanager
def lender_here(start: int = 0, slots: int = 2) -> Iterator[Lender]:
    made = Lender(start, slots)
    try:
        yield made
    finally:
        made.end()


def borrowed(loan: Loan, patience: float = 30.0) -> BorrowedBlocks:
    return BorrowedBlocks(asked(os.getpid()), loan, patience)


def begin(loan: BorrowedBlocks, lengths: list[int], version: int = 1) -> None:
    """An iteration over rows with pages of their own."""
    page_map = np.arange(PAGES * GEOMETRY.blocks_per_page, dtype=np.int32)
    tables = (np.arange(len(lengths), dtype=np.int32)[:, None] * 2 + np.arange(2, dtype=np.int32)) % PAGES
    loan.tasks.begin(
        np.array(lengths, np.int32),
        tables.astype(np.int32),
        page_map.reshape(PAGES, GEOMETRY.layers, GEOMETRY.kv_heads),
        np.full(PAGES, version, np.int64),
    )


def _serve(end: Connection, start: int, answers: int) -> None:
    """Echo, until the borrower leaves; after so many answers never again."""
    made = Lender(start)
    end.send_bytes(msgspec.msgpack.encode(made.lending.loan))
    receiver = made.lending.receiver
    while not receiver.left:
        task = receiver.next() if answers else None
        if task is None:
            made.rest(0.05)
        else:
            made.echo(task)
            answers -= 1
    made.end()


@contextmanager
def lender_elsewhere(start: int = 0, answers: int = 1 << 30) -> Iterator[tuple[Loan, Any]]:
    """The loan, and the process that lends."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(theirs, start, answers))
    process.start()
    theirs.close()
    try:
        yield msgspec.msgpack.decode(ours.recv_bytes(), type=Loan), process
    finally:
        process.join(DEADLINE)
        process.kill()
        process.join()


def memory_of(made: Lender) -> OffloadMailbox:
    return made.lending.mailbox.memory

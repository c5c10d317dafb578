"""Hot units that stand still at one point of what they do with a loan, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvloom.engine.engine import Engine
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.terms import Borrow, Loan
from kvloom.transfer.shared_memory import ShmPeer
from kvloom.types.address import KVForm
from tests.forks import FORKS
from tests.weaving import DEADLINE


def _stand(end: Connection, point: str) -> None:
    """A hot unit that comes to `point`, says so, and stands there."""
    borrow, loan = msgspec.msgpack.decode(end.recv_bytes(), type=tuple[Borrow, Loan])
    form = borrow.form
    with ExitStack() as stack:
        if point != "lent":
            borrowed = BorrowedBlocks(borrow, loan, 30.0)
        if point == "copies":
            peer = ShmPeer(loan.peer)
            stack.enter_context(peer.ledger.writing(loan.ticket))
        if point in ("told", "posted", "answered"):
            blocks = np.arange(borrowed.blocks, dtype=np.int32).reshape(
                loan.pages, form.layers, form.kv_heads
            )
            table, versions = np.zeros((1, 1), np.int32), np.ones(loan.pages, np.int64)
            borrowed.tasks.begin(np.array([3], np.int32), table, blocks, versions)
        if point in ("posted", "answered"):
            qkv = np.ones((1, borrow.heads + 2 * form.kv_heads, form.head_dim), np.float32)
            task = borrowed.tasks.post(0, qkv, 1.0, 0, 0.0)
        if point == "answered":
            borrowed.tasks.collect(task, np.empty((1, borrow.heads, form.head_dim), np.float32))
        if point == "left":
            borrowed.tasks.close()
        end.send_bytes(b"there")
        end.recv_bytes()


def terms_of(cold: Engine, pid: int) -> Borrow:
    form = KVForm.of(cold.pool.caches["cold"].geometry, "float32")
    return Borrow(model="m", pid=pid, form=form, heads=8, rows=4, width=4, pages=5)


@asynccontextmanager
async def standing(cold: Engine, point: str) -> AsyncIterator[Any]:
    """The process of a hot unit that stands at `point`."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_stand, args=(theirs, point))
    process.start()
    theirs.close()
    borrow = terms_of(cold, process.pid or 0)
    ours.send_bytes(msgspec.msgpack.encode((borrow, cold.lender.lend(borrow))))
    assert await asyncio.to_thread(ours.poll, DEADLINE)
    try:
        yield process
    finally:
        process.kill()
        process.join()
        ours.close()

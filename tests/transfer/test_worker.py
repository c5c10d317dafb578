"""The thread's own laws: one order, one end, and nobody who waits after it."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

from kvloom.transfer.plane import PlaneTransfer, TransferWorker
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.transfer import BlockCopies, TransferState
from tests.processes import DEADLINE

NONE = np.zeros(0, np.int32)
NOTHING = BlockCopies(NONE, NONE, NONE, NONE)


FORM = KVForm(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_bytes=256, tokens_per_block=4)
ADDRESS = KVAddress(model="m", form=FORM, begin=0, end=4, blocks=b"", ticket=Ticket(0, 1))
PEER = Endpoint(unit="peer", kind="modelled", where=b"")


def _transfer(worker: TransferWorker[int], kind: type[PlaneTransfer] = PlaneTransfer) -> PlaneTransfer:
    """One that its receiver has granted."""
    transfer = kind(worker.submit, PEER, ADDRESS, 0, 4)
    transfer.become(TransferState.CLAIMED)
    return transfer


class Counting(TransferWorker[int]):
    """Settles each transfer at its end, but holds every third one back; fails at an order below 0."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.orders: list[int] = []
        self.held: list[PlaneTransfer] = []
        self._start()

    def _step(self) -> None:
        match self._queue.get():
            case PlaneTransfer() as transfer, None if transfer.failure is not None or len(self.orders) % 3:
                transfer.settle(transfer.failure)
            case PlaneTransfer() as transfer, None:
                self.held.append(transfer)
            case int() as order:
                self.orders.append(order)
                if order < 0:
                    raise LookupError("below 0")

    def _left(self) -> list[PlaneTransfer]:
        left, self.held = self.held, []
        return left


class Stubborn(PlaneTransfer):
    """One that cannot be refused without an error."""

    def refuse(self, error: KvloomError) -> None:
        super().refuse(error)
        raise LookupError("stubborn")


@pytest.mark.parametrize("by_close", [True, False])
@pytest.mark.parametrize("after", [0, 1, 7, 30])
def test_whenever_something_is_put_nobody_waits_for_ever(after: int, by_close: bool) -> None:
    """Four threads put while the thread ends, some before it, some after."""

    async def test() -> None:
        worker = Counting()
        transfers = [_transfer(worker) for _ in range(40)]
        begun = threading.Barrier(5)

        def put(some: list[PlaneTransfer]) -> None:
            begun.wait()
            for number, transfer in enumerate(some):
                worker.order(number)
                transfer.put(NOTHING)

        puts = [asyncio.create_task(asyncio.to_thread(put, transfers[i::4])) for i in range(4)]
        begun_too = asyncio.create_task(asyncio.to_thread(begun.wait))
        ends = [asyncio.create_task(transfer.arrived()) for transfer in transfers[:after]]
        await begun_too
        if by_close:
            worker.close()
        else:
            worker.order(-1)
        ends += [asyncio.create_task(transfer.arrived()) for transfer in transfers[after:]]
        found = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), DEADLINE)
        await asyncio.gather(*puts)
        why = "this unit is stopping" if by_close else "failed (LookupError('below 0')); restart the unit"
        assert all(one is None or (isinstance(one, Unavailable) and why in one.message) for one in found)
        assert any(found)
        with pytest.raises(Unavailable):
            worker.refuse_over()
        worker.close()

    asyncio.run(test())


def _fail(worker: Counting) -> None:
    """Until it has failed."""

    async def wait() -> None:
        worker.order(-1)
        with pytest.raises(Unavailable, match="below 0"):
            await asyncio.wait_for(_transfer(worker).arrived(), DEADLINE)

    asyncio.run(wait())


def test_orders_are_followed_one_after_the_other() -> None:
    worker = Counting()
    for order in range(100):
        worker.order(order)
    worker.refuse_over()
    _fail(worker)
    worker.order(100)
    worker.close()
    assert worker.orders == [*range(100), -1]


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    worker = Counting()
    _fail(worker)
    worker.close()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "thread counting has failed" in record.message
    assert "in _step" in caplog.text
    assert "LookupError: below 0" in caplog.text


def test_one_that_cannot_be_refused_keeps_no_other_waiting() -> None:
    async def test() -> None:
        worker = Counting()
        worker.order(0)
        transfers = [_transfer(worker, Stubborn), *(_transfer(worker) for _ in range(3))]
        worker.order(1)
        worker.order(2)
        ends = [asyncio.create_task(transfer.arrived()) for transfer in transfers]
        await asyncio.sleep(0)
        transfers[2].abandon()
        worker.order(-1)
        found = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), DEADLINE)
        assert [type(one) for one in found] == [Unavailable, Unavailable, BadRequest, Unavailable]
        worker.close()

    asyncio.run(test())

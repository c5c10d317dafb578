"""A GPU's part in weaving: puts mailboxes, attenders and executor together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.kernels.mail import Lent, Trouble
from kvloom.model.gpu.attender import DeviceAttender
from kvloom.model.gpu.woven import LOOKS
from kvloom.model.weaving.terms import on_this_loop, one_number, watched
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.transport.device_loan import BorrowedDeviceBlocks, DeviceLending
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.load import Waits
from kvloom.types.offload import Borrow, Loan

_log = logging.getLogger(__name__)


class _Service:
    """A loan to another unit. What has to wait for jobs is done on a thread of its own."""

    def __init__(self, executor: GpuExecutor, lending: DeviceLending, attender: DeviceAttender) -> None:
        self.lending = lending
        self._executor = executor
        self._attender = attender
        self._thread = ThreadPoolExecutor(1, "weave-end")
        self._thread.submit(self._begin)
        self._ended: Future[None] | None = None

    def end(self) -> bool:
        """True: no task is done any more, and the borrower copies nothing. False: ask again."""
        if self._ended is None:
            self._ended = self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
        return self._ended.done() and self.lending.close()

    def _begin(self) -> None:
        self._set(self._attender)

    def _end(self) -> None:
        try:
            self._executor.device.enter()
            self._attender.close()
        finally:
            self._set(None)

    def _set(self, attender: DeviceAttender | None) -> None:
        try:
            self._executor.device.enter()
            self._executor.loans.lend(attender)
        except Exception:  # noqa: BLE001 -- a device that has failed; its unit is about to end
            _log.exception("weave: what forwards poll for could not be changed")


class DeviceWeaver:
    """Implements Weaver: one loan to another unit, and one to each own model."""

    def __init__(self, executor: GpuExecutor, transport: CudaIpcTransport, looks: int = LOOKS) -> None:
        """looks: of a step, for a layer's attention."""
        self._executor = executor
        self._transport = transport
        self._looks = looks
        self._beside = executor.device.beside()
        self._service: _Service | None = None
        self._kept: list[DeviceLending] = []  # over, but their borrowers may still write to the mailbox

    def heads(self, model: str) -> int:
        return one_number(model, self._executor.heads(model))

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        self._executor.device.enter()
        with self._beside.entered(), _room("borrow"):
            borrowed = BorrowedDeviceBlocks(borrow, loan, self._transport)
            self._beside.mark().wait()
        self._executor.loans.borrow(borrow.model, borrowed, self._looks)
        asyncio.get_running_loop().add_reader(borrowed.process, self._gone, borrowed)
        return borrowed.blocks

    def give_back(self, model: str) -> None:
        borrowed = self._executor.loans.give_back(model)
        with suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().remove_reader(borrowed.process)
        self._executor.device.enter()
        with self._beside.entered():
            borrowed.close()
            self._beside.mark().wait()

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self._service is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        executor = self._executor
        executor.device.enter()
        self._kept = [one for one in self._kept if not one.unused]
        form = borrow.form
        arena = executor.arena.view(form.head_dim, getattr(torch, form.dtype))
        with watched(borrow), _room("lend"):
            lent = Lent(torch.from_numpy(blocks).to(arena.device), arena)
            lending = DeviceLending(borrow, blocks, self._transport, executor.arena.bytes)
            try:
                attender = DeviceAttender(
                    lending.mailbox.mail,
                    lent,
                    lending.start,
                    executor.device.partitions.lanes,
                    executor.device.beside(),
                    executor.operations,
                    borrow.pid,
                    on_this_loop(ended),
                    launches=borrow.control == "iterations",
                )
            except BaseException:
                lending.close()  # nobody has been told of it
                raise
        self._service = _Service(executor, lending, attender)
        return lending.loan

    def waits(self) -> Waits | None:
        """Nobody measures them: they are over before a host could look."""
        return None

    def recall(self) -> bool:
        if self._service is None:
            return True
        if not self._service.end():
            return False
        self._kept.append(self._service.lending)
        self._service = None
        return True

    def _gone(self, borrowed: BorrowedDeviceBlocks) -> None:
        """The lender's process has ended: who waits for it need not."""
        asyncio.get_running_loop().remove_reader(borrowed.process)
        self._executor.device.enter()
        with self._beside.entered():
            borrowed.mailbox.fail(Trouble.GONE)


@contextmanager
def _room(what: str) -> Iterator[None]:
    """For what a loan needs of the device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unavailable(
            f"{what}: the device has no memory for a mailbox beside the pool; less kv_memory is right"
        ) from error

"""A GPU's part in lending and borrowing: puts mailboxes, attention servers and executor together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import torch

from kvloom.kernels.mailbox import LentArena, Trouble
from kvloom.kv.arena import ArenaMemory
from kvloom.offload.cuda.attention_server import CudaAttentionServer, PolledLane, Serve
from kvloom.offload.memory.device import BorrowedDeviceBlocks, DeviceLending
from kvloom.offload.terms import Borrow, Loan, on_this_loop, one_number, watched
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.load import Waits

LOOKS: Final = 20_000_000  # of a `collect`, some ten seconds: a lender's first task finds its kernel compiled
_log = logging.getLogger(__name__)


class ExecutorLoans(Protocol):
    """The part that the executor's forwards have in loans."""

    def lend(self, server: CudaAttentionServer | None) -> None: ...
    def borrow(self, model: str, loan: BorrowedDeviceBlocks, looks: int) -> None: ...
    def give_back(self, model: str) -> BorrowedDeviceBlocks: ...


class CudaExecutor(Protocol):
    """The part of the executor that lending and borrowing need."""

    arena: ArenaMemory

    @property
    def loans(self) -> ExecutorLoans: ...

    @property
    def lanes(self) -> Sequence[PolledLane]:
        """The lanes that forwards run on."""

    @property
    def serve(self) -> Serve: ...

    def beside(self) -> PolledLane:
        """Returns a new lane beside those of forwards."""

    def enter(self) -> None:
        """Lets the calling thread use the device."""

    def heads(self, model: str) -> int:
        """Returns the heads of q in all layers; 0 if they differ."""


class _Service:
    """A loan to another unit, with a thread of its own for what has to wait for jobs."""

    def __init__(self, executor: CudaExecutor, lending: DeviceLending, server: CudaAttentionServer) -> None:
        self.lending = lending
        self._executor = executor
        self._server = server
        self._thread = ThreadPoolExecutor(1, "weave-end")
        self._thread.submit(self._begin)
        self._ended: Future[None] | None = None

    def end(self) -> bool:
        """Returns True once no task is done any more and the borrower copies nothing; before, ask again."""
        if self._ended is None:
            self._ended = self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
        return self._ended.done() and self.lending.close()

    def _begin(self) -> None:
        self._set(self._server)

    def _end(self) -> None:
        try:
            self._executor.enter()
            self._server.close()
        finally:
            self._set(None)

    def _set(self, server: CudaAttentionServer | None) -> None:
        try:
            self._executor.enter()
            self._executor.loans.lend(server)
        except Exception:  # noqa: BLE001 -- a device that has failed; its unit is about to end
            _log.exception("weave: what forwards poll for could not be changed")


class CudaOffloadBackend:
    """Satisfies `OffloadBackend`: one loan to another unit, and one to each own model."""

    def __init__(self, executor: CudaExecutor, transport: CudaIpcTransport, looks: int = LOOKS) -> None:
        """looks: those of a step for a layer's attention."""
        self._executor = executor
        self._transport = transport
        self._looks = looks
        self._beside = executor.beside()
        self._service: _Service | None = None
        self._kept: list[DeviceLending] = []  # over, but their borrowers may still write to the mailbox

    def heads(self, model: str) -> int:
        return one_number(model, self._executor.heads(model))

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        self._executor.enter()
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
        self._executor.enter()
        with self._beside.entered():
            borrowed.close()
            self._beside.mark().wait()

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self._service is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        executor = self._executor
        executor.enter()
        self._kept = [one for one in self._kept if not one.unused]
        form = borrow.form
        arena = executor.arena.view(form.head_dim, getattr(torch, form.dtype))
        with watched(borrow), _room("lend"):
            lent = LentArena(torch.from_numpy(blocks).to(arena.device), arena)
            lending = DeviceLending(borrow, blocks, self._transport, executor.arena.bytes)
            try:
                server = CudaAttentionServer(
                    lending.mailbox.tensors,
                    lent,
                    lending.start,
                    executor.lanes,
                    executor.beside(),
                    executor.serve,
                    borrow.pid,
                    on_this_loop(ended),
                    launches=borrow.control == "iterations",
                )
            except BaseException:
                lending.close()  # nobody has been told of it
                raise
        self._service = _Service(executor, lending, server)
        return lending.loan

    def waits(self) -> Waits | None:
        """Returns None: tasks are over before a host could look."""
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
        """Lets nobody wait for a lender whose process has ended."""
        asyncio.get_running_loop().remove_reader(borrowed.process)
        self._executor.enter()
        with self._beside.entered():
            borrowed.mailbox.fail(Trouble.GONE)


@contextmanager
def _room(what: str) -> Iterator[None]:
    """Goes around taking device memory for a loan. Raises Unavailable if there is none."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unavailable(
            f"{what}: the device has no memory for a mailbox beside the pool; less kv_memory is right"
        ) from error

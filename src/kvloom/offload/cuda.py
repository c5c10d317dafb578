"""Lends and borrows between two units of one GPU, or of two of which one reaches the other's memory. A server
attends for another unit between the operators of this unit's own forwards (Weaver, section 4.1). A backend
puts mailboxes, server and executor together. Before anything is lent, a hot unit checks whether its machine
can do that."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, Protocol

import torch

from kvloom.kernels.driver import Driver, DriverError
from kvloom.kernels.mailbox import End, LenderState, LentArena, MailboxTensors, Trouble
from kvloom.kv.arena import ArenaMemory
from kvloom.offload.memory.device import BorrowedDeviceBlocks, DeviceLending
from kvloom.offload.memory.mailbox import START
from kvloom.offload.terms import Borrow, Loan, on_this_loop, one_number, watched
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from kvloom.types.clock import has_ended
from kvloom.types.errors import ConfigError, Conflict, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.load import Waits
from kvloom.types.spec import gpu_index

LOOKS: Final = 20_000_000  # of a `collect`, some ten seconds: a lender's first task finds its kernel compiled
_log = logging.getLogger(__name__)
_IDLE_LOOKS = 500  # of a launch while no forward runs: half a millisecond, for which one that begins waits
_SLICE = 0.05  # seconds between two looks at whether the borrower lives
_LIVELY = 64  # launches of the thread after a task, one after the other
_PAUSE = 0.002  # seconds between those after them
_COMES = 30.0  # seconds for the borrower to map the mailbox: it may be unable to


Serve = Callable[..., None]
"""Makes the current stream look for a task, as often as said, and do it. It takes MailboxTensors, LenderState
and LentArena."""


class StreamPoint(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None: ...


class PolledLane(Protocol):
    """A stream of the device. A thread that gives it work holds the lock."""

    lock: threading.Lock

    def entered(self) -> AbstractContextManager[object]: ...
    def mark(self) -> StreamPoint: ...


class CudaAttentionServer:
    """Serves the tasks of one loan on the device. Each is done by the launch that finds it: one from a
    forward of our own models, which polls between its operators (`polled`), or, while no forward runs, one
    from a thread.

    ended: called once, on any thread, with the reason, when the borrower has left, is gone or breaks the
    rules; not by `close`. From then on no lent block is touched."""

    def __init__(
        self,
        mailbox: MailboxTensors,
        lent: LentArena,
        start: int,
        lanes: Sequence[PolledLane],
        idle: PolledLane,
        serve: Serve,
        enter: Callable[[], None],
        borrower: int,
        ended: Callable[[str], None],
        looks: int = _IDLE_LOOKS,
        comes: float = _COMES,
        *,
        launches: bool = False,
    ) -> None:
        """start: the number at which the mailbox' counters begin. lanes: those of forwards. idle: the lane of
        the server's thread. enter: lets the calling thread use the device. borrower: its process' id. comes:
        the seconds within which it must have mapped the mailbox, or the loan ends. launches: whether tasks
        wait until the host launches them, between two forwards (the paper's baseline, control by the CPU).
        Raises OSError if the borrower is gone."""
        self.launches = launches
        self._mailbox = mailbox
        self._lent = lent
        self._lanes = list(lanes)
        self._idle = idle
        self._serve = serve
        self._enter = enter
        self._ended = ended
        self._looks = looks
        self._state = LenderState(start, mailbox)
        self._ending = threading.Lock()  # over `_over`
        self._over = False
        self._working = 0
        self._lively = _LIVELY
        self._claim = int(self._state.claim)
        self._due = time.monotonic() + comes
        self._free = threading.Condition()
        self._resting = threading.Lock()  # a launch of the thread's
        self._process = os.pidfd_open(borrower)  # the thread closes it
        self._thread = threading.Thread(target=self._watch, name="weave", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Looks for a task once, on the current stream; may be recorded."""
        self._serve(self._mailbox, self._state, self._lent)

    @contextmanager
    def polled(self) -> Iterator[None]:
        """A context around a forward that polls."""
        with self._free:
            self._working += 1
        with self._resting:
            pass  # what the thread has launched is over
        try:
            yield
        finally:
            with self._free:
                self._working -= 1
                self._free.notify_all()

    @property
    def over(self) -> End:
        """The reason why no more tasks are taken, as the device has noted it."""
        return End(int(self._state.over))

    def close(self) -> None:
        """Takes no more tasks; when it returns, none is under way. Waits for what lanes have been asked
        for."""
        self._end(End.CLOSED, None)
        self._thread.join()

    def _watch(self) -> None:
        try:
            self._enter()
            while not self._over:
                self._rest()
                if self.over is End.FORGED:
                    self._end(End.FORGED, "the borrower has written what cannot be")
                elif int(self._mailbox.word("left")) or has_ended(self._process):
                    self._end(End.CLOSED, "the borrower has left")
                elif time.monotonic() > self._due and not int(self._mailbox.word("waiting")):
                    self._end(End.CLOSED, "the borrower has not come")
        except RuntimeError as error:  # the device has failed; its unit is about to end
            _log.error("weave: %s", " ".join(str(error).split())[:200])
        finally:
            os.close(self._process)
            self._end(End.FAILED, "this unit failed to look for tasks")

    def _rest(self) -> None:
        """Polls while no forward runs, with a pause if no task has come lately, and waits while one does."""
        with self._free:
            if self._working or not self._lively:
                self._free.wait(_SLICE if self._working else _PAUSE)
        with self._resting:
            if self._working or self._over:
                return
            with self._idle.entered():
                self._serve(self._mailbox, self._state, self._lent, self._looks)
            self._idle.mark().wait()
        claim = int(self._state.claim)
        self._lively = max(0, self._lively - 1) if claim == self._claim else _LIVELY
        self._claim = claim

    def _end(self, why: End, reason: str | None) -> None:
        """Ends the loan. A device that has failed does no more tasks either."""
        with self._ending:
            if self._over:
                return
            self._over = True
            with suppress(RuntimeError):
                self._settle(why)
        if reason is not None:
            with suppress(RuntimeError):  # the loop that it would tell is closed
                self._ended(reason)

    def _settle(self, why: End) -> None:
        """Waits until the device takes and does no tasks; then tells the borrower."""
        if self.over is End.NONE:
            self._state.over.fill_(why)
        over = self.over  # the device has it
        for lane in (*self._lanes, self._idle):
            with lane.lock:
                mark = lane.mark()
            mark.wait()
        self._mailbox.word("over").fill_(over)


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
    """A loan to another unit, with a thread of its own for work that has to wait for jobs."""

    def __init__(self, executor: CudaExecutor, lending: DeviceLending, server: CudaAttentionServer) -> None:
        self.lending = lending
        self._executor = executor
        self._server = server
        self._thread = ThreadPoolExecutor(1, "weave-end")
        self._thread.submit(self._begin)
        self._ended: Future[None] | None = None

    def end(self) -> bool:
        """Returns True once no task is done any more and the borrower copies nothing. Until then the caller
        asks again."""
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
        """looks: how often a step looks for the output of a layer's attention."""
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
                    START,
                    executor.lanes,
                    executor.beside(),
                    executor.serve,
                    executor.enter,
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
        """Returns None, because tasks are over before a host could look."""
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
        """Fails the tasks of a lender whose process has ended, so that nobody waits for them."""
        asyncio.get_running_loop().remove_reader(borrowed.process)
        self._executor.enter()
        with self._beside.entered():
            borrowed.mailbox.fail(Trouble.GONE)


@contextmanager
def _room(what: str) -> Iterator[None]:
    """A context in which device memory is taken for a loan. Raises Unavailable if there is too little."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unavailable(
            f"{what}: the device has no memory for a mailbox beside the pool; less kv_memory is right"
        ) from error


# -- what two units of GPUs need of the machine ----------------------------------------------------------


def require_lenders(driver: Driver, device: torch.device, gpus: Sequence[str]) -> None:
    """Raises ConfigError if a unit of `device` cannot borrow from units of these GPUs: on its own one MPS has
    to run, and another one's memory has to be within its reach."""
    for index in dict.fromkeys(map(gpu_index, gpus)):
        if index == (device.index or 0):
            require_mps(driver, device)
        else:
            require_peers(driver, device, index)


def require_peers(driver: Driver, device: torch.device, other: int) -> None:
    """Raises ConfigError unless kernels of `device` load and store in the memory of GPU `other`, where a
    lender's arena and mailbox lie, and atomics reach it: the mailbox' words are loaded and stored by them."""
    try:
        ours, theirs = (driver("cuDeviceGet", one) for one in (device.index or 0, other))
        reached = bool(int(driver("cuDeviceCanAccessPeer", ours, theirs)))
        kind = driver.api.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        atomic = reached and bool(int(driver("cuDeviceGetP2PAttribute", kind, ours, theirs)))
    except DriverError as error:
        raise ConfigError(
            f"weave: whether {device} reaches the memory of cuda:{other} cannot be told: {error}"
        ) from error
    if not atomic:
        lack = "reaches it without atomics" if reached else "has no peer access to it"
        raise ConfigError(
            f"weave: the mailbox would lie in the memory of cuda:{other}, and {device} {lack}; two GPUs that "
            "NVLink joins (nvidia-smi topo -m), or both units on one GPU with MPS, are right"
        )


def require_mps(driver: Driver, device: torch.device) -> None:
    """Raises ConfigError unless MPS runs kernels of several processes on the GPU side by side. Without it
    processes have the GPU in turns, and a kernel that waits for another process' attention spins through its
    whole turn, once in each layer."""
    index = device.index or 0
    try:
        driver.enter(index)
        number = driver("cuDeviceGet", index)
        attribute = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        if int(driver("cuDeviceGetAttribute", attribute, number)):
            return
    except DriverError as error:
        raise ConfigError(f"weave: whether MPS runs on {device} cannot be told: {error}") from error
    raise ConfigError(
        f"weave: two units on {device} without MPS have it by turns, and wait for each other through them; "
        "MPS before the fleet starts (nvidia-cuda-mps-control -d), or no `weave`, is right"
    )

"""The thread that copies for the transfers of one unit, and what a transfer is on it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import msgspec

from kvloom.types.address import Endpoint, EndpointKind, KVAddress
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.transfer import BlockCopies, DeviceEvent, Transfer, TransferMeter, TransferState

_log = logging.getLogger(__name__)

Order = TypeVar("Order")
Where = TypeVar("Where")
Submit = Callable[["PlaneTransfer", BlockCopies | None], None]


def address_of(endpoint: Endpoint, kind: EndpointKind, form: type[Where]) -> Where:
    """Returns what an endpoint of this kind says. Raises BadRequest if it is of another, or cannot be
    read."""
    if endpoint.kind != kind:
        raise BadRequest(
            f"peer: {endpoint.unit} moves K and V by {endpoint.kind}, this unit by {kind}; units of one kind "
            "are right"
        )
    try:
        return msgspec.msgpack.decode(endpoint.where, type=form)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"peer: the endpoint of {endpoint.unit} cannot be read: {error}") from error


class PlaneTransfer(Transfer):
    """A transfer whose copies a thread makes, and which the event loop that claimed it waits for."""

    def __init__(self, submit: Submit, peer: Endpoint, address: KVAddress, begin: int, end: int) -> None:
        """submit: queues copies, or, with None, the end: all that was put has been queued, or nothing more is
        to be copied. The thread answers the end with `settle`, once."""
        super().__init__(peer, address, begin, end)
        self._submit = submit
        self._loop = asyncio.get_running_loop()
        self._settled: asyncio.Future[KvloomError | None] = self._loop.create_future()
        self._ended = False
        self._abandoned = False
        self._failure: KvloomError | None = None

    def put(self, copies: BlockCopies) -> None:
        try:
            after = self._event()
        except RuntimeError as error:  # the device has failed
            self.fail(self.not_computed(error))
            return
        self._submit(self, copies if after is None else replace(copies, after=after))

    def _event(self) -> DeviceEvent | None:
        """Returns the point in the calling thread's work for the device after which the blocks that it puts
        are written; None if they are already. Raises RuntimeError if the device has failed."""
        return None

    async def arrived(self) -> None:
        self._end()
        failure = await asyncio.shield(self._settled)
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        self._abandoned = True
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._submit(self, None)

    # on the transport's thread

    @property
    def failure(self) -> KvloomError | None:
        """Why there is nothing to copy any more; None if there may be something."""
        return BadRequest("the send was given up") if self._abandoned else self._failure

    def fail(self, error: KvloomError) -> None:
        """Notes why the transfer fails. The first reason counts."""
        self._failure = self._failure or error

    def not_computed(self, error: RuntimeError) -> Unavailable:
        return Unavailable(f"what is to be sent was not computed: {error}")

    def refuse(self, error: KvloomError) -> None:
        """Ends the transfer, on any thread, once the transport's thread has ended."""
        self.fail(error)
        self.settle(self.failure)

    def settle(self, failure: KvloomError | None) -> None:
        """Ends the transfer: nothing is copied any more. The first call counts."""
        if self.over:
            return
        self.become(TransferState.ARRIVED if failure is None else TransferState.FAILED)
        with suppress(RuntimeError):  # the loop is closed, and with it all who waited
            self._loop.call_soon_threadsafe(self._resolve, failure)

    def _resolve(self, failure: KvloomError | None) -> None:
        if not self._settled.done():
            self._settled.set_result(failure)


class TransferWorker(ABC, Generic[Order]):
    """Takes copies and orders off one queue, until it is closed or a step raises what nobody foresaw. From
    then on all transfers fail with the reason, those that are put later too; none waits for ever."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[PlaneTransfer, BlockCopies | None] | Order | None] = SimpleQueue()
        self.meter = TransferMeter()
        self._closing = False
        self._over: str | None = None  # why there is no thread any more
        self._refusing = threading.Lock()
        # A daemon, or a process that forgets to close would wait for it for ever. It ends before Python does:
        # one that comes back from C++ for the GIL later than that takes the process down.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, transfer: PlaneTransfer, copies: BlockCopies | None) -> None:
        self.order((transfer, copies))

    def order(self, order: tuple[PlaneTransfer, BlockCopies | None] | Order) -> None:
        """Queues an order. Once there is no thread any more nobody follows it."""
        self._queue.put(order)
        if self._over is not None:
            self._refuse_rest()

    def refuse_over(self) -> None:
        """Raises Unavailable if there is no thread any more."""
        if self._over is not None:
            raise Unavailable(self._over)

    def close(self) -> None:
        """Ends the thread. Transfers that have not arrived fail."""
        atexit.unregister(self.close)
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    # for those that say what the thread does

    def _start(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def _begin(self) -> None:
        """Prepares the thread, before its first step."""

    @abstractmethod
    def _step(self) -> None:
        """Takes what there is, or waits for it a while, and does it. The thread calls this again and
        again."""

    @abstractmethod
    def _left(self) -> list[PlaneTransfer]:
        """Lets go of all that the thread knew, on any thread once it has ended, and returns the transfers of
        which nothing more would be submitted."""

    # private

    def _run(self) -> None:
        over = "this unit is stopping"
        try:
            self._begin()
            while not self._closing:
                self._step()
        except Exception as error:  # noqa: BLE001 -- nobody else would hear of it
            _log.exception("thread %s has failed: K and V move no more from here", self._thread.name)
            over = f"the KV plane of this unit has failed ({error!r}); restart the unit"
        self._over = over  # whoever puts something after this sees it, and what was put before is here
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        with self._refusing:
            rest = self._left()
            with suppress(Empty):
                while True:
                    match self._queue.get_nowait():
                        case PlaneTransfer() as transfer, None:
                            rest.append(transfer)
            for transfer in rest:
                try:
                    transfer.refuse(Unavailable(self._over or ""))
                except Exception:  # noqa: BLE001 -- the others still wait
                    _log.exception("thread %s: a transfer was refused in part", self._thread.name)

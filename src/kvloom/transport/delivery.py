"""A shipment as its sender's event loop sees it; a thread of the transport does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvloom.types.errors import BadRequest, KvloomError
from kvloom.types.transfer import Parcel

Submit = Callable[["Delivery", Parcel | None], None]


class Delivery:
    """Implements Shipment. submit(delivery, parcel) queues a parcel, or, with None, the end: all that was
    put has been queued, or nothing more is to be copied. The thread answers it with `settle`, once."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._loop = asyncio.get_running_loop()
        self._settled: asyncio.Future[KvloomError | None] = self._loop.create_future()
        self._ended = False
        self._abandoned = False
        self._failure: KvloomError | None = None

    def put(self, parcel: Parcel) -> None:
        self._submit(self, parcel)

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
        """Why there is nothing to copy any more."""
        return BadRequest("the send was given up") if self._abandoned else self._failure

    def fail(self, error: KvloomError) -> None:
        """The first reason counts."""
        self._failure = self._failure or error

    def refuse(self, error: KvloomError) -> None:
        """The end, on any thread, once the transport's has ended."""
        self.fail(error)
        self.settle(self.failure)

    def settle(self, failure: KvloomError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it all who waited
            self._loop.call_soon_threadsafe(self._resolve, failure)

    def _resolve(self, failure: KvloomError | None) -> None:
        if not self._settled.done():
            self._settled.set_result(failure)

"""A thread of the KV plane, and what becomes of shipments once it has ended."""

from __future__ import annotations

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from kvloom.transport.delivery import Delivery
from kvloom.types.errors import Unavailable
from kvloom.types.transfer import Parcel

_log = logging.getLogger(__name__)

Order = TypeVar("Order")


class Worker(ABC, Generic[Order]):
    """Takes parcels and orders off one queue, until it is closed or a step raises what nobody foresaw. From
    then on all shipments fail with the reason, those that are put later too; none waits for ever."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Delivery, Parcel | None] | Order | None] = SimpleQueue()
        self._closing = False
        self._over: str | None = None  # why there is no thread any more
        self._refusing = threading.Lock()
        # A daemon, or a process that forgets to close would wait for it for ever. It ends before Python does:
        # one that comes back from C++ for the GIL later than that takes the process down.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, shipment: Delivery, parcel: Parcel | None) -> None:
        self._put((shipment, parcel))

    def order(self, order: Order) -> None:
        """Once there is no thread any more nobody follows it."""
        self._put(order)

    def refuse_over(self) -> None:
        """Raises Unavailable where there is no thread any more."""
        if self._over is not None:
            raise Unavailable(self._over)

    def close(self) -> None:
        """End the thread. Shipments that have not arrived fail."""
        atexit.unregister(self.close)
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    # for those that say what the thread does

    def _start(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def _begin(self) -> None:
        """On the thread, before its first step."""

    @abstractmethod
    def _step(self) -> None:
        """On the thread: take what there is, or wait for it a while, and do it."""

    @abstractmethod
    def _left(self) -> list[Delivery]:
        """On any thread once this one has ended: let go of all it knew, and return the shipments of which
        nothing more would be submitted."""

    # private

    def _put(self, task: tuple[Delivery, Parcel | None] | Order) -> None:
        self._queue.put(task)
        if self._over is not None:
            self._refuse_rest()

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
                        case Delivery() as shipment, None:
                            rest.append(shipment)
            for shipment in rest:
                try:
                    shipment.refuse(Unavailable(self._over or ""))
                except Exception:  # noqa: BLE001 -- the others still wait
                    _log.exception("thread %s: a shipment was refused in part", self._thread.name)

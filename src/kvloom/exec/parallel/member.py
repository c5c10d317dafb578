"""A rank but the first, as its own process sees it: orders come from the first rank, and it ends with
that."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from kvloom.exec.parallel.group import RankGroup, connect
from kvloom.exec.parallel.wire import Go, Order, RankReady, RankRefused, StartRank, Wire
from kvloom.types.errors import ConfigError

_log = logging.getLogger(__name__)


class Member:
    """Receives what the first rank says on a thread of its own, which ends the process with the first
    rank."""

    group: RankGroup

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def next(self) -> Order:
        return self._orders.get()

    def meet(self) -> None:
        self._wire.send(RankReady())
        order = self.next()
        assert isinstance(order, Go)

    def join(self, begin: StartRank, device: torch.device) -> None:
        """Finds the other ranks, once this one can compute on `device`; they look for it too. Raises
        Unavailable."""
        self.meet()
        self.group = connect(begin.store, begin.rank, begin.size, begin.slots, device)

    def refuse(self, error: ConfigError) -> None:
        self._wire.send(RankRefused(error.message))

    def _listen(self) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(Order)
            while (message := self._wire.receive()) is not None:
                self._orders.put(decoder.decode(message))
        finally:
            os._exit(0)


def check(ran: Future[Any]) -> None:
    """Ends the process after a failure: the ranks are not in step any more, and the first one has to know."""
    error = ran.exception()
    if error is not None:
        _log.error("a job failed", exc_info=error)
        sys.stderr.flush()
        os._exit(1)

"""The parent of a fleet's process, as that process sees it: a supervisor, or a keeper."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import msgspec

from kvloom.journal.log import Outbox
from kvloom.serve.processes.log import log_to_parent
from kvloom.serve.processes.messages import Alive, ChildReport, Order, OrderRefused, Told
from kvloom.serve.processes.prefork import ORDERS
from kvloom.types.errors import ConfigError, Unavailable

_log = logging.getLogger(__name__)
LAST_SECONDS: Final = 4.0
BEAT_SECONDS: Final = 0.5
PIECE: Final = 1 << 16  # bytes that are read at once

AnyOrder = TypeVar("AnyOrder", bound=Order)


class Parent:
    """The supervisor of this process: it gives orders and takes reports, and may be gone at any time; then
    this process ends too."""

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._rest = b""  # What was read beyond the last order.
        os.set_inheritable(reports, False)

    def next_order(self, kind: type[AnyOrder]) -> AnyOrder:
        """Waits for the next order. Raises SystemExit if the supervisor ends without giving one."""
        while b"\n" not in self._rest:
            piece = os.read(ORDERS, PIECE)
            if not piece:
                raise SystemExit(0)
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def watch(self, folder: Path, heed: Callable[[Told], None] = lambda _: None) -> None:
        """Hands what still comes to `heed`, on a thread of its own. When the supervisor is gone, its `folder`
        is removed, and this process gets a SIGTERM; if it still lives some seconds later it is ended."""
        arguments = folder, heed, self._rest
        threading.Thread(target=_end_with_parent, args=arguments, name="parent", daemon=True).start()

    def report(self, report: ChildReport) -> None:
        with suppress(BrokenPipeError):  # it is gone, which `watch` sees
            os.write(self._reports, msgspec.json.encode(report) + b"\n")

    async def beat(self, outbox: Outbox | None = None, seconds: float = BEAT_SECONDS) -> None:
        """Reports again and again that the event loop turns, and what the outbox has for the journal, until
        it is cancelled. A report for which the pipe has no room is left out, or waits in the outbox, because
        it would hold up the loop: the supervisor reads nothing now."""
        room = select.poll()
        room.register(self._reports, select.POLLOUT)
        try:
            while True:
                if room.poll(0):
                    self.report(Alive())
                self._note(outbox, room)
                await asyncio.sleep(seconds)
        finally:
            self._note(outbox, room)

    def _note(self, outbox: Outbox | None, room: select.poll) -> None:
        while outbox is not None and room.poll(0) and (noted := outbox.next()) is not None:
            self.report(noted)


def _end_with_parent(folder: Path, heed: Callable[[Told], None], rest: bytes) -> None:
    piece = b""
    while True:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            heed(msgspec.json.decode(line, type=Told))
        if not (piece := os.read(ORDERS, PIECE)):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(LAST_SECONDS)
    os._exit(1)


def _is_logged(record: logging.LogRecord) -> bool:
    """Returns whether a log record is kept: uvicorn prints a traceback for each answer that it gives up when
    it ends, and says how many."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def run_child(main: Callable[[Parent], None]) -> NoReturn:
    """Runs a child process from its start to its end. The first argument is the descriptor for
    reports; the second, the process's name, is for whoever lists processes."""
    log_to_parent()
    logging.getLogger("uvicorn.error").addFilter(_is_logged)
    parent = Parent(int(sys.argv[1]))
    code = 0
    try:
        main(parent)
    except ConfigError as error:
        parent.report(OrderRefused(error.message))
        code = 2
    except Unavailable as error:
        end_at_once(error.message)
    _exit(code)  # all is closed; taking torch's modules apart would cost another second


def keep_out_of_collections() -> None:
    """Keeps all that is imported and loaded by now out of later garbage collections. Each of them would visit
    hundreds of thousands of objects that stay, and hold up every stream of the process meanwhile."""
    gc.collect()
    gc.freeze()


def end_at_once(why: str) -> NoReturn:
    """Ends the process, because something that it cannot do without is gone; another one takes its place."""
    _log.error("%s", why)
    _exit(1)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)

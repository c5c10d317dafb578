"""Logging that neither blocks nor raises, whatever happens to the place that it is written to."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TextIO

ACCESS: Final = "kvloom.access"
"""The logger of a line for each request, of which all are wanted."""
BREAK: Final = "\x1f"
"""Stands for a line's end inside a record that a process prints for its parent."""
FORMAT: Final = "%(levelname)s %(name)s: %(message)s"
MOST_WAITING: Final = 10_000  # lines
WINDOW_SECONDS: Final = 60.0
MOST_ALIKE: Final = 20  # lines of one place in the code in a window
CLOSE_SECONDS: Final = 1.0


class Background:
    """Calls functions on a thread of its own, one after the other. There they may block, or fail: a call that
    fails is lost, and the next one is tried."""

    def __init__(self, name: str, tell_lost: Callable[[int], object]) -> None:
        """tell_lost: is called on the thread, after the next call that succeeds, with what was lost."""
        self._tell_lost = tell_lost
        self._calls: queue.Queue[tuple[Callable[[], object], int] | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], object], of: int = 1) -> None:
        """Lets the thread call a function soon. If too many wait already, it is lost. of: the number of lines
        for which it counts then."""
        try:
            self._calls.put_nowait((call, of))
        except queue.Full:
            self._lose(of)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Waits until all that was posted is done, for some seconds at most. Returns whether it is, and the
        last call has not failed."""
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self._lost

    @property
    def lost(self) -> int:
        """The number of lost lines that has not been told yet."""
        return self._lost

    @property
    def busy(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (posted := self._calls.get()) is not None:
            call, of = posted
            with self._counting:
                lost, self._lost = self._lost, 0
            try:
                call()
                of = 0
                if lost:
                    self._tell_lost(lost)
            except (OSError, ValueError, SystemExit):  # rich ends the process if nobody reads a pipe
                self._lose(lost + of)

    def _lose(self, count: int) -> None:
        with self._counting:
            self._lost += count


@dataclass(slots=True)
class _Alike:
    """The records of one place in the code in one window."""

    begun: float
    record: logging.LogRecord
    count: int = 0


class LogHandler(logging.Handler):
    """Writes records in the background. Of those that one place in the code logs by the hundred it writes the
    first ones and then how many more there were, and of each cause one traceback a minute."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        """write: takes a line, or lines, on the background's thread."""
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._write = write
        self._clock = clock
        self._alike: dict[tuple[str, int], _Alike] = {}
        self._told: dict[str, float] = {}  # when each cause's traceback was written
        self._background = Background(
            "log", lambda lost: write(f"WARNING kvloom: {lost} lines of the log were lost")
        )

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._end_windows(now)
        if record.name == ACCESS:
            self._post(self.format(record))
            return
        place = record.pathname, record.lineno
        alike = self._alike.setdefault(place, _Alike(now, record))
        alike.count += 1
        if alike.count <= MOST_ALIKE:
            self._post(self._formatted(record, now))

    def close(self) -> None:
        self._end_windows(float("inf"))
        self._background.close()
        super().close()

    def _end_windows(self, now: float) -> None:
        over = [place for place, alike in self._alike.items() if now - alike.begun >= WINDOW_SECONDS]
        for place in over:
            alike = self._alike.pop(place)
            if (more := alike.count - MOST_ALIKE) > 0:
                first = alike.record
                self._post(f"{first.levelname} {first.name}: {more} more like: {first.getMessage()}")

    def _formatted(self, record: logging.LogRecord, now: float) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return self.format(record)
        error = record.exc_info[1]
        cause = f"{type(error).__qualname__} {_origin(error.__traceback__)}"
        if now - self._told.get(cause, -WINDOW_SECONDS) >= WINDOW_SECONDS:
            self._told[cause] = now
            return self.format(record)
        said = record.getMessage().strip()
        return f"{record.levelname} {record.name}: {said}: {type(error).__name__}: {error}"

    def _post(self, text: str) -> None:
        self._background.post(lambda: self._write(text))


def _origin(trace: TracebackType | None) -> str:
    """Returns the place in the code that raised an exception."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def line_writer(stream: TextIO) -> Callable[[str], None]:
    """Returns a function that writes a line to a stream, and raises OSError if that fails."""

    def write(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    return write


def log_to(write: Callable[[str], object]) -> LogHandler:
    """Lets all of this process's log be written by `write` in the background. Close it at the end."""
    handler = LogHandler(write)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return handler


def log_to_stderr() -> LogHandler:
    return log_to(line_writer(sys.stderr))


def log_to_parent() -> LogHandler:
    """Lets each record be one line on stderr, with its traceback, so that the parent knows where it ends."""
    write = line_writer(sys.stderr)
    return log_to(lambda text: write(BREAK.join(text.splitlines())))

"""The file in which a host's gateways keep the traffic, and what writes it there."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvloom.journal.traffic import (
    HOUR,
    TrafficCounts,
    TrafficHour,
    add_up,
    decode_hours,
    encode_hours,
)
from kvloom.types.clock import Clock
from kvloom.types.files import replacing
from kvloom.types.numbers import show_count

KEPT_HOURS: Final = 35 * 24
MOST_BYTES: Final = 64 << 20
PERIOD: Final = 60.0  # seconds between two writings
_SLACK: Final = 1 << 20  # bytes that may be appended before the file is made anew
_log = logging.getLogger(__name__)


class TrafficLog:
    """A file to which parts of hours are appended, a line each, for its owner's eyes alone. Several processes
    may write to it: who writes, or makes it anew, holds its lock.

    Now and then it is made anew, with the parts of each hour added up, and without hours that are older than
    KEPT_HOURS; if it has more than `most` bytes even then, without the oldest ones."""

    def __init__(self, path: Path, *, most: int = MOST_BYTES) -> None:
        """`most` is the bound of the file, in bytes."""
        self.path = path
        self._most = most
        self._next = 0
        """The size from which on the file is made anew. That is tried with the first writing."""

    def add(self, parts: Sequence[TrafficHour], now: float) -> None:
        """Appends parts of hours. `now` is in seconds since the epoch. May block for as long as a disk does.
        Raises OSError if they cannot be appended; that the file cannot be made anew is logged."""
        with self._locked() as file:
            lines, size = encode_hours(parts), os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # somebody died while writing
                lines = b"\n" + lines
            text = memoryview(lines)
            while text:
                text = text[os.write(file, text) :]
            size += len(lines)
            if size < self._next:
                return
            try:
                size = self._make_anew(file, now)
            except OSError as error:  # the parts are in the file: who wrote them again would count them twice
                _log.warning("%s: the traffic log cannot be made anew: %s", self.path, error.strerror)
            self._next = size + _SLACK

    def read(self) -> list[TrafficHour]:
        """Returns all hours, added up. Lines that are damaged are left out, with a warning. Raises OSError,
        but not if there is no file, which says that there was no traffic."""
        try:
            lines = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return add_up(self._decoded(lines))

    def _decoded(self, lines: bytes) -> list[TrafficHour]:
        found, damaged = decode_hours(lines)
        if damaged:
            _log.warning("%s: %s of the traffic log left out", self.path, show_count(damaged, "damaged line"))
        return found

    def _make_anew(self, file: int, now: float) -> int:
        """Returns the file's size after that. `file` is its descriptor, which is locked."""
        lines = os.pread(file, os.fstat(file).st_size, 0)
        oldest = int(now) - KEPT_HOURS * HOUR
        hours = [hour for hour in add_up(self._decoded(lines)) if hour.hour >= oldest]
        made = [encode_hours([hour]) for hour in hours]
        size, first = sum(map(len, made)), 0
        while size > self._most:
            size -= len(made[first])
            first += 1
        with replacing(self.path) as anew:
            anew.write(b"".join(made[first:]))
        return size

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Gives a descriptor of the file, which is made if it is not there. Another process that held the
        lock may have put another file in its place meanwhile; then that one is taken."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        while True:
            file = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self.path.exists() and os.path.samestat(os.fstat(file), self.path.stat()):
                    yield file
                    return
            finally:
                os.close(file)


async def _nobody() -> list[TrafficHour]:
    return []


class TrafficKeeper:
    """Keeps the counts of one gateway in its host's log, and tells what the fleet was asked."""

    def __init__(
        self,
        counts: TrafficCounts,
        log: TrafficLog,
        others: Callable[[], Awaitable[Sequence[TrafficHour]]] = _nobody,
    ) -> None:
        """`others` asks the gateways of other hosts."""
        self._counts = counts
        self._log = log
        self._others = others
        self._writing = asyncio.Lock()

    async def run(self, clock: Clock) -> None:
        """Writes once a minute until it is cancelled."""
        while True:
            await clock.sleep(PERIOD)
            await self.write()

    async def write(self) -> None:
        """Writes what was counted since the last time, on a thread, so that no stream waits for the disk.
        What cannot be written is kept for the next time."""
        async with self._writing:
            parts = self._counts.take()
            if not parts:
                return
            try:
                await asyncio.to_thread(self._log.add, parts, time.time())
            except OSError as error:
                _log.warning("%s: the traffic log cannot be written: %s", self._log.path, error.strerror)
                for part in parts:
                    self._counts.put(part)

    async def here(self) -> list[TrafficHour]:
        """Returns what this host's gateways were asked. Raises OSError."""
        await self.write()
        return await asyncio.to_thread(self._log.read)

    async def everywhere(self) -> list[TrafficHour]:
        """Returns what the fleet's gateways were asked, as far as they answer. Raises OSError."""
        return add_up([*await self.here(), *await self._others()])

"""The results of a figure's runs, kept in files as runs end, so that a figure of hours may be interrupted."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec
from msgspec import Struct

P = TypeVar("P")


class KeptRun(Struct, Generic[P], frozen=True):
    """Holds what is kept of a run that is over: the seconds of one core that it took, and its result."""

    seconds: float
    result: P


class KeptRuns:
    """A folder with a file for each run of one figure, as one state of the code plays it. Processes that make
    the same figure share its runs among them: a run is played by the process that locks its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seconds = 0.0
        """The seconds of one core that the runs took which were asked for, whoever played them."""

    def result(self, name: str, type_: type[P], play: Callable[[], P], *, wait: bool) -> P | None:
        """Returns what was found in the run, which is played if it was not yet. type_: of the result, which
        msgspec can decode. If another process plays the run now, None is returned, or if `wait` the result
        once that process has ended or died."""
        with self._claimed(name, wait=wait) as file:
            if file is None:
                return None
            found = _read(file, type_) or _write(file, play)
            self.seconds += found.seconds
            return found.result

    @contextmanager
    def _claimed(self, name: str, *, wait: bool) -> Iterator[BinaryIO | None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{re.sub('[^a-zA-Z0-9.+]+', '-', name)}.json"
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
            else:
                yield file


def _read(file: BinaryIO, type_: type[P]) -> KeptRun[P] | None:
    """Returns None if the run is to be played: nothing is there, or what a process wrote that died, or a
    number that JSON does not have."""
    file.seek(0)
    try:
        return msgspec.json.decode(file.read(), type=KeptRun[type_])  # type: ignore[valid-type]
    except msgspec.DecodeError:
        return None


def _write(file: BinaryIO, play: Callable[[], P]) -> KeptRun[P]:
    began = time.process_time()
    result = play()
    run = KeptRun(time.process_time() - began, result)
    file.truncate(0)
    file.write(msgspec.json.encode(run))
    file.flush()
    return run

"""The log neither blocks nor raises, and says what it left out."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvloom.journal.log import Journal
from kvloom.journal.records import Draining, Record
from kvloom.serve.gateway_process import audit
from kvloom.serve.processes.log import (
    MOST_ALIKE,
    MOST_WAITING,
    Background,
    LogHandler,
    line_writer,
    log_to_parent,
)
from kvloom.serve.screen import Screen
from kvloom.serve.supervisor import kept_in
from tests.modelled_units import ManualClock
from tests.processes import DEADLINE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def logged(write: object, clock: Clock) -> tuple[logging.Logger, LogHandler]:
    handler = LogHandler(write, clock)  # type: ignore[arg-type]
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler


def test_what_one_place_logs_by_the_hundred_is_folded() -> None:
    lines, clock = list[str](), Clock()
    logger, handler = logged(lines.append, clock)
    for number in range(500):
        logger.warning("a bad request from %d", number)
    logger.warning("something else")
    clock.now = 61
    logger.warning("later")
    handler.close()
    assert len(lines) == MOST_ALIKE + 3
    assert lines[-2] == f"WARNING test: {500 - MOST_ALIKE} more like: a bad request from 0"


def test_a_cause_has_one_traceback_a_minute() -> None:
    lines, clock = list[str](), Clock()
    logger, handler = logged(lines.append, clock)
    for clock.now in (0, 1, 2, 100):
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("it failed")
    handler.close()
    assert ["Traceback" in line for line in lines] == [True, False, False, True]
    assert lines[1] == "ERROR test: it failed: KeyError: 'x'"


def test_a_sink_that_fails_is_tried_again() -> None:
    lines = list[str]()

    def write(line: str) -> None:
        if line.endswith(("one", "two")):
            raise OSError("no space left on device")
        lines.append(line)

    logger, handler = logged(write, Clock())
    for word in ("one", "two", "three"):
        logger.warning(word)
    handler.close()
    assert lines == ["WARNING test: three", "WARNING kvloom: 2 lines of the log were lost"]


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    reader, writer = os.pipe()
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb") as unread:
        write = line_writer(stream)
        background = Background("test", lambda lost: write(f"{lost} lost"))
        for _ in range(3 * MOST_WAITING):
            background.post(lambda: write("x" * 100))
        while b"lost" not in unread.readline():
            background.post(lambda: None)


@pytest.mark.parametrize("error", [BrokenPipeError(), SystemExit(1), ValueError("closed file")])
def test_no_failure_of_a_sink_ends_the_thread(error: BaseException) -> None:
    lost, done = list[int](), threading.Event()
    background = Background("test", lost.append)

    def fail() -> None:
        raise error

    background.post(fail)
    background.post(done.set)
    assert done.wait(DEADLINE)
    background.close()
    assert lost == [1]


def test_a_line_of_the_trail_that_is_in_the_log_is_not_told_as_lost(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    file.mkdir()
    said = list[str]()

    class Mends(logging.Handler):
        """Lets the file be one once the first line could not be written to it."""

        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if file.is_dir():
                file.rmdir()

    handler = Mends()
    logging.getLogger("kvloom").addHandler(handler)
    try:
        with audit(str(file)) as trail:
            trail.write("one")
            trail.write("two")
    finally:
        logging.getLogger("kvloom").removeHandler(handler)
    assert said == [f"{file}: Is a directory; its line is one"]
    assert file.read_text() == "two\n"


class Shown(Screen):
    """Counts what a person is told of the journal's file."""

    def __init__(self) -> None:
        self.told: queue.Queue[str] = queue.Queue()

    def warn(self, component: str, line: str) -> None:
        self.told.put(line)


def records(count: int) -> list[Record]:
    journal = Journal(ManualClock())
    for number in range(count):
        journal.add("unit-0", Draining(reason=str(number)))
    return journal.since(0)


def test_what_a_journal_loses_is_counted_by_the_record(tmp_path: Path) -> None:
    path, screen = tmp_path / "journal.jsonl", Shown()
    path.mkdir()
    with kept_in(path, screen) as keep:
        keep(records(3))
        assert "Is a directory" in screen.told.get(timeout=DEADLINE)
        path.rmdir()
        keep(records(4))
        assert screen.told.get(timeout=DEADLINE) == f"{path}: 3 records are lost"
    assert len(path.read_text().splitlines()) == 4


def test_a_journal_that_nobody_reads_is_told_at_once(tmp_path: Path) -> None:
    path, screen = tmp_path / "pipe", Shown()
    os.mkfifo(path)
    with kept_in(path, screen) as keep:
        keep(records(3))
        assert "not a regular file" in screen.told.get(timeout=DEADLINE)
    assert "3 or more are lost" in screen.told.get(timeout=DEADLINE)


def test_a_record_is_one_line_for_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    """So nothing that it quotes begins like another record."""
    root, before, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    root.handlers.clear()
    handler = log_to_parent()
    try:
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("test").exception("a\nINFO kvloom.access: {}")
    finally:
        handler.close()
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ERROR test: a\x1fINFO kvloom.access: {}\x1fTraceback")
    assert line.endswith("KeyError: 'x'")

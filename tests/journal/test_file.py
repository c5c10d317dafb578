"""Files to which lines are appended: they are bounded, whole lines, and hold nobody up."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from kvloom.journal.file import AppendedFile, JournalFile
from kvloom.journal.log import Journal
from kvloom.journal.records import Preempted
from tests.modelled_units import ManualClock


def event(request: str) -> Preempted:
    return Preempted(model="m", request=request, reason="gave way to chat")


def test_a_file_is_rotated_and_there_are_so_many(tmp_path: Path) -> None:
    path, journal = tmp_path / "journal.jsonl", Journal(ManualClock())
    file = JournalFile(path, most=400, files=3)
    journal.follow(file.write)
    for n in range(60):
        journal.add("unit-0", event(str(n)))
    names = {one.name for one in tmp_path.iterdir()}
    assert names - {"journal.jsonl"} == {"journal.jsonl.1", "journal.jsonl.2"}
    kept = [json.loads(line) for name in sorted(names, reverse=True) for line in (tmp_path / name).open()]
    numbers = [one["number"] for one in kept]
    assert numbers == list(range(numbers[0], 61))
    assert kept[-1]["event"] == {
        "type": "preempted",
        "model": "m",
        "request": "59",
        "reason": "gave way to chat",
    }
    assert (tmp_path / "journal.jsonl.1").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_rotated_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    (tmp_path / "lines.1").mkdir()
    file = AppendedFile(path, most=10, files=2)
    file.append(b"0123456789\n")
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            file.append(b"more\n")
    assert path.read_bytes() == b"0123456789\n"
    (tmp_path / "lines.1").rmdir()
    file.append(b"again\n")
    assert (path.read_bytes(), (tmp_path / "lines.1").read_bytes()) == (b"again\n", b"0123456789\n")


def test_a_rotation_that_fails_again_and_again_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "lines", Path.replace

    def keeps(self: Path, target: Path) -> Path:
        if self == path:
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    for number in range(1, 4):
        (tmp_path / f"lines.{number}").write_text(str(number))
    path.write_text("0123456789")
    monkeypatch.setattr(Path, "replace", keeps)
    for _ in range(5):
        with pytest.raises(PermissionError):
            AppendedFile(path, most=10, files=4).append(b"more")
    kept = sorted(one.read_text() for one in tmp_path.iterdir())
    assert kept == ["0123456789", "1", "2"]


@pytest.mark.parametrize("kind", ["pipe", "read pipe", "device", "link"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path, reader = tmp_path / "lines", None
    if kind == "device":
        path = Path("/dev/null")
    elif kind == "link":
        (tmp_path / "other").touch()
        path.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None
    with pytest.raises(OSError, match="not a regular file"):
        AppendedFile(path, most=100).append(b"line\n")
    if reader is not None:
        os.close(reader)


def test_a_link_to_a_file_that_is_never_rotated_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.symlink_to(tmp_path / "other")
    AppendedFile(path).append(b"line\n")
    assert (tmp_path / "other").read_bytes() == b"line\n"


def test_a_file_that_is_appended_to_may_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = AppendedFile(path)
    file.append(b"one\n")
    file.append(b"two\n")
    path.rename(tmp_path / "audit.1")
    file.append(b"three\n")
    assert (tmp_path / "audit.1").read_text() == "one\ntwo\n"
    assert path.read_text() == "three\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_off_ends_before_the_next_one(tmp_path: Path) -> None:
    path, file = tmp_path / "lines", AppendedFile(tmp_path / "lines")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most[1]))
        for _ in range(2):  # the second has no room at all
            with pytest.raises(OSError, match="File too large"):
                file.append(b"a long line that does not fit\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    file.append(b"another\n")
    cut, line = path.read_bytes().splitlines()
    assert (len(cut), line) == (10, b"another")

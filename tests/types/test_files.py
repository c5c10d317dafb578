"""Files that are replaced whole, and whether files have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvloom.types.files import FileWatch, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as made:
        made.write(b"one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), replacing(path) as made:
        made.write(b"%d" % (2 // 0))
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    with replacing(path, 0o644) as made:
        made.write(b"three")
    assert path.read_bytes() == b"three"
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="No such"), replacing(tmp_path / "none" / "file"):
        pytest.fail("there is no such folder")


def _umask() -> int:
    os.umask(found := os.umask(0o077))
    return found


def test_two_who_write_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"


def test_what_counts_as_a_change(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    watch = FileWatch(one, other)
    assert not watch.changed()
    other.write_bytes(b"2")
    assert [watch.changed(), watch.changed()] == [True, False]
    with replacing(one) as made:
        made.write(b"1")
    assert [watch.changed(), watch.changed()] == [True, False]
    one.unlink()
    assert [watch.changed(), watch.changed()] == [True, False]

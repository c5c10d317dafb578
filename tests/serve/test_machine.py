"""Folders for sockets: who is dead leaves none, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvloom.serve.machine import LOCK, private_folder
from tests.processes import DEADLINE

OWNER = """
import sys
from kvloom.serve.machine import private_folder

with private_folder() as folder:
    (folder / "unit-0.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def owner() -> tuple[subprocess.Popen[str], Path]:
    """Another process, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_the_dead_have_left_over_is_removed(tmp_path: Path) -> None:
    dead, left = owner()
    with dead:
        dead.send_signal(signal.SIGKILL)
        dead.wait(DEADLINE)
    assert (left / "unit-0.sock").exists()
    with private_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_the_living_stay(tmp_path: Path) -> None:
    alive, there = owner()
    with alive:
        with private_folder() as folder:
            assert {*tmp_path.iterdir()} == {there, folder}
            other, beside = owner()
            with other:
                assert {*tmp_path.iterdir()} == {there, folder, beside}
                other.communicate(timeout=DEADLINE)
        assert (there / "unit-0.sock").exists()
        alive.communicate(timeout=DEADLINE)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_fleets_stays(tmp_path: Path) -> None:
    """Nor is one touched that has no owner yet, because it was made this very moment."""
    new, file, other = tmp_path / "kvloom-new", tmp_path / "kvloom-file", tmp_path / "else"
    new.mkdir()
    file.touch()
    other.mkdir()
    (other / LOCK).touch()
    (tmp_path / "kvloom-link").symlink_to(other)
    elsewhere = tmp_path / "kvloom-elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).symlink_to(other / LOCK)
    before = {*tmp_path.iterdir()}
    with private_folder() as folder:
        assert {*tmp_path.iterdir()} == before | {folder}
    assert (other / LOCK).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "kvloom-theirs"
    theirs.mkdir()
    (theirs / LOCK).touch()
    os.chown(theirs, 12345, 12345)
    with private_folder():
        assert theirs.exists()


def test_no_child_holds_the_lock(tmp_path: Path) -> None:
    """Else a child that outlives its supervisor would keep the folder."""
    with private_folder() as folder:
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
        held = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()]
        child.kill()
        child.wait()
        assert str(folder / LOCK) not in held

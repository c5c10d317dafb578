"""The files of kept prefixes: whole or not there, whatever befalls them; and no more of them than may be."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.transfer.disk.folder import COUNTED, IDENTITY_BYTES, LEFT_BEHIND, PagePlace, PrefixFolder
from kvloom.types.geometry import AnyArray

SIZE = 5000


def place(number: int, root: int = 0, model: int = 0) -> PagePlace:
    return PagePlace(model.to_bytes(IDENTITY_BYTES), root.to_bytes(24), number.to_bytes(24))


def page(number: int, size: int = SIZE) -> AnyArray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def kept(folder: PrefixFolder, numbers: range) -> list[int]:
    """Those of the pages that are there, and whole."""
    found = [(number, folder.read(place(number), SIZE)) for number in numbers]
    assert all(np.array_equal(one, page(number)) for number, one in found if one is not None)
    return [number for number, one in found if one is not None]


def test_a_page_is_found_by_its_model_root_and_key_and_by_nobody_else(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path / "made" / "here", 1 << 20)
    assert folder.read(place(1), SIZE) is None
    folder.write(place(1), page(1).reshape(50, 100))
    assert np.array_equal(PrefixFolder(folder.path, 1 << 20).read(place(1), SIZE), page(1))  # type: ignore[arg-type]
    for other in (place(2), place(1, root=1), place(1, model=1)):
        assert folder.read(other, SIZE) is None
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_a_file_in_another_ones_place_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, 1 << 20)
    for number in (1, 2):
        folder.write(place(number), page(number))
    first, second = files(tmp_path)
    first.rename(second)
    assert kept(folder, range(3)) == []
    folder.write(place(1, model=1), page(1))
    assert folder.read(place(1, model=1), SIZE - 1) is None, "of another size"


@given(st.data())
def test_a_file_of_which_a_byte_is_missing_or_changed_is_not_there(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = PrefixFolder(Path(made), 1 << 20)
        folder.write(place(1), page(1, 300))
        (file,) = files(folder.path)
        whole = file.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        flipped = bytearray(whole)
        flipped[at] ^= data.draw(st.integers(1, 255))
        harm = data.draw(st.sampled_from([whole[:at], whole + whole[: at + 1], bytes(flipped)]))
        file.write_bytes(harm)
        assert folder.read(place(1), 300) is None
        assert not files(folder.path), "it is removed"
        folder.write(place(1), page(1, 300))
        assert np.array_equal(folder.read(place(1), 300), page(1, 300))  # type: ignore[arg-type]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, 1 << 20)
    folder.write(place(1), page(1))
    (file,) = files(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert folder.read(place(1), SIZE) is None
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    file.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        folder.read(place(1), SIZE)
    assert secret.exists()


WRITER = """
import sys
from pathlib import Path
from kvloom.transfer.disk.folder import PrefixFolder
from tests.transfer.test_disk_folder import page, place
folder = PrefixFolder(Path(sys.argv[1]), 1 << 30)
for number in range(100_000):
    folder.write(place(number % 500), page(number % 500))
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_pages_only(tmp_path: Path) -> None:
    for kills in (1, 40):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(kills):
                last = int(writer.stdout.readline())
            writer.kill()
        folder = PrefixFolder(tmp_path, 1 << 30)
        assert kept(folder, range(500))[: last + 1] == [*range(last + 1)]
        unfinished = [file for file in files(tmp_path) if file.name.startswith(".")]
        assert len(unfinished) <= 2
        for file in unfinished:
            os.utime(file, (0, 0))
        folder.trim()
        assert not [file for file in files(tmp_path) if file.name.startswith(".")]


def test_unfinished_files_of_others_who_write_stay(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, 1 << 20)
    folder.write(place(1), page(1))
    (file,) = files(tmp_path)
    young, old = (file.with_name(f".{file.name}.0123456{i}") for i in range(2))
    for one in (young, old):
        one.touch()
    os.utime(old, (old.stat().st_mtime - LEFT_BEHIND - 1,) * 2)
    folder.trim()
    assert (young.exists(), old.exists()) == (True, False)


def test_the_oldest_go_when_there_is_too_much_and_nothing_that_is_not_ours(tmp_path: Path) -> None:
    others = [tmp_path / "notes.kv", tmp_path / ("0" * 32) / "note", tmp_path / "photos" / ("0" * 48 + ".kv")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(bytes(1 << 20))
    folder = PrefixFolder(tmp_path, 40 << 13)  # a page takes two blocks of 4 KiB in most file systems
    for number in range(20):
        folder.write(place(number), page(number))
    for number, file in enumerate(files(tmp_path / ("0" * 32) / ("0" * 48))):
        os.utime(file, (number, number))
    assert kept(folder, range(3, 5)) == [3, 4]  # and so they are young again
    for number in range(20, 100):
        folder.write(place(number), page(number))
        used = sum(max(file.stat().st_size, file.stat().st_blocks * 512) for file in files(tmp_path))
        assert used - sum(other.stat().st_size for other in others) <= folder.size * (1 + COUNTED)
    left = kept(folder, range(100))
    assert left[-1] == 99
    assert 25 < len(left) <= 41
    assert all(other.exists() for other in others)


def test_two_who_share_a_folder_bound_it_together(tmp_path: Path) -> None:
    pair = [PrefixFolder(tmp_path, 40 << 13) for _ in range(2)]
    for number in range(100):
        pair[number % 2].write(place(number), page(number))
    used = sum(file.stat().st_blocks * 512 for file in files(tmp_path))
    assert used <= pair[0].size * (1 + 2 * COUNTED)
    assert kept(pair[0], range(98, 100)) == [98, 99]


def test_forgetting(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, 1 << 20)
    every = [place(key, root, model) for key in range(2) for root in range(2) for model in range(2)]

    def left() -> list[PagePlace]:
        return [one for one in every if folder.read(one, SIZE) is not None]

    for one in every:
        folder.write(one, page(1))
    first = place(0)
    folder.forget(first.identity, first.root, (first.key, b"x" * 24))
    assert left() == every[1:]
    folder.forget(first.identity, first.root, ())
    assert left() == [one for one in every if (one.identity, one.root) != (first.identity, first.root)]
    folder.forget(first.identity, b"", ())
    assert left() == [one for one in every if one.identity != first.identity]

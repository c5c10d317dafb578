"""The store of prefixes in files: what is copied, when, and what a broken disk costs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvloom.transfer.disk.folder import IDENTITY_BYTES, PagePlace, PrefixFolder
from kvloom.transfer.disk.store import BATCH, PAUSE, DiskPrefixStore, KeptModel
from kvloom.types.geometry import I32, AnyArray, Geometry
from kvloom.types.prefix_store import PageName

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=300)  # 4 tokens of 64 bytes
RANKS = Geometry(layers=2, kv_heads=1, head_dim=8, itemsize=4, block_bytes=300, ranks=2)
BLOCKS = 40
PAGE = 4 * 256  # bytes


class Disk(PrefixFolder):
    """A folder that fails with an error while there is one, and whose writes wait while the gate is shut."""

    error: int | None = None
    writes = 0

    def __init__(self, path: Path, size: int = 1 << 20) -> None:
        super().__init__(path, size)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, place: PagePlace, page: AnyArray) -> None:
        self.gate.wait()
        self.writes += 1
        self._fail()
        super().write(place, page)

    def read(self, place: PagePlace, size: int) -> AnyArray | None:
        self._fail()
        return super().read(place, size)

    def _fail(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def arena(seed: int) -> AnyArray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, 300), np.uint8)


@contextmanager
def store(
    folder: PrefixFolder,
    memory: AnyArray,
    *,
    geometry: Geometry = GEOMETRY,
    staging: int = 1 << 20,
    now: Callable[[], float] = lambda: 0.0,
) -> Iterator[DiskPrefixStore]:
    model = KeptModel(bytes(IDENTITY_BYTES), geometry)
    rank_blocks = BLOCKS // geometry.ranks
    made = DiskPrefixStore(folder, memory, {"m": model}, rank_blocks=rank_blocks, staging=staging, now=now)
    try:
        yield made
    finally:
        made.close()


def name(number: int) -> PageName:
    return PageName("m", b"r" * 24, number.to_bytes(24))


def blocks(number: int, geometry: Geometry = GEOMETRY) -> I32:
    """Those of a page: all of the first rank's."""
    count = geometry.blocks_per_page
    shape = geometry.layers, geometry.kv_heads
    return np.arange(number * count, (number + 1) * count, dtype=np.int32)[::-1].reshape(shape)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("geometry", [GEOMETRY, RANKS])
def test_pages_come_back_into_whatever_blocks(tmp_path: Path, geometry: Geometry) -> None:
    """A store of another life has the blocks of all ranks as they were, and touches no other byte."""

    async def test() -> None:
        before, after = arena(1), arena(2)
        with store(PrefixFolder(tmp_path, 1 << 20), before, geometry=geometry) as old:
            for number in range(3):
                assert old.save(name(number), blocks(number, geometry))
            source = before.copy()
            before[:] = 0  # the blocks are others' at once
            await old.written()
        untouched = after.copy()
        with store(PrefixFolder(tmp_path, 1 << 20), after, geometry=geometry) as new:
            pages = await new.read([name(number) for number in range(4)])
            assert len(pages) == 3
            into = np.stack([blocks(number, geometry) for number in (7, 8, 6)])
            new.place("m", pages, into)
        for number, target in enumerate((7, 8, 6)):
            for rank in range(geometry.ranks):
                own, other = (blocks(i, geometry) + rank * BLOCKS // geometry.ranks for i in (number, target))
                assert np.array_equal(after[other, :256], source[own, :256])
                untouched[other, :256] = after[other, :256]
        assert np.array_equal(after, untouched)

    run(test)


def test_a_read_ends_at_what_is_not_there_and_after_some_megabytes(tmp_path: Path) -> None:
    async def test() -> None:
        with store(PrefixFolder(tmp_path, 1 << 20), arena(1)) as one:
            for number in (0, 1, 3):
                one.save(name(number), blocks(number))
            await one.written()
            assert len(await one.read([name(i) for i in range(4)])) == 2
            assert await one.read([name(2), name(3)]) == []
            many = await one.read([name(0)] * (2 * BATCH // PAGE))
            assert len(many) == BATCH // PAGE

    run(test)


def test_what_is_kept_is_not_written_again_until_it_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        disk = Disk(tmp_path)
        with store(disk, arena(1)) as one:
            for _ in range(3):
                assert one.save(name(0), blocks(0))
                await one.written()
            assert disk.writes == 1
            shutil.rmtree(tmp_path)  # by whoever shares the folder
            assert await one.read([name(0)]) == []
            one.save(name(0), blocks(0))
            await one.written()
            assert len(await one.read([name(0)])) == 1
            one.forget("m", b"r" * 24, [name(0).key])
            await one.written()
            assert await one.read([name(0)]) == []
            one.save(name(0), blocks(0))
            await one.written()
            assert disk.writes == 3

    run(test)


def test_copies_that_wait_for_a_slow_disk_are_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        disk = Disk(tmp_path)
        with store(disk, arena(1), staging=3 * PAGE) as one:
            disk.gate.clear()
            assert [one.save(name(number), blocks(number)) for number in range(5)] == [True] * 3 + [False] * 2
            assert one.save(name(1), blocks(1)), "it is there already"
            disk.gate.set()
            await one.written()
            assert one.save(name(4), blocks(4))
            await one.written()
            assert disk.writes == 4
        with store(disk, arena(1), staging=1) as one:
            assert one.save(name(6), blocks(6)), "one page at least"
            await one.written()

    run(test)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_for_a_while(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        disk, time = Disk(tmp_path), Time()
        with caplog.at_level(logging.WARNING), store(disk, arena(1), now=time) as one:
            one.save(name(0), blocks(0))
            await one.written()
            disk.error = error
            for number in range(1, 4):
                assert one.save(name(number), blocks(number))
                await one.written()
            assert disk.writes == 2
            for _ in range(2):
                assert await one.read([name(0)]) == []
            written, read = (record.getMessage() for record in caplog.records)
            assert f"nothing can be written: {os.strerror(error)}" in written
            assert "nothing can be read" in read
            disk.error = None
            assert len(await one.read([name(0)])) == 1
            time.now = PAUSE
            one.save(name(1), blocks(1))
            await one.written()
            assert len(await one.read([name(0), name(1), name(2)])) == 2

    run(test)


SMALL_DISK = """
import asyncio, sys
from pathlib import Path
import numpy as np
from kvloom.transfer.disk.folder import PrefixFolder
from tests.transfer.test_disk_store import arena, blocks, name, store

async def full(folder):
    with store(folder, arena(1)) as one:
        for number in range(9):
            one.save(name(number), blocks(number))
        await one.written()
        return len(await one.read([name(number) for number in range(9)]))

async def found(folder):
    with store(folder, arena(1)) as one:
        one.save(name(30), blocks(3))
        await one.written()
        return len(await one.read([name(number) for number in range(9)]))

print(asyncio.run((full if sys.argv[2] == "full" else found)(PrefixFolder(Path(sys.argv[1]), 1 << 30))))
"""


def test_a_real_disk_that_is_full_and_one_that_is_only_to_be_read(tmp_path: Path) -> None:
    """What was written before is found. 44 KiB hold a few pages: each takes 4 KiB, and folders take some."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    (tmp_path / "child.py").write_text(SMALL_DISK)
    child = f"{sys.executable} {tmp_path}/child.py /mnt"
    steps = [
        "mount -t tmpfs -o size=28k none /mnt",
        f"{child} full",
        "mount -o remount,ro /mnt",
        f"{child} found",
    ]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-ec", "\n".join(steps)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    full, found = map(int, done.stdout.split())
    assert 0 < full < 9
    assert found == full
    assert "No space left on device" in done.stderr
    assert "Read-only file system" in done.stderr


def test_a_folder_that_cannot_be_one_costs_the_cache_alone(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "file").touch()
        with store(PrefixFolder(tmp_path / "file" / "cache", 1 << 20), arena(1)) as one:
            one.save(name(0), blocks(0))
            await one.written()
            assert await one.read([name(0)]) == []
            one.forget("m")
            await one.written()

    run(test)


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    async def test() -> None:
        disk = Disk(tmp_path)
        disk.gate.clear()
        with store(disk, arena(1)) as one:
            one.save(name(0), blocks(0))
        disk.gate.set()

    run(test)

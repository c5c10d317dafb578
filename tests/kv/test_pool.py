"""Blocks that are lent, forwards that fail, and an arena that is memory of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvloom.kv.arena import Arena
from kvloom.types.errors import OutOfBlocks
from tests.kv.trees import make


def test_lent_blocks_are_nobody_elses_and_come_back() -> None:
    pool = make(40)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    plan = cache.begin_forward([1], [20])
    cache.end_forward(plan)
    lent = pool.lend(14)
    own = cache.pages.map[cache.page_list(1)].ravel()
    assert not np.intersect1d(lent, own).size
    assert (pool.lent, pool.free) == (14, 40 - 14 - own.size)
    pool.check()
    with pytest.raises(OutOfBlocks):
        pool.lend(pool.available + 1)
    assert pool.lent == 14
    pool.take_back(lent)
    cache.remove_sequence(1)
    pool.check()
    assert (pool.lent, pool.available) == (0, 40)


def test_what_is_cached_gives_way_to_a_loan() -> None:
    pool = make(16)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [32]))
    cache.keep(1, tuple(range(32)), tail=True)
    cache.remove_sequence(1)
    assert (pool.free, pool.cached) == (0, 16)
    lent = pool.lend(10)
    pool.check()
    pool.take_back(lent)
    pool.check()
    with pytest.raises(ValueError, match="freed twice"):
        pool.take_back(lent)


def test_the_shared_page_comes_back() -> None:
    pool = make(40)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    cache.fork_sequence(1, 3)
    pages = cache.page_list(1)
    free = pool.free
    plan = cache.begin_forward([1, 2, 3], [1, 7, 2])
    assert len(plan.copies) == 3
    pool.check()
    cache.abort_forward(plan)
    pool.check()
    assert pool.free == free
    assert [cache.page_list(s) for s in (1, 2, 3)] == [pages] * 3
    cache.end_forward(cache.begin_forward([2], [1]))
    assert cache.page_list(2)[1] != pages[1]
    for sequence in (1, 2, 3):
        cache.remove_sequence(sequence)
    pool.check()
    assert pool.free == pool.total


def test_the_other_holders_may_have_gone_meanwhile() -> None:
    pool = make(40)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    pages = cache.page_list(1)
    plan = cache.begin_forward([2], [1])
    cache.remove_sequence(1)
    cache.abort_forward(plan)
    pool.check()
    assert cache.page_list(2) == pages
    cache.remove_sequence(2)
    assert pool.free == pool.total


FULL = "mount -t tmpfs -o size=64k none /dev/shm && { head -c 1M /dev/zero > /dev/shm/full; true; }"
WRITE = """
import torch
from kvloom.kv.arena import Arena
arena = Arena(256, 16384)
arena.bytes.fill_(7)
view = arena.view(64, torch.float32)
print(tuple(view.shape), int(arena.bytes.long().sum()))
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    """In a mount namespace of its own."""
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-euc"]
    if subprocess.run([*namespace, FULL], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no mount namespaces")
    command = [*namespace, f'{FULL} 2>/dev/null; exec "$@"', "sh", sys.executable, "-c", WRITE]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split("\n")[0] == f"(256, 2, 32, 64) {7 * 256 * 16384}"


def test_an_arena_of_nobody_leaves_its_bytes_to_its_tensors_and_no_descriptor() -> None:
    arena = Arena(4, 4096)
    content, descriptor = arena.bytes, Path(arena.path)
    content.fill_(7)
    assert descriptor.exists()
    del arena
    assert not descriptor.exists()
    assert int(content.long().sum()) == 7 * 4 * 4096

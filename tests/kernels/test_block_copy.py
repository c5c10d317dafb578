"""Copies of blocks between arenas, against their plain twin, on random input."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import pytest
import torch

from kvloom.kernels import reference
from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.types.geometry import I32


class Layout(TypedDict):
    block_bytes: int
    page_tokens: int
    token_bytes: int


def _random(rng: np.random.Generator, page_tokens: int, n: int) -> tuple[I32, I32]:
    """Offsets and counts, a third of them whole."""
    offsets = rng.integers(0, page_tokens, n)
    counts = rng.integers(0, page_tokens - offsets + 1)
    whole = rng.random(n) < 1 / 3
    return np.where(whole, 0, offsets).astype(np.int32), np.where(whole, page_tokens, counts).astype(np.int32)


@pytest.mark.parametrize("token_bytes", [2, 6, 32, 256, 1024])
@pytest.mark.parametrize("block_bytes", [2112, 4096, 16384])
@pytest.mark.parametrize("shift", [0, 64, 4])
def test_like_its_twin(token_bytes: int, block_bytes: int, shift: int) -> None:
    rng = np.random.default_rng([token_bytes, block_bytes, shift])
    page_tokens, blocks, n = block_bytes // (2 * token_bytes), 60, 40
    source, target = (rng.integers(0, 256, blocks * block_bytes + 128, dtype=np.uint8) for _ in range(2))
    source = source[shift:][: blocks * block_bytes]
    target = target[shift:][: blocks * block_bytes]
    ids = [rng.permutation(blocks)[:n].astype(np.int32) for _ in range(2)]
    own, peer, offsets, counts = [*ids, *_random(rng, page_tokens, n)]
    layout: Layout = {"block_bytes": block_bytes, "page_tokens": page_tokens, "token_bytes": token_bytes}
    wanted = torch.from_numpy(target.copy())
    a, b, c, d = (torch.from_numpy(array) for array in (own, peer, offsets, counts))
    reference.copy_blocks(torch.from_numpy(source), wanted, a, b, c, d, **layout)
    copy_blocks(source, target, own, peer, offsets, counts, **layout)
    np.testing.assert_array_equal(target, wanted.numpy())


def test_nothing_to_copy_is_fine() -> None:
    none, memory = np.zeros(0, np.int32), np.zeros(4096, np.uint8)
    copy_blocks(memory, memory, none, none, none, none, block_bytes=4096, page_tokens=8, token_bytes=256)


def test_arrays_of_another_kind_are_refused() -> None:
    one, memory = np.zeros(1, np.int32), np.zeros(4096, np.uint8)
    layout: Layout = {"block_bytes": 4096, "page_tokens": 8, "token_bytes": 256}
    with pytest.raises(ValueError, match="int32"):
        copy_blocks(memory, memory, one, one, one, one.astype(np.int64), **layout)
    with pytest.raises(ValueError, match="int32"):
        copy_blocks(memory, memory, one, one, one, np.zeros(2, np.int32), **layout)
    with pytest.raises(ValueError, match="fit"):
        copy_blocks(memory, memory, one, one, one, one, block_bytes=4096, page_tokens=9, token_bytes=256)

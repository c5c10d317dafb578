"""The sizes of a model's KV cache: how it is cut into the pool's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvloom.types.errors import ConfigError

KVDtype = Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"]
"""The number formats that K and V may be kept in, with torch's names. `auto` is the one that the model
computes in."""

SCALED: Final = frozenset({"int8"})
"""The number formats whose rows have a scale. A row is a token's K, or its V, in one KV head of one layer."""

_SCALE_BYTES: Final = 4  # of a row's scale, a float32


def row_bytes(head_dim: int, itemsize: int, scaled: bool) -> int:
    """Returns the bytes of a row. A scale stands behind the row's numbers, at a multiple of its own size, so
    that tokens of a block are one run of bytes for K, and one for V, in each format."""
    numbers = head_dim * itemsize
    return -(-numbers // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES if scaled else numbers


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one model's blocks and pages.

    A block holds K and V of one KV head of one layer for `tokens_per_block` tokens: first their rows of K,
    then those of V. A page holds the blocks of one run of tokens over all layers and KV heads (MuxServe,
    section 3.4).
    """

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one number
    block_bytes: int
    ranks: int = 1  # each of which has `kv_heads` heads of its own, in a part of its own of the unit's arena
    scaled: bool = False  # whether each row has a scale behind its numbers

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1:
            raise ConfigError(
                f"block_bytes: {self.block_bytes} holds no token of head size {self.head_dim}; "
                f"at least {self.token_bytes} is needed"
            )

    @property
    def row_bytes(self) -> int:
        """The bytes of one token's K, and as many of its V, in one head of one layer."""
        return row_bytes(self.head_dim, self.itemsize, self.scaled)

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's K and V in one head of one layer."""
        return 2 * self.row_bytes

    @property
    def tokens_per_block(self) -> int:
        return self.block_bytes // self.token_bytes

    @property
    def blocks_per_page(self) -> int:
        return self.layers * self.kv_heads

    @property
    def waste(self) -> float:
        """The share of each block's bytes that no token uses."""
        return 1.0 - self.tokens_per_block * self.token_bytes / self.block_bytes

    def pages(self, tokens: int) -> int:
        """Returns the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_block)

    def blocks(self, tokens: int) -> int:
        """Returns the number of blocks that hold `tokens` tokens."""
        return self.pages(tokens) * self.blocks_per_page


I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]
AnyArray = npt.NDArray[Any]


def over_ranks(blocks: I32, ranks: int, rank_blocks: int) -> I32:
    """Returns the blocks [..., ranks · heads] of all ranks' heads in a unit's arena, rank by rank. `blocks`
    [..., heads] are those of the first rank, and `rank_blocks` is the number of blocks of each rank's part of
    the arena."""
    if ranks == 1:
        return blocks
    parts = np.arange(ranks, dtype=np.int32)[:, None] * np.int32(rank_blocks)
    all_heads: I32 = (blocks[..., None, :] + parts).reshape(*blocks.shape[:-1], ranks * blocks.shape[-1])
    return all_heads

"""The part that decode and prefill attention share: one tile of tokens, read from the pool through its page
tables.

Scores are kept in units of log 2, so that exp2 turns them into weights; `AttentionForm` folds that into the
scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import power_of_two
from kvloom.kernels.reference import check

LOWEST = tl.constexpr(-1e30)  # finite: a row whose first tiles are all hidden must not become NaN
LN2 = tl.constexpr(math.log(2))

HALVES = torch.bfloat16, torch.float16
DTYPES = (*HALVES, torch.float32)
KEPT = torch.float8_e4m3fn  # of K and V beside a model's own: numbers are what they are, without a scale


@triton.jit
def attend_tokens(  # type: ignore[no-untyped-def]
    sums,  # [M, DIMS] float32
    norm,  # [M] float32
    best,  # [M] float32
    q,  # [M, DIMS]
    query,  # [M] int32, the positions of q
    positions,  # [TILE] int32
    rows,  # [TILE] int64, where their K begins in the arena
    held,  # [TILE], which of them are read
    arena,
    scale,
    bound,
    window,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    EDGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the online softmax's step (Milakov and Gimelshein, 2018; FlashAttention-2, algorithm 1) over a
    tile of tokens. Only an EDGE tile has tokens that some query does not see, or that are not read. With
    SOFTCAP a bound of 0 is none."""
    dims = tl.arange(0, DIMS)
    at = arena + rows[:, None] + dims[None, :]
    if EDGE:
        valid = held[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(at, mask=valid, other=0.0)
        v = tl.load(at + PAGE_TOKENS * HEAD_DIM, mask=valid, other=0.0)
    elif DIMS > HEAD_DIM:
        valid = (dims < HEAD_DIM)[None, :]
        k = tl.load(at, mask=valid, other=0.0)
        v = tl.load(at + PAGE_TOKENS * HEAD_DIM, mask=valid, other=0.0)
    else:
        k = tl.load(at)
        v = tl.load(at + PAGE_TOKENS * HEAD_DIM)
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:  # bound · tanh, from exp2 alone
        scores = tl.where(bound > 0, bound - 2 * bound / (tl.exp2(scores) + 1), scores)
    if EDGE:
        seen = (positions[None, :] <= query[:, None]) & held[None, :]
        if WINDOW:
            seen = seen & (positions[None, :] > query[:, None] - window)
        scores = tl.where(seen, scores, LOWEST)
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(best - top)
    norm = norm * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
    return sums, norm, top


@triton.jit
def attend_tile(  # type: ignore[no-untyped-def]
    sums,
    norm,
    best,
    q,
    query,
    first,  # the tile's first position
    end,  # no position from here on is read
    arena,
    block_map,  # of page 0, this layer, this head
    table,  # of this sequence
    arena_block,
    map_page,
    scale,
    bound,
    window,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs `attend_tokens` over tokens [first, first + TILE), found through the page tables."""
    positions = first + tl.arange(0, TILE)
    inside = positions < end
    if EDGE:
        page = tl.load(table + positions // PAGE_TOKENS, mask=inside, other=0)
        block = tl.load(block_map + page.to(tl.int64) * map_page, mask=inside, other=0)
    else:
        page = tl.load(table + positions // PAGE_TOKENS)
        block = tl.load(block_map + page.to(tl.int64) * map_page)
    rows = block.to(tl.int64) * arena_block + (positions % PAGE_TOKENS) * HEAD_DIM
    return attend_tokens(
        sums, norm, best, q, query, positions, rows, inside, arena, scale, bound, window,
        PAGE_TOKENS, HEAD_DIM, DIMS, EDGE, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The scale, window and softcap as the kernels take them, with what they make of the arena's shape."""

    arguments: dict[str, Any]
    group: int

    @classmethod
    def of(
        cls, q: Tensor, arena: Tensor, page_map: Tensor, scale: float, window: int, softcap: float
    ) -> AttentionForm:
        """Returns the form. Raises ValueError if arena [blocks, 2, T, D], page_map [pages, layers, kv_heads]
        and q [N, heads, D] do not fit one another. K and V have q's format, or FP8."""
        tokens, head_dim = arena.shape[2:]
        check("arena", arena, -1, 2, tokens, head_dim, dtypes=(*DTYPES, KEPT))
        check("page_map", page_map, -1, -1, -1, dtypes=(torch.int32,))
        check("q", q, -1, -1, head_dim, dtypes=DTYPES if arena.dtype == KEPT else (arena.dtype,))
        group, rest = divmod(q.shape[1], page_map.shape[2])
        if rest or arena.stride()[1:] != (tokens * head_dim, head_dim, 1):
            raise ValueError(
                f"q of {q.shape[1]} heads, {page_map.shape[2]} KV heads and an arena of strides "
                f"{arena.stride()}: want a multiple, and blocks that are contiguous"
            )
        log2e = 1 / math.log(2)
        arguments = {
            "scale": 2 * log2e * scale / softcap if softcap else log2e * scale,
            "bound": softcap * log2e,
            "window": window,
            "arena_block": arena.stride(0),
            "map_page": page_map.stride(0),
            "map_layer": page_map.stride(1),
            "PAGE_TOKENS": tokens,
            "HEAD_DIM": head_dim,
            "DIMS": max(16, power_of_two(head_dim)),
            "WINDOW": window > 0,
            "SOFTCAP": softcap > 0,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        return cls(arguments, group)

    @property
    def token_bytes(self) -> int:
        """The bytes of K and V of a token of one head, as they lie in shared memory."""
        dtype = torch.float32 if self.arguments["PRECISION"] == "ieee" else torch.bfloat16
        return token_bytes(self.arguments["HEAD_DIM"], dtype)


def token_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the bytes of K and V of a token of one head, as they lie in shared memory beside q of
    `dtype`."""
    return 2 * max(16, power_of_two(head_dim)) * dtype.itemsize

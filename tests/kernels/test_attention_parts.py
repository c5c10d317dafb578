"""Attention that stops between two tiles of a sequence, and goes on there, computes what one piece does."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kvloom.kernels.cpu.attention.decode import (
    AttentionArguments,
    advance,
    attend_all,
    begin,
    room_of,
    span_of,
    tokens_of,
)
from kvloom.kernels.cpu.kv_rows import KINDS
from tests.kernels.paged import Paged, paged


def arguments(p: Paged, q: torch.Tensor, out: torch.Tensor, window: int, threads: int) -> AttentionArguments:
    batch, heads, dim = q.shape
    _, layers, kv_heads = p.page_map.shape
    span = span_of(batch, kv_heads, threads)
    return AttentionArguments(
        out=out.data_ptr(), out_row=heads * dim * 4, out_head=dim * 4,
        q=q.data_ptr(), q_row=heads * dim * 4, q_head=dim * 4,
        arena=p.arena.data_ptr(), block_bytes=p.arena.stride(0) * p.arena.itemsize,
        page_tokens=p.arena.shape[2], row_bytes=p.arena.shape[3] * p.arena.itemsize,
        kind=KINDS[p.arena.dtype], head_dim=dim,
        map=p.page_map[:, 1].data_ptr(), map_page=layers * kv_heads * 4,
        tables=p.tables.data_ptr(), table_row=p.tables.stride(0) * 4, lengths=p.lengths.data_ptr(),
        batch=batch, kv_heads=kv_heads, group=heads // kv_heads, window=window,
        span=span, spans=-(-kv_heads // span), scale=dim**-0.5,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 4])  # one item a sequence, and one a head
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_is_bit_for_bit_one_piece_wherever_it_stops(threads: int, window: int, dtype: torch.dtype) -> None:
    """Long sequences of few heads have as many stops as one asks for."""
    p = paged(window, [300, 1, 37], head_dim=24, group=3, tokens=16, dtype=dtype)
    q = p.queries(3).float().contiguous()
    whole, out = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    attend_all(arguments(p, q, whole, window, threads), 1)
    rng = np.random.default_rng(threads)
    for most in (1, 16, 50, 1 << 40):
        call = arguments(p, q, out.fill_(torch.nan), window, threads)
        record = np.ctypeslib.as_array((AttentionArguments * 1).from_buffer(call))[0]
        scratch = np.empty(room_of(record) + 16, np.float32)
        place = (scratch.ctypes.data + 63) // 64 * 64
        begin(place)
        stops, until = 0, 0
        while advance(record, ctypes.addressof(call), place, until):
            until += int(rng.integers(1, most + 1))
            stops += 1
        assert out.equal(whole)
        tokens = int(tokens_of(record))
        assert tokens == sum(min(n, window or n) for n in (300, 1, 37)) * call.spans
        if most <= 16:
            assert stops >= tokens // 16

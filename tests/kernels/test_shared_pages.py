"""A decode step that reads what rows share once computes what it does row by row."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kernels import cpu, reference
from kvloom.kernels.cpu.attention.decode import (
    AttentionArguments,
    addresses_of,
    advance,
    attend_all,
    begin,
    room_of,
    span_of_runs,
)
from kvloom.kernels.cpu.attention.runs import END, MOST_QUERIES, RowRuns, row_runs
from kvloom.kv.shared import shared_prefixes
from tests.exec.batches import on_threads
from tests.kernels.paged import Paged, paged
from tests.kernels.test_attention_parts import arguments

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def branching(p: Paged, seed: int) -> None:
    """Each row but the first begins with as many full pages of an earlier one, or with none."""
    rng, tokens = np.random.default_rng(seed), p.arena.shape[2]
    for b in range(1, len(p.lengths)):
        other = int(rng.integers(b))
        most = (min(int(p.lengths[b]), int(p.lengths[other])) - 1) // tokens
        pages = int(rng.integers(most + 1)) if rng.random() < 0.8 else 0
        p.tables[b, :pages] = p.tables[other, :pages]
    shuffled = torch.from_numpy(rng.permutation(len(p.lengths)))
    p.tables.copy_(p.tables[shuffled])
    p.lengths.copy_(p.lengths[shuffled])


def runs_of(p: Paged, threads: int) -> RowRuns | None:
    lengths = p.lengths.numpy().astype(np.int64) - 1  # a step writes the last of them
    shared = shared_prefixes(p.tables.numpy(), lengths, p.arena.shape[2])
    kv_heads = p.page_map.shape[2]
    return None if shared is None else row_runs(shared.order, shared.common, kv_heads, p.group, threads)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 20),
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=20),
    head_dim=st.sampled_from([1, 7, 16, 24, 64, 80, 100, 128]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    tokens=st.sampled_from([1, 3, 8, 13, 32, 70]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 0, 1, 40, 100]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    threads=st.integers(1, 3),
)
def test_is_its_twin(
    seed: int, lengths: list[int], head_dim: int, kv_heads: int, group: int, tokens: int,
    dtype: torch.dtype, window: int, softcap: float, threads: int,
) -> None:  # fmt: skip
    p = paged(
        seed, lengths, head_dim=head_dim, kv_heads=kv_heads, group=group, tokens=tokens, waste=60, dtype=dtype
    )
    branching(p, seed)
    q = p.queries(len(lengths)).float()
    got, want = torch.full_like(q, torch.nan), torch.empty_like(q)
    given = (q, *p.cache, p.lengths, head_dim**-0.5, window, softcap)
    with on_threads(threads):
        cpu.decode_attention(got, *given, runs_of(p, threads))
    reference.decode_attention(want, *given)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 90])
def test_is_bit_for_bit_one_piece_wherever_it_stops(dtype: torch.dtype, window: int) -> None:
    p = paged(3, [150, 7, 145, 130, 151, 99], head_dim=24, group=3, tokens=16, dtype=dtype)
    p.tables[2, :8] = p.tables[3, :8] = p.tables[0, :8]
    p.tables[4, :9] = p.tables[2, :9]
    runs = runs_of(p, 1)
    assert runs is not None
    q = p.queries(6).float().contiguous()
    whole, out = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)

    def call(to: torch.Tensor) -> AttentionArguments:
        made = arguments(p, q, to, window, 1)
        made.span = span_of_runs(runs, 2, 3, 1)
        made.spans = -(-2 // made.span)
        names = ("order", "runs", "run_count", "segments", "longest")
        for name, value in zip(names, addresses_of(runs), strict=True):
            setattr(made, name, value)
        return made

    attend_all(call(whole), 1)
    assert whole.isfinite().all()
    for step in (1, 17, 100):
        one: Any = call(out.fill_(torch.nan))
        record = np.ctypeslib.as_array((AttentionArguments * 1).from_buffer(one))[0]
        scratch = np.empty(room_of(record) + 16, np.float32)
        place = (scratch.ctypes.data + 63) // 64 * 64
        begin(place)
        until = 0
        while advance(record, ctypes.addressof(one), place, until):
            until += step
        assert out.equal(whole)


@settings(deadline=None, max_examples=80)
@given(
    common=st.lists(st.sampled_from([0, 16, 16, 32, 160]), min_size=1, max_size=60),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 16),
    threads=st.integers(1, 8),
)
def test_runs_have_each_token_of_each_row_once(
    common: list[int], kv_heads: int, group: int, threads: int
) -> None:
    common[0] = 0
    rows = len(common)
    found = row_runs(np.arange(rows, dtype=np.int32), common, kv_heads, group, threads)
    seen = Counter[int]()
    for first, count, at, length in found.runs.tolist():
        assert count <= found.longest
        assert count == 1 or count * group <= MOST_QUERIES
        seen.update(range(first, first + count))
        reached = dict.fromkeys(range(first, first + count), 0)
        for start, together, token, end in found.segments[at : at + length].tolist():
            for row in range(start, start + together):
                assert reached[row] == token
                reached[row] = end
            if together > 1:
                assert token < end <= min(common[start + 1 : start + together])
            else:
                assert end == END
        assert set(reached.values()) == {END}
    assert seen == Counter(range(rows))

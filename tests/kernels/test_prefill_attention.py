"""The attention of prompts over pages is its twin's, and a query's does not depend on its chunk."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvloom.kernels import cpu, reference
from tests.exec.batches import on_threads
from tests.kernels.paged import Paged, paged

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
SEQUENCE = st.tuples(st.sampled_from([0, 0, 1, 17, 63, 64, 65, 128, 150]), st.integers(1, 140))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(p: Paged, q: Tensor, starts: list[int], edges: list[int], window: int, softcap: float) -> Tensor:
    out = torch.full_like(q, torch.nan)
    places = int32(starts), int32(edges)
    cpu.prefill_attention(out, q, *p.cache, *places, p.head_dim**-0.5, window, softcap)
    return out


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 1 << 20),
    sequences=st.lists(SEQUENCE, min_size=1, max_size=4),
    head_dim=st.sampled_from([1, 7, 16, 24, 64, 80, 100, 128]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 8, 100]),
    tokens=st.sampled_from([1, 3, 8, 13, 32, 70, 100]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 0, 1, 5, 64, 90]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    threads=st.integers(1, 3),
)
def test_is_its_twin(
    seed: int, sequences: list[tuple[int, int]], head_dim: int, kv_heads: int, group: int, tokens: int,
    dtype: torch.dtype, window: int, softcap: float, threads: int,
) -> None:  # fmt: skip
    """Chunks after what is cached, and whole prompts, side by side."""
    starts, counts = ([one[i] for one in sequences] for i in (0, 1))
    p = paged(
        seed,
        [start + count for start, count in sequences],
        head_dim=head_dim, kv_heads=kv_heads, group=group, tokens=tokens, waste=60, dtype=dtype,
    )  # fmt: skip
    edges = list(accumulate(counts, initial=0))
    q = p.queries(edges[-1]).float()
    with on_threads(threads):
        got = attend(p, q, starts, edges, window, softcap)
    want, places = torch.empty_like(q), (int32(starts), int32(edges))
    reference.prefill_attention(want, q, *p.cache, *places, head_dim**-0.5, window, softcap)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40, 100])
def test_a_query_is_the_same_to_the_bit_in_whatever_chunk(dtype: torch.dtype, window: int) -> None:
    p = paged(window, [300], head_dim=40, group=3, tokens=13, dtype=dtype)
    q = p.queries(300).float()
    whole = attend(p, q, [0], [0, 300], window, 0.0)
    for cuts in ([0, 1, 300], [0, 64, 128, 300], [0, 31, 32, 97, 290, 300]):
        chunks = [attend(p, q[a:b], [a], [0, b - a], window, 0.0) for a, b in pairwise(cuts)]
        assert torch.cat(chunks).equal(whole)


def test_takes_strided_rows_and_may_overwrite_its_queries() -> None:
    p = paged(3, [90, 20], head_dim=32, group=3)
    fused = torch.randn(80, 10, 32)
    before = fused.clone()
    edges, starts = [0, 60, 80], [30, 0]
    want = attend(p, fused[:, :6].contiguous(), starts, edges, 0, 0.0)
    places = int32(starts), int32(edges)
    cpu.prefill_attention(fused[:, :6], fused[:, :6], *p.cache, *places, 32**-0.5)
    assert fused[:, :6].equal(want)
    assert fused[:, 6:].equal(before[:, 6:])


def test_large_scores_stay_finite() -> None:
    p = paged(1, [200], head_dim=64)
    for larger in (300.0, 0.0):
        q = p.queries(200).float() * larger
        for softcap in (0.0, 50.0):
            assert attend(p, q, [0], [0, 200], 0, softcap).isfinite().all()


def test_no_sequences_and_wrong_shapes() -> None:
    p = paged(3, [9], head_dim=32)
    q = p.queries(9)
    none = int32([]), int32([0])
    cpu.prefill_attention(q[:0].clone(), q[:0], *p.cache[:3], p.tables[:0], *none, 1.0)
    with pytest.raises(ValueError, match="begins: want"):
        attend(p, q, [0], [0], 0, 0.0)
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        attend(p, q[:, :3], [0], [0, 9], 0, 0.0)

"""Prefill attention in Triton's interpreter: against its twin, torch's own attention, and decode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda.decode import decode_attention
from kvloom.kernels.cuda.prefill import prefill_attention
from tests.kernels.paged import Paged, paged

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}
FILL = 7.0


def job(p: Paged, counts: list[int]) -> tuple[Tensor, Tensor]:
    """starts and begins of a job that computes the last counts[b] tokens of each sequence."""
    new = torch.tensor(counts, dtype=torch.int32)
    return p.lengths - new, F.pad(new.cumsum(0), (1, 0)).int()


def check(p: Paged, counts: list[int], window: int = 0, softcap: float = 0.0, padding: int = 0) -> None:
    q = p.queries(sum(counts) + padding)
    form = p.arena.shape[3] ** -0.5, window, softcap
    out, wanted = torch.full_like(q, FILL), torch.full_like(q, FILL)
    prefill_attention(out, q, *p.cache, *job(p, counts), *form)
    reference.prefill_attention(wanted, q, *p.cache, *job(p, counts), *form)
    close = CLOSE[q.dtype]
    torch.testing.assert_close(out, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_head_sizes(head_dim: int) -> None:
    dtype = torch.float32 if head_dim == 256 else torch.float16
    check(paged(head_dim, [70, 9], head_dim=head_dim, kv_heads=1, dtype=dtype), [3, 9])


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 1, 20, 60])
def test_windows_and_softcaps(window: int, softcap: float) -> None:
    """Tiles hold 32 tokens; the first sequence is new, the second has a cached part, the third only that."""
    p = paged(window, [75, 130, 40, 11], kv_heads=1, group=2, tokens=13)
    check(p, [75, 40, 0, 1], window, softcap, padding=3)


@pytest.mark.parametrize(("group", "kv_heads", "tokens"), [(1, 3, 1), (3, 2, 5), (7, 1, 64), (40, 1, 16)])
def test_groups_and_page_sizes(group: int, kv_heads: int, tokens: int) -> None:
    check(paged(group, [9, 37], kv_heads=kv_heads, group=group, tokens=tokens, waste=60), [4, 22])


def test_many_sequences_find_their_chunks() -> None:
    counts = [1, 0, 17, 0, 0, 2, 33, 1, 0]
    check(paged(5, [count + 3 for count in counts], kv_heads=1, group=3), counts)


def test_no_sequences_and_no_tokens() -> None:
    p = paged(6, [5])
    check(p, [0])
    none = torch.empty(0, dtype=torch.int32)
    prefill_attention(
        p.queries(0), p.queries(0), *p.cache[:3], p.tables[:0], none, torch.zeros(1, dtype=torch.int32), 1.0
    )


def test_like_torchs_own_attention() -> None:
    p = paged(7, [50], group=3)
    q = p.queries(20)
    out = torch.empty_like(q)
    prefill_attention(out, q, *p.cache, *job(p, [20]), 0.3)
    k, v = p.dense(0)
    seen = torch.ones(20, 50, dtype=torch.bool).tril(30)
    wanted = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, seen, scale=0.3)
    torch.testing.assert_close(out, wanted.transpose(0, 1), rtol=2e-5, atol=2e-5)


def test_one_new_token_is_a_decode_step() -> None:
    p = paged(8, [1, 33, 70])
    q = p.queries(3)
    one, other = torch.empty_like(q), torch.empty_like(q)
    prefill_attention(one, q, *p.cache, *job(p, [1, 1, 1]), 0.25, 40)
    decode_attention(other, q, *p.cache, p.lengths, 0.25, 40)
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)

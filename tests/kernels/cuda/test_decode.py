"""Decode attention and the merge of its splits in Triton's interpreter: against their twins, and torch's own
attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda.decode import Workspace, decode_attention, merge, splits_for
from tests.kernels.paged import Paged, paged

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}


def attend(p: Paged, q: Tensor, splits: int, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    room = Workspace.make(splits, len(q) + 1, q.shape[1], q.shape[2], q.device)
    room.parts.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    decode_attention(out, q, *p.cache, p.lengths, scale, window, softcap, workspace=room)
    return out


def check(p: Paged, splits: int = 1, window: int = 0, softcap: float = 0.0) -> None:
    q = p.queries(len(p.lengths))
    scale = p.arena.shape[3] ** -0.5
    out, wanted = attend(p, q, splits, scale, window, softcap), torch.empty_like(q)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, scale, window, softcap)
    close = CLOSE[q.dtype]
    torch.testing.assert_close(out, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_head_sizes(head_dim: int) -> None:
    dtype = torch.float32 if head_dim == 256 else torch.float16
    check(paged(head_dim, [1, 40], head_dim=head_dim, kv_heads=1, dtype=dtype), splits=2)


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (140, 2.0)])
def test_splits_windows_and_softcaps(splits: int, window: int, softcap: float) -> None:
    """Tiles hold 128 tokens, and some splits none."""
    check(paged(splits, [0, 1, 128, 300], kv_heads=1, tokens=37), splits, window, softcap)


@pytest.mark.parametrize(("group", "kv_heads", "tokens"), [(1, 3, 1), (3, 2, 5), (7, 1, 64), (20, 1, 16)])
def test_groups_and_page_sizes(group: int, kv_heads: int, tokens: int) -> None:
    check(paged(group, [9, 17], kv_heads=kv_heads, group=group, tokens=tokens, waste=60))


def test_like_torchs_own_attention() -> None:
    p = paged(1, [33, 150], group=3)
    q = p.queries(2)
    out = attend(p, q, 2, 0.3)
    for b in range(2):
        k, v = p.dense(b)
        wanted = F.scaled_dot_product_attention(q[b][:, None], k, v, scale=0.3)[:, 0]
        torch.testing.assert_close(out[b], wanted, rtol=2e-5, atol=2e-5)


def test_large_scores_stay_finite() -> None:
    p = paged(2, [40])
    q = p.queries(1) * 300
    out = attend(p, q, 1, 1.0)
    wanted = torch.empty_like(q)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, 1.0)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_an_output_may_be_a_part_of_wider_rows() -> None:
    p = paged(3, [20])
    q, wide = p.queries(1), torch.zeros(1, p.heads + 2, 16)
    decode_attention(wide[:, 1:-1], q, *p.cache, p.lengths, 0.25)
    wanted = torch.empty_like(q)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, 0.25)
    torch.testing.assert_close(wide[:, 1:-1], wanted, rtol=2e-5, atol=2e-5)
    assert not wide[:, [0, -1]].any()


def test_what_does_not_fit_is_refused() -> None:
    p = paged(4, [20])
    q = p.queries(1)
    with pytest.raises(ValueError, match="out: want values"):
        decode_attention(q[:, 1:], q, *p.cache, p.lengths, 1.0)
    with pytest.raises(ValueError, match="lengths: want int32"):
        decode_attention(q, q, *p.cache, p.lengths.long(), 1.0)
    with pytest.raises(ValueError, match="a multiple"):
        decode_attention(q[:, 1:], q[:, 1:], *p.cache, p.lengths, 1.0)
    with pytest.raises(ValueError, match="room for 1 sequences"):
        decode_attention(
            q, q, *p.cache, p.lengths, 1.0, workspace=Workspace.make(2, 0, 4, 16, torch.device("cpu"))
        )


@pytest.mark.parametrize(
    ("splits", "rows", "heads", "head_dim"), [(1, 3, 2, 16), (2, 5, 3, 80), (9, 70, 1, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merging_splits(splits: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(splits)
    parts = torch.randn(splits, rows, heads, head_dim).to(dtype)
    lse = torch.randn(splits, rows, heads) * 20
    absent = torch.rand(lse.shape) < 0.3
    absent[:, 0] = True
    lse[absent], parts[absent] = -torch.inf, torch.nan
    out = torch.full((rows, heads, head_dim), torch.nan)
    wanted = out.clone()
    merge(out, parts, lse)
    reference.merge(wanted, parts, lse)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert not out[0].any()


def test_splits_fill_a_share_once() -> None:
    assert splits_for(batch=1, kv_heads=8, multiprocessors=132, longest=100_000) == 33
    assert splits_for(batch=1, kv_heads=8, multiprocessors=132, longest=300) == 4
    assert splits_for(batch=64, kv_heads=8, multiprocessors=132, longest=100_000) == 1
    assert splits_for(batch=1, kv_heads=1, multiprocessors=132, longest=100_000) == 64
    assert splits_for(batch=1, kv_heads=1, multiprocessors=16, longest=1) == 1

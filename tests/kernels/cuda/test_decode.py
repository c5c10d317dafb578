"""Decode attention, the list of its parts and their merge in Triton's interpreter: against their twins, and
torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.kernels import reference
from kvloom.kernels.cuda import reference as cuda_reference
from kvloom.kernels.cuda.decode import Workspace, decode_attention, list_parts, merge, parts_for, workspace
from tests.kernels.paged import Paged, paged

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}


def attend(p: Paged, q: Tensor, parts: int, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """parts: of all sequences, at most; 0 for whole ones."""
    room = None
    if parts:
        room = Workspace.make(parts, len(q), q.shape[1], q.shape[2], q.device)
        room.parts.fill_(torch.nan)
        room.lse.fill_(torch.nan)
        list_parts(room.work, room.begins, p.lengths, window, 16)
    out = torch.full_like(q, torch.nan)
    decode_attention(out, q, *p.cache, p.lengths, scale, window, softcap, workspace=room)
    return out


def check(p: Paged, parts: int = 0, window: int = 0, softcap: float = 0.0) -> None:
    q = p.queries(len(p.lengths))
    scale = p.arena.shape[3] ** -0.5
    out, wanted = attend(p, q, parts, scale, window, softcap), torch.empty_like(q)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, scale, window, softcap)
    close = CLOSE[q.dtype]
    torch.testing.assert_close(out, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_head_sizes(head_dim: int) -> None:
    dtype = torch.float32 if head_dim == 256 else torch.float16
    check(paged(head_dim, [1, 40], head_dim=head_dim, kv_heads=1, dtype=dtype), parts=3)


@pytest.mark.parametrize("parts", [0, 4, 7, 40])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (140, 2.0)])
def test_parts_windows_and_softcaps(parts: int, window: int, softcap: float) -> None:
    """Tiles hold 128 tokens."""
    check(paged(parts, [0, 1, 128, 300], kv_heads=1, tokens=37), parts, window, softcap)


@pytest.mark.parametrize(("group", "kv_heads", "tokens"), [(1, 3, 1), (3, 2, 5), (7, 1, 64), (20, 1, 16)])
def test_groups_and_page_sizes(group: int, kv_heads: int, tokens: int) -> None:
    check(paged(group, [9, 17], kv_heads=kv_heads, group=group, tokens=tokens, waste=60))


def test_like_torchs_own_attention() -> None:
    p = paged(1, [33, 150], group=3)
    q = p.queries(2)
    out = attend(p, q, 4, 0.3)
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
    with pytest.raises(ValueError, match="begins: want int32 \\[2\\]"):
        decode_attention(
            q, q, *p.cache, p.lengths, 1.0, workspace=Workspace.make(2, 2, 4, 16, torch.device("cpu"))
        )
    with pytest.raises(ValueError, match="a part of each of 1 sequences, got 0"):
        list_parts(torch.empty(0, 3).int(), torch.empty(2).int(), p.lengths, 0, 16)


@pytest.mark.parametrize(
    ("counts", "heads", "head_dim"), [([1, 0, 3], 2, 16), ([2, 5, 0, 40], 3, 80), ([1] * 70, 1, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merging_parts(counts: list[int], heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Rows have as many as they have, and what is behind the last is nobody's."""
    torch.manual_seed(heads)
    begins = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int()
    parts = torch.randn(sum(counts) + 2, heads, head_dim).to(dtype)
    lse = torch.randn(sum(counts) + 2, heads) * 20
    parts[-2:], lse[-2:] = torch.nan, torch.nan
    out = torch.full((len(counts), heads, head_dim), torch.nan)
    merge(out, parts, lse, begins)
    for row, count in enumerate(counts):
        wanted, own = torch.zeros(1, heads, head_dim), slice(int(begins[row]), int(begins[row + 1]))
        if count:
            reference.merge(wanted, parts[own, None], lse[own, None])
        torch.testing.assert_close(out[row : row + 1], wanted, rtol=1e-5, atol=1e-6)


def random_lengths(batch: int, generator: torch.Generator) -> Tensor:
    """Returns many short ones, some long and some that are padding."""
    lengths = torch.randint(0, 300, (batch,), generator=generator)
    lengths[torch.rand(batch, generator=generator) < 0.2] *= 31
    lengths[torch.rand(batch, generator=generator) < 0.2] = 0
    return lengths.int()


@pytest.mark.parametrize("window", [0, 1, 200])
@pytest.mark.parametrize(("batch", "least"), [(1, 64), (7, 16), (40, 128), (300, 64)])
def test_listing_parts(batch: int, least: int, window: int) -> None:
    """As the twin does, for random lengths; every token is in one part, and no part is longer than it need
    be."""
    generator = torch.Generator().manual_seed(batch + window)
    for room in (batch, batch + 5, 3 * batch + 33):
        lengths = random_lengths(batch, generator)
        found = torch.full((room, 3), -7).int(), torch.full((batch + 1,), -7).int()
        wanted = torch.empty_like(found[0]), torch.empty_like(found[1])
        list_parts(*found, lengths, window, least)
        cuda_reference.list_parts(*wanted, lengths, window, least)
        assert found[0].equal(wanted[0])
        assert found[1].equal(wanted[1])
        work, begins = found[0].tolist(), found[1].tolist()
        assert begins[-1] <= room
        for b, length in enumerate(lengths.tolist()):
            mine = work[begins[b] : begins[b + 1]]
            seen = [position for owner, first, end in mine for position in range(first, end) if owner == b]
            assert seen == list(range(max(0, length - window) if window else 0, length))
        assert all(first >= end for _, first, end in work[begins[-1] :])


def test_a_long_sequence_has_more_parts_than_short_ones() -> None:
    """One of 16,000 tokens beside 31 of 500 would take its programs 32 times as long as theirs."""
    lengths = torch.tensor([16_000, *[500] * 31], dtype=torch.int32)
    room = workspace(torch.empty(32, 32, 128, dtype=torch.float16), lengths, 8, 132, 16_000)
    assert room is not None
    counts = room.begins.diff().tolist()
    assert counts == [17, *[1] * 31]
    assert workspace(torch.empty(32, 32, 128), lengths.clamp(max=64), 8, 132, 64) is None


def test_parts_fill_a_share_once() -> None:
    assert parts_for(batch=1, kv_heads=8, multiprocessors=132, longest=100_000) == 33
    assert parts_for(batch=1, kv_heads=8, multiprocessors=132, longest=300) == 5
    assert parts_for(batch=64, kv_heads=8, multiprocessors=132, longest=100_000) == 64 + 16
    assert parts_for(batch=1, kv_heads=1, multiprocessors=132, longest=100_000) == 264
    assert parts_for(batch=1, kv_heads=1, multiprocessors=16, longest=1) == 1

"""Every CPU kernel against its plain torch twin."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kvloom.kernels import cpu, reference
from kvloom.kernels.cpu import parallel
from tests.kernels.paged import Paged, paged

HEAD_DIMS = (8, 16, 24, 32, 64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 8)
NARROW = (torch.bfloat16, torch.int8)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_attention(
    p: Paged, *, window: int = 0, softcap: float = 0.0, threads: int = 2, larger: float = 1.0
) -> None:
    q = p.queries(len(p.lengths)).float() * larger
    got, want = torch.full_like(q, torch.nan), torch.empty_like(q)
    given = (q, *p.cache, p.lengths, q.shape[-1] ** -0.5, window, softcap)
    with on_threads(threads):
        cpu.decode_attention(got, *given)
    reference.decode_attention(want, *given)
    rounding = max(1.0, larger / 5)  # both round scores to float32: the error of an exponent grows with them
    torch.testing.assert_close(got, want, rtol=2e-5 * rounding, atol=2e-6 * rounding)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_attention_over_shapes(head_dim: int, group: int) -> None:
    check_attention(paged(head_dim * group, [1, 15, 16, 17, 31, 33, 100], head_dim=head_dim, group=group))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", [1, 7, *HEAD_DIMS, 100])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention_over_fewer_bits(dtype: torch.dtype, head_dim: int, group: int) -> None:
    lengths = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 200]
    p = paged(head_dim * group, lengths, head_dim=head_dim, group=group, tokens=37, waste=60, dtype=dtype)
    for window, softcap in ((0, 0.0), (40, 5.0)):
        check_attention(p, window=window, softcap=softcap)


@pytest.mark.parametrize("tokens", [1, 3, 16, 37, 64, 100, 200])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 90, 1000])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_attention_over_page_sizes_windows_and_softcaps(tokens: int, window: int, softcap: float) -> None:
    p = paged(tokens, [1, tokens, tokens + 1, 2 * tokens, 130, 257], head_dim=24, group=2, tokens=tokens)
    check_attention(p, window=window, softcap=softcap)


@pytest.mark.parametrize("seed", range(24))
def test_attention_over_chance(seed: int) -> None:
    torch.manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), ()))]

    lengths = torch.randint(1, pick(2, 50, 400), (pick(1, 2, 5, 9),)).tolist()
    p = paged(
        seed,
        lengths,
        head_dim=pick(*HEAD_DIMS, 1, 7, 40, 100),
        kv_heads=pick(1, 2, 3, 12),
        group=pick(*GROUPS, 16),
        tokens=pick(1, 8, 13, 32, 70, 128),
        waste=pick(0, 60, 200),
    )
    check_attention(p, window=pick(0, 0, 3, 40), softcap=pick(0, 0, 5, 50), threads=pick(1, 2, 3))


def test_attention_with_large_scores_stays_finite() -> None:
    p = paged(1, [1, 40, 90], head_dim=64)
    check_attention(p, larger=300)
    check_attention(p, larger=300, softcap=50.0)
    check_attention(p, larger=0)


def test_attention_weighs_by_a_precise_exponential() -> None:
    """V holds 1 in one token's place only, so that the output is that token's weight."""
    p = paged(1, [32], kv_heads=1, group=1, tokens=32)
    queries = p.queries(1)
    block = p.arena[p.page_map[p.tables[0, 0], 1, 0]]
    block[1] = torch.eye(32)[:, :16]
    for spread in (0.1, 1.0, 10.0):
        q = queries * spread
        got = torch.empty_like(q)
        cpu.decode_attention(got, q, *p.cache, p.lengths, 1.0)
        scores = (block[0].double() * q[0, 0].double()).sum(-1)
        want = (scores - scores.max()).exp()
        want = (want / want.sum())[:16].float()
        seen = want > 1e-30
        # the scores themselves are float32: an error of 1e-7 of the largest becomes one of the exponent
        rtol = 1e-6 + 3e-7 * float(scores.abs().max())
        torch.testing.assert_close(got[0, 0][seen], want[seen], rtol=rtol, atol=0)


def test_attention_takes_strided_rows_and_may_overwrite_its_queries() -> None:
    p = paged(3, [1, 20, 50], head_dim=32, group=3)
    fused = torch.randn(3, 10, 32)
    before = fused.clone()
    want = torch.empty(3, 6, 32)
    tables = torch.cat([p.tables, torch.full_like(p.tables, -1)], 1)[:, : p.tables.shape[1]]
    cache = (p.arena, p.page_map, 1, tables, p.lengths, 0.2)
    reference.decode_attention(want, fused[:, :6], *cache)
    wide = torch.full((6, 3, 40), torch.nan)
    out = wide.transpose(0, 1)[..., :32]
    cpu.decode_attention(out, fused[:, :6], *cache)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-6)
    assert wide[..., 32:].isnan().all()
    assert fused.equal(before)
    cpu.decode_attention(fused[:, :6], fused[:, :6], *cache)
    torch.testing.assert_close(fused[:, :6], want, rtol=2e-5, atol=2e-6)
    assert fused[:, 6:].equal(before[:, 6:])


def test_attention_of_no_sequences() -> None:
    p = paged(3, [4], head_dim=32)
    q = p.queries(0)
    cpu.decode_attention(torch.empty_like(q), q, *p.cache[:3], p.tables[:0], p.lengths[:0], 1.0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("layout", ["plain", "fused", "heads first"])
def test_write(head_dim: int, rows: int, layout: str) -> None:
    p = paged(rows, [rows + 5], head_dim=head_dim, kv_heads=3, tokens=8, waste=100)
    slots = torch.randperm(rows + 5, dtype=torch.int32)[:rows]
    tokens = p.arena.shape[2]
    slot_page, slot_offset = p.tables[0][(slots // tokens).long()], slots % tokens
    if layout == "plain":
        k, v = torch.randn(2, rows, 3, head_dim)
    elif layout == "fused":
        k, v = torch.randn(rows, 12, head_dim)[:, 6:].chunk(2, 1)
    else:
        k, v = torch.randn(2, 3, rows, head_dim).transpose(1, 2)
    whole = p.arena.as_strided((p.arena.shape[0], p.arena.stride(0)), (p.arena.stride(0), 1))
    start = whole.nan_to_num_().clone()
    with on_threads(2):
        cpu.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    got = whole.clone()
    whole.copy_(start)
    reference.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    assert got.equal(whole)
    assert not got.equal(start)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", [1, 7, *HEAD_DIMS, 100])
def test_write_in_fewer_bits(dtype: torch.dtype, head_dim: int) -> None:
    """Bit for bit what the twin writes: ordinary rows, rows of zeros, tiny, huge and strange numbers, and
    ties."""
    rows = 24
    p = paged(head_dim, [rows], head_dim=head_dim, kv_heads=3, tokens=5, waste=100, dtype=dtype)
    k, v = torch.randn(2, rows, 3, head_dim) * torch.logspace(-42, 37, rows)[:, None, None]
    k[0], k[1, 0, 0], k[2, 1, -1], k[3, 2, 0], v[4] = 0.0, torch.nan, torch.inf, -torch.inf, 1e-45
    v[5] = torch.arange(head_dim) % 255 / 2 - 63.5  # halves of a code, if a number has the bound's magnitude
    v[6] = torch.tensor([1.00390625, 1.01171875])[torch.arange(head_dim) % 2]  # between two of bfloat16
    at = torch.arange(rows, dtype=torch.int32)
    tokens = p.arena.shape[2]
    slot_page, slot_offset = p.tables[0][(at // tokens).long()], at % tokens
    row = p.arena.stride(0)
    whole = p.arena.as_strided((p.arena.shape[0], row), (row, 1)).view(torch.int8)
    start = whole.clone()
    with on_threads(2):
        cpu.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    got = whole.clone()
    whole.copy_(start)
    reference.write_kv(p.arena, p.page_map, 1, k, v, slot_page, slot_offset)
    at_home = p.page_map[slot_page.long(), 1].long()  # [rows, kv_heads]
    read = [reference.from_rows(p.arena[at_home, i, slot_offset[:, None].long()], head_dim) for i in (0, 1)]
    assert got.view(dtype).nan_to_num(nan=7.0).equal(whole.view(dtype).nan_to_num(nan=7.0))
    finite = k.isfinite().all(-1)
    assert not read[0][~finite].isfinite().all(-1).any()  # who computes with them sees that they are strange
    step = k.abs().amax(-1, keepdim=True) / 254 if dtype == torch.int8 else k.abs() / 256
    error, bound = (read[0] - k).abs()[finite], (step * (1 + 1e-5) + 1e-30).expand_as(k)[finite]
    assert bool((error <= bound).all())


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_is_the_same_in_whatever_batch(dtype: torch.dtype) -> None:
    p = paged(2, [40], head_dim=24, kv_heads=2, tokens=40, dtype=dtype)
    k, v = torch.randn(2, 40, 2, 24)
    at, page = torch.arange(40, dtype=torch.int32), p.tables[0, :1]
    with on_threads(2):
        cpu.write_kv(p.arena, p.page_map, 1, k, v, page.expand(40).contiguous(), at)
        together = p.arena[p.page_map[page.long(), 1].long()].clone()
        for i in reversed(range(40)):
            one = slice(i, i + 1)
            cpu.write_kv(p.arena, p.page_map, 1, k[one], v[one], page, at[one])
    assert p.arena[p.page_map[page.long(), 1].long()].equal(together)


def test_what_is_written_is_attended() -> None:
    p = paged(3, [23], head_dim=64, tokens=16)
    k, v = torch.randn(2, 23, 2, 64)
    q = p.queries(1)
    at = torch.arange(23, dtype=torch.int32)
    cpu.write_kv(p.arena, p.page_map, 0, k, v, p.tables[0][(at // 16).long()], at % 16)
    got = torch.empty_like(q)
    cpu.decode_attention(got, q, p.arena, p.page_map, 0, p.tables, p.lengths, 0.125)
    want = torch.nn.functional.scaled_dot_product_attention(
        q[0][:, None], k.transpose(0, 1), v.transpose(0, 1), enable_gqa=True
    )
    torch.testing.assert_close(got[0], want[:, 0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1, 8, 24, 64, 100, 768, 2048])
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(size: int, rows: int, offset: float) -> None:
    torch.manual_seed(size + rows)
    x = torch.randn(rows, size + 5)[:, :size] * torch.logspace(-3, 3, rows)[:, None]
    weight = torch.randn(size)
    with on_threads(2):
        got = cpu.rms_norm(x, weight, 1e-6, offset)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6, offset), rtol=1e-6, atol=1e-12)


def test_norm_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(768, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(33, 768) * 3
        torch.testing.assert_close(cpu.rms_norm(x, norm.weight, 1e-5), norm(x), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("head_dim", "size"), [(8, 8), (24, 24), (64, 64), (80, 32), (96, 96), (256, 128)])
@pytest.mark.parametrize("rows", [1, 5, 90])
def test_rotate(head_dim: int, size: int, rows: int) -> None:
    torch.manual_seed(head_dim)
    fused = torch.randn(rows, 9, head_dim)
    want = fused.clone()
    cos, sin = torch.randn(2, rows, size)
    with on_threads(2):
        cpu.rotate(fused[:, 1:6], cos, sin)
    reference.rotate(want[:, 1:6], cos, sin)
    torch.testing.assert_close(fused, want, rtol=1e-6, atol=1e-6)
    heads_first = torch.randn(5, rows, head_dim).transpose(0, 1)
    want = heads_first.clone()
    cpu.rotate(heads_first, cos, sin)
    reference.rotate(want, cos, sin)
    torch.testing.assert_close(heads_first, want, rtol=1e-6, atol=1e-6)


def test_rotate_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    angle = torch.randn(7, 32).repeat(1, 2)
    q, k = torch.randn(7, 4, 64), torch.randn(7, 2, 64)
    heads_first = (q.transpose(0, 1)[None], k.transpose(0, 1)[None])
    want_q, want_k = apply_rotary_pos_emb(*heads_first, angle.cos()[None], angle.sin()[None])
    cpu.rotate(q, angle.cos(), angle.sin())
    cpu.rotate(k, angle.cos(), angle.sin())
    torch.testing.assert_close(q, want_q[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k, want_k[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_python_threads_at_once(threads: int) -> None:
    def work(p: Paged) -> None:
        torch.set_num_threads(threads)
        for _ in range(40):
            check_attention(p, threads=threads)
            x = torch.randn(80, 768)
            want = reference.rms_norm(x, x[0], 1e-6)
            torch.testing.assert_close(cpu.rms_norm(x, x[0], 1e-6), want, rtol=1e-6, atol=1e-12)

    caches = [paged(seed, [40 + seed, 3, 90], head_dim=64, kv_heads=4, group=2) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, cache) for cache in caches]:
            done.result()


def test_without_a_shared_runtime_kernels_run_serially(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_team_entry", lambda: None)
    check_attention(paged(5, [70, 4], head_dim=64), threads=2)


def test_a_misfit_is_named() -> None:
    p = paged(5, [70, 4], head_dim=64)
    q = p.queries(2)
    gaps, cache = q.repeat(1, 1, 2)[..., ::2], (p.arena, p.page_map, 1)
    calls: list[tuple[str, Any]] = [
        ("tables: want int32", lambda: cpu.decode_attention(q, q, *cache, p.tables.long(), p.lengths, 1.0)),
        ("q: want float32", lambda: cpu.decode_attention(q, q.double(), *p.cache, p.lengths, 1.0)),
        ("a multiple of 2 heads", lambda: cpu.decode_attention(q[:, 1:], q[:, 1:], *p.cache, p.lengths, 1.0)),
        ("out: want", lambda: cpu.decode_attention(q[:, 1:], q, *p.cache, p.lengths, 1.0)),
        ("tables: want", lambda: cpu.decode_attention(q, q, *cache, p.tables[:1], p.lengths, 1.0)),
        (
            "without gaps",
            lambda: cpu.decode_attention(q, gaps, *p.cache, p.lengths, 1.0),
        ),
        ("arena: want", lambda: cpu.write_kv(*cache, q[..., :9], q[..., :9], p.lengths, p.lengths)),
        ("k: want", lambda: cpu.write_kv(*cache, q[:, :1], q[:, :1], p.lengths, p.lengths)),
        ("want layer 2 in it", lambda: cpu.write_kv(*cache[:2], 2, q, q, p.lengths, p.lengths)),
        ("weight: want", lambda: cpu.rms_norm(q[0], q[0, 0, :5], 1e-6)),
        ("an even size up to 64", lambda: cpu.rotate(q, q[:, 0, :7], q[:, 0, :7])),
        ("multiple of 64", lambda: reference.block_view(torch.empty(1000, dtype=torch.uint8), 100, 8)),
    ]
    for told, call in calls:
        with pytest.raises(ValueError, match=told):
            call()

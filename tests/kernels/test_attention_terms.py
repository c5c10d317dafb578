"""What scores have beside q · k, attention sinks and ALiBi's biases, in the kernels and in their twins."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from kvloom.exec.attention import Scoring, attend_dense, runs_of
from kvloom.kernels import cpu, reference
from kvloom.kv.shared import shared_prefixes
from tests.kernels.paged import Paged, paged

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
TERMS = [("sinks",), ("slopes",), ("sinks", "slopes")]


def terms_of(names: tuple[str, ...], p: Paged) -> dict[str, Any]:
    """Random sinks, one of them so low that it takes nothing, and slopes of either sign."""
    made: dict[str, Any] = {name: torch.randn(p.heads) * (2.0 if name == "sinks" else 0.1) for name in names}
    if "sinks" in made:
        made["sinks"][0] = -100.0
    return made


def dense(p: Paged, b: int, q: torch.Tensor, start: int, window: int, terms: dict[str, Any]) -> torch.Tensor:
    """Softmax over scores as one writes them down, in float64, for q [n, heads, D] from `start` on."""
    k, v = (x.double() for x in p.dense(b))
    end = start + len(q)
    scores = q.double().transpose(0, 1) @ k[:, :end].transpose(1, 2) * p.head_dim**-0.5
    distance = torch.arange(start, end)[:, None] - torch.arange(end)
    if "slopes" in terms:
        scores -= terms["slopes"].double()[:, None, None] * distance
    hidden = (distance < 0) | (distance >= (window or end))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if "sinks" in terms:
        total += terms["sinks"].double().exp()[:, None, None]
    out: torch.Tensor = (weights / total @ v[:, :end]).transpose(0, 1).float()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("names", TERMS)
@pytest.mark.parametrize("seed", range(3))
def test_decode(seed: int, names: tuple[str, ...], window: int, dtype: torch.dtype) -> None:
    p = paged(seed, [1, 17, 64, 130], head_dim=24, group=3, tokens=13, dtype=dtype)
    terms, q = terms_of(names, p), p.queries(4).float()
    got, twin = torch.full_like(q, torch.nan), torch.empty_like(q)
    given = (q, *p.cache, p.lengths, 24**-0.5, window, 0.0)
    cpu.decode_attention(got, *given, **terms)
    reference.decode_attention(twin, *given, **terms)
    torch.testing.assert_close(got, twin, rtol=2e-5, atol=2e-6)
    lengths = p.lengths.tolist()
    want = torch.cat([dense(p, b, q[b : b + 1], n - 1, window, terms) for b, n in enumerate(lengths)])
    torch.testing.assert_close(twin, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("names", TERMS)
@pytest.mark.parametrize("seed", range(3))
def test_prefill(seed: int, names: tuple[str, ...], window: int, dtype: torch.dtype) -> None:
    starts, counts = [0, 70, 3], [90, 20, 1]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    p = paged(seed, lengths, head_dim=24, group=3, tokens=13, dtype=dtype)
    edges = list(accumulate(counts, initial=0))
    terms, q = terms_of(names, p), p.queries(edges[-1]).float()
    got, twin = torch.full_like(q, torch.nan), torch.empty_like(q)
    places = torch.tensor(starts).int(), torch.tensor(edges).int()
    cpu.prefill_attention(got, q, *p.cache, *places, 24**-0.5, window, 0.0, **terms)
    reference.prefill_attention(twin, q, *p.cache, *places, 24**-0.5, window, 0.0, **terms)
    torch.testing.assert_close(got, twin, rtol=2e-5, atol=2e-6)
    for b, start in enumerate(starts):
        rows = slice(edges[b], edges[b + 1])
        want = dense(p, b, q[rows], start, window, terms)
        torch.testing.assert_close(twin[rows], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("names", TERMS)
@pytest.mark.parametrize("window", [0, 40])
def test_rows_that_share_pages(window: int, names: tuple[str, ...]) -> None:
    p = paged(window, [70, 90, 64], head_dim=24, group=3, tokens=8)
    tables = p.tables.clone()
    tables[:, :6] = tables[0, :6]
    starts = (p.lengths - 1).long().numpy()
    shared = shared_prefixes(tables.numpy(), starts, p.arena.shape[2])
    assert shared is not None
    terms, q = terms_of(names, p), p.queries(3).float()
    got, want = torch.full_like(q, torch.nan), torch.empty_like(q)
    given = (q, *p.cache[:3], tables, p.lengths, 24**-0.5, window, 0.0)
    cpu.decode_attention(got, *given, runs_of(shared, p.page_map.shape[2], p.group), **terms)
    reference.decode_attention(want, *given, **terms)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("names", TERMS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_dense_attention_is_the_twins(softcap: float, names: tuple[str, ...]) -> None:
    """The loader compares models by it."""
    p = paged(1, [60], head_dim=24, group=3, tokens=16)
    terms, q = terms_of(names, p), p.queries(20)
    want, places = torch.empty_like(q), (torch.tensor([40]).int(), torch.tensor([0, 20]).int())
    reference.prefill_attention(want, q, *p.cache, *places, 0.2, 30, softcap, **terms)
    k, v = (x[:: p.group] for x in p.dense(0))
    found = attend_dense(q.transpose(0, 1), k, v, 40, Scoring(0.2, 30, softcap, **terms)).transpose(0, 1)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-6)


def test_terms_of_another_form_are_refused() -> None:
    p = paged(1, [9])
    q = p.queries(1)
    for wrong in (torch.zeros(p.heads + 1), torch.zeros(p.heads, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"sinks: want float32 \[{p.heads}\]"):
            cpu.decode_attention(torch.empty_like(q), q, *p.cache, p.lengths, 1.0, sinks=wrong)

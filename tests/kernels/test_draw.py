"""Draws: the noise against its definition, the filters against a plain sort, the kernel against its twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvloom.kernels import draw_reference as reference
from kvloom.kernels.cpu.draw import draw
from kvloom.kernels.draw_reference import BLOCK, gumbel_noise, logarithm, masses, streams
from tests.draws import follows

GOLDEN = 0x9E3779B97F4A7C15
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_streams_and_noise_by_their_definition() -> None:
    pairs = [(key, index) for key in (0, 1, 2**63, 2**64 - 1) for index in (0, 1, 10_000)]
    found = streams([key for key, _ in pairs], [index for _, index in pairs])
    wanted = [mixed((mixed(key) + (index + 1) * GOLDEN) % 2**64) for key, index in pairs]
    assert found.view(np.uint64).tolist() == wanted

    def number(stream: int, counter: int) -> int:
        return mixed((stream + (counter + 1) * GOLDEN) % 2**64)

    def variate(bits: int) -> float:
        return -math.log(((bits >> 12) + 0.5) / 2**52)

    size = 2 * BLOCK + 5
    noise = gumbel_noise(torch.from_numpy(found), size)
    for row, stream in enumerate(wanted):
        for token in range(size):
            bits = number(stream, -2 - token // BLOCK)
            first = token % BLOCK == bits % BLOCK
            more = 0.0 if first else variate(number(stream, token))
            assert float(noise[row, token]) == pytest.approx(
                -math.log(variate(bits) / BLOCK + more), abs=1e-12
            )


def test_the_logarithm_and_the_masses() -> None:
    x = torch.from_numpy(
        np.concatenate((np.geomspace(1e-300, 1e300, 5001), 1 - np.geomspace(1e-16, 0.9, 999)))
    )
    torch.testing.assert_close(logarithm(x), x.log(), rtol=4e-16, atol=4e-16)
    y = torch.linspace(0.0, -27.0, 5001, dtype=torch.float64)
    torch.testing.assert_close(masses(y).double(), y.exp() * 2.0**40, rtol=1e-11, atol=1.0)
    edges = torch.tensor([-math.inf, math.nan, -40.0, 0.0], dtype=torch.float64)
    assert masses(edges).tolist() == [0, 0, 0, 2**40]


@pytest.mark.parametrize("along", ["tokens", "indices", "keys", "choices"])
def test_noise_is_gumbel_and_without_relation(along: str) -> None:
    """The distribution function makes it even, along each of what it is a function of."""
    count, zeros = 64 * BLOCK, np.zeros(64 * BLOCK, dtype=np.uint64)
    steps = np.arange(count, dtype=np.uint64)
    choices = steps * np.uint64(0x2545F4914F6CDD1D)
    keys = {"keys": steps, "choices": choices}.get(along, zeros)
    indices = steps if along == "indices" else zeros
    if along == "tokens":
        noise = gumbel_noise(torch.from_numpy(streams([5], [7])), count)[0]
    else:
        noise = gumbel_noise(torch.from_numpy(streams(keys, indices)), 3)[:, 2]
    even = (-(-noise).exp()).exp().numpy()
    assert follows(np.histogram(even, 32, (0, 1))[0], np.full(32, 1 / 32))
    for lag in (1, 2, BLOCK, BLOCK + 1):
        assert abs(float(np.corrcoef(even[lag:], even[:-lag])[0, 1])) < 0.08


def test_tokens_of_one_block_are_independent() -> None:
    """The block's least variate is drawn first: that must not show in any two of its tokens."""
    noise = gumbel_noise(torch.from_numpy(streams(np.arange(8000), np.zeros(8000))), BLOCK)
    even = (-(-noise).exp()).exp()
    related = np.corrcoef(even.T.numpy()) - np.eye(BLOCK)
    assert abs(related).max() < 5 / 8000**0.5
    assert follows(noise.argmax(-1).bincount(minlength=BLOCK).numpy(), np.full(BLOCK, 1 / BLOCK))
    pair, _, _ = np.histogram2d(even[:, 3], even[:, 40], 8, ((0, 1), (0, 1)))
    assert follows(pair.flatten().astype(np.int64), np.full(64, 1 / 64))


def rows(seed: int, count: int, size: int, scale: float, digits: int) -> Row:
    """Rows of which each has other filters, or none."""
    make = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, size, generator=make) * scale).round(decimals=digits)
    logits[torch.rand(count, size, generator=make) < 0.1] = -torch.inf
    drawn = torch.rand(5, count, generator=make)
    top_k = (drawn[1] * 1.2 * size).long() * (drawn[1] < 0.7)
    return (
        logits,
        drawn[0] * 2.5 + 0.01,
        top_k,
        torch.where(drawn[2] < 0.5, 1.0, drawn[3]),
        torch.where(drawn[4] < 0.5, 0.0, drawn[4] - 0.5),
        torch.from_numpy(streams(np.arange(count), np.full(count, seed))),
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 400),
    scale=st.sampled_from([0.0, 0.05, 1.0, 6.0, 40.0]),
    digits=st.integers(0, 6),
)
def test_the_kernel_draws_what_its_twin_does(seed: int, size: int, scale: float, digits: int) -> None:
    both(*rows(seed, 24, size, scale, digits))


@pytest.mark.parametrize("scale", [0.3, 2.0, 5.0])
def test_a_large_vocabulary(scale: float) -> None:
    """Many threads, rows that lie apart, and more blocks than a small k."""
    case = rows(3, 24, 20_011, scale, 3)
    wide = torch.zeros(24, 20_100)
    wide[:, :20_011] = case[0]
    assert both(wide[:, :20_011], *case[1:]) == draw(*case).tolist()


@pytest.mark.parametrize(("size", "scale", "digits"), [(90, 2.0, 1), (3000, 0.5, 2), (3000, 4.0, 6)])
def test_a_share_that_ends_at_the_token_that_wins(size: int, scale: float, digits: int) -> None:
    """The masses' last bits decide whether it stays: kernel and twin agree."""
    make = torch.Generator().manual_seed(size + digits)
    logits = (torch.randn(1, size, generator=make) * scale).round(decimals=digits).expand(60, -1)
    stream = torch.from_numpy(streams(np.arange(60), np.zeros(60)))
    ones, none = torch.ones(60), torch.zeros(60, dtype=torch.int64)
    winners = draw(logits, ones, none, ones, ones * 0, stream)
    mass = masses(logits.double() - logits.amax(-1, keepdim=True).double())
    edge, ids = logits.gather(1, winners[:, None]), torch.arange(size)
    before = torch.where((logits > edge) | ((logits == edge) & (ids < winners[:, None])), mass, 0).sum(-1)
    share = (before.double() / mass.sum(-1)).float()
    kept = []
    for top_p in (share.nextafter(ones * 0), share, share.nextafter(ones)):
        found = both(logits, ones, none, top_p, ones * 0, stream)
        kept.append((torch.tensor(found) == winners)[before > 0])
    assert not kept[0].any()
    assert kept[2].all()


def sorted_filters(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The filters by a sort: equal logits go by id."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    scaled = logits.double() / temperature
    weights = (scaled - scaled.max()).exp()
    order = order[:top_k] if top_k else order
    kept: list[int] = []
    total, before = float(weights[order].sum()), 0.0
    for i in order:
        if not kept or before < top_p * total:
            kept.append(i)
        before += float(weights[i])
    return sorted(i for i in kept if float(weights[i]) >= min_p)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 90),
    temperature=st.sampled_from([0.25, 1.0, 8.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.0, 0.11, 0.53, 0.87, 0.991, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.37, 1.0]),
)
def test_filters_are_those_of_a_sort(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).mul(3).round(decimals=1)
    inverse, lowest = reference.scales(torch.tensor([temperature]), torch.tensor([min_p]))
    kept = reference.possible(logits, inverse, torch.tensor([top_k]), torch.tensor([top_p]), lowest)
    near = {  # a sum that is a share but for its last bits may fall on either side
        tuple(sorted_filters(logits[0], temperature, top_k, top_p * (1 + slack), min_p * (1 + slack)))
        for slack in (-1e-6, 0.0, 1e-6)
    }
    assert tuple(kept[0].nonzero()[:, 0].tolist()) in near


def both(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, stream: Tensor
) -> list[int]:
    """The ids that the kernel draws, which are its twin's."""
    found: list[int] = draw(logits, temperature, top_k, top_p, min_p, stream).tolist()
    assert found == reference.draw(logits, temperature, top_k, top_p, min_p, stream).tolist()
    return found


def one(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """What comes in 200 draws, of the kernel and of its twin."""
    temperatures, ks, ps, least = (torch.full((200,), value) for value in (temperature, top_k, top_p, min_p))
    stream = torch.from_numpy(streams(np.arange(200), np.zeros(200)))
    return set(both(logits.expand(200, -1), temperatures, ks, ps, least, stream))


def test_odd_rows() -> None:
    """One token is possible; all are equal; hot and cold; the narrowest filters."""
    nothing = torch.full((150,), -torch.inf)
    for place in (0, 70, 149):
        alone = nothing.clone()
        alone[place] = -3e38
        assert one(alone) == one(alone, top_p=0.5) == one(alone, top_k=5) == one(alone, min_p=0.5) == {place}
    assert all(
        0 <= token < 150 for token in one(nothing) | one(nothing, top_p=0.5, top_k=3) | one(nothing, min_p=1)
    )
    equal = torch.zeros(150)
    assert len(one(equal)) > 90
    assert one(equal, top_k=1) == one(equal, top_p=1e-9) == one(equal, top_p=0.0) == {0}
    assert one(equal, top_k=3, min_p=1.0) == one(equal, top_p=3 / 150) == {0, 1, 2}
    mixed_zeros = torch.tensor([-0.0, 0.0, -0.0, -1.0])
    assert one(mixed_zeros, top_k=2) == {0, 1}
    peak = torch.zeros(150)
    peak[99], peak[20] = 2.0, 1.999
    assert one(peak, temperature=1e-30) == one(peak, top_k=1) == one(peak, top_p=1e-6) == {99}
    assert one(peak, min_p=1.0) == {99}
    assert len(one(peak, temperature=100.0)) > 90
    assert one(torch.tensor([3.0])) == {0}


def test_a_row_that_is_no_number_spares_its_neighbours() -> None:
    logits = torch.randn(4, 150, generator=torch.Generator().manual_seed(1))
    ones, top_k, top_p = torch.ones(4), torch.tensor([0, 0, 9, 0]), torch.tensor([1.0, 0.9, 0.9, 1.0])
    stream = torch.from_numpy(streams(np.arange(4), np.zeros(4)))
    wanted = draw(logits, ones, top_k, top_p, ones * 0, stream)
    for value in (torch.nan, torch.inf):
        broken = logits.clone()
        broken[1:3] = value
        found = draw(broken, ones, top_k, top_p, ones * 0, stream)
        assert found[[0, 3]].equal(wanted[[0, 3]])
        assert bool(((found >= 0) & (found < 150)).all())


def test_what_does_not_fit_is_refused() -> None:
    logits, ones, none = torch.zeros(2, 5), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits: want float32"):
        draw(logits.double(), ones, none, ones, ones, none)
    with pytest.raises(ValueError, match="stream: want int64"):
        draw(logits, ones, none, ones, ones, none[:1])
    assert draw(logits[:0], ones[:0], none[:0], ones[:0], ones[:0], none[:0]).shape == (0,)

"""The plain twin of the draws: it defines the token that a row of logits gives, on any device, bit by bit.

A token's score is its logit over the temperature, plus Gumbel noise that is a function of the row's stream
and the token's id; the largest score wins, which draws from the softmax (Gumbel, 1954; Maddison, Tarlow and
Minka, 2014). No rank is in it, so that two tokens whose order changes by a rounding change nothing unless one
of them wins.

Noise is minus the logarithm of an exponential variate. In blocks of BLOCK tokens the least variate is drawn
first, then its place, then by how much the others exceed it, which again is exponential (Rényi, 1953). So the
largest noise of a block is known from one number, and a kernel reads on where it cannot win.

Every step is integer arithmetic, or one of +, -, *, / in float64 rounded once, so kernels give the same bits
if they fuse no product with a sum. Masses are integers too: their sums depend on no order.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

BLOCK = 64  # tokens; a power of two
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants, as signed numbers
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)

HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of the square root of 1/2
LOG_2 = math.log(2.0)
LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(10, -1, -1))  # of 2 artanh(s) / s in s²

PER_LOG_2 = 1.0 / LOG_2
EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(10, -1, -1))
MASS_BITS = 40  # the largest logit's mass is 2^40
NO_MASS = -28.0  # e^-28 · 2^40 < 1

COLDEST = 1e-5  # a lower temperature counts as this one


def streams(keys: ArrayLike, indices: ArrayLike) -> NDArray[np.int64]:
    """Returns the stream of random numbers of each (key, index), of shapes that broadcast."""
    key, index = (torch.from_numpy(np.array(one, dtype=np.uint64).view(np.int64)) for one in (keys, indices))
    found: NDArray[np.int64] = mixed(mixed(key) + (index + 1) * GOLDEN).numpy()
    return found


def mixed(z: Tensor) -> Tensor:
    """Returns SplitMix64's finaliser (Steele, Lea and Flood, 2014) of words of 64 bits, kept as int64."""
    z = (z ^ _shifted(z, 30)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * SECOND_FACTOR
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Returns words without sign, shifted to the right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def logarithm(x: Tensor) -> Tensor:
    """Returns the natural logarithm of float64, positive and normal, to about 1e-15: x = 2^n m with m from
    √½ to √2, log m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.view(torch.int64)
    n = (bits - HALF_ROOT) >> 52
    m = (bits - (n << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    return n.double() * LOG_2 + s * _polynomial(s * s, LOG_TERMS)


def masses(y: Tensor) -> Tensor:
    """Returns e^y · 2^MASS_BITS for float64 y up to 0, rounded down to an integer: x = n log 2 + r."""
    y = torch.where(y > NO_MASS, y, NO_MASS)
    n = (y * PER_LOG_2 - 0.5).long()
    power = ((n + (1023 + MASS_BITS)) << 52).view(torch.float64)
    return (_polynomial(y - n.double() * LOG_2, EXP_TERMS) * power).long()


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, terms[0])
    for term in terms[1:]:
        value = value * x + term
    return value


def exponential_variates(stream: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bits of a stream's number at a counter, and the exponential variate that the upper 52 of
    them make."""
    bits = mixed(stream + (counter + 1) * GOLDEN)
    return bits, -logarithm((_shifted(bits, 12).double() + 0.5) * 2.0**-52)


def gumbel_noise(stream: Tensor, size: int) -> Tensor:
    """Returns the noise [R, size] float64 of the first `size` tokens in streams [R]."""
    blocks = -(-size // BLOCK)
    block = torch.arange(blocks, device=stream.device)
    token = torch.arange(blocks * BLOCK, device=stream.device)
    bits, least = exponential_variates(stream[:, None], -2 - block)
    least = least * (1 / BLOCK)
    _, excess = exponential_variates(stream[:, None], token)
    excess = excess.view(-1, blocks, BLOCK)
    excess = torch.where(token[:BLOCK] == (bits & (BLOCK - 1))[..., None], 0.0, excess)
    most = -logarithm(least)[..., None]
    # the minimum, for the logarithm may be wrong by a last bit
    return (-logarithm(least[..., None] + excess)).minimum(most).flatten(1)[:, :size]


def scales(temperature: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a logit is multiplied by, and how far below the largest a scaled logit may be, both
    [R] float64. The logarithm is the device's own, so min-p's threshold alone may be a last bit apart between
    devices."""
    return 1.0 / temperature.double().clamp_min(COLDEST), min_p.double().log()


def leading(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Returns the fewest tokens [R, V], by key and then by lower id, whose weights sum to the target [R] or
    more.

    The least key is found from its highest bit on. keys, from 0 to 2^32 - 1, weights and target are int64.
    """
    floor = torch.zeros_like(target)
    for bit in range(31, -1, -1):
        higher = floor | (1 << bit)
        enough = torch.where(keys >= higher[:, None], weights, 0).sum(-1) >= target
        floor = torch.where(enough, higher, floor)
    above, equal = keys > floor[:, None], keys == floor[:, None]
    missing = target - torch.where(above, weights, 0).sum(-1)
    tied = torch.where(equal, weights, 0)
    return above | (equal & (tied.cumsum(-1) - tied < missing[:, None]))


def possible(logits: Tensor, inverse: Tensor, top_k: Tensor, top_p: Tensor, lowest: Tensor) -> Tensor:
    """Returns which tokens [R, V] the filters leave: top-k (0: all), then top-p of what is left, then min-p.
    inverse, lowest: see `scales`."""
    size, wide = logits.shape[1], logits.double()
    below = (wide - wide.amax(-1, keepdim=True)) * inverse[:, None]
    bits = (logits + 0.0).view(torch.int32).long()  # of the two zeros one
    keys = (1 << 31) + torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    count = torch.where(top_k > 0, top_k, size).clamp(max=size)
    kept = leading(keys, torch.ones_like(keys), count)
    mass = torch.where(kept, masses(below), 0)
    target = (mass.sum(-1).double() * top_p.double()).ceil().long().clamp_min(1)
    kept &= leading(keys, mass, target) | (top_p >= 1)[:, None]
    return kept & (below >= lowest[:, None])


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, stream: Tensor
) -> Tensor:
    """Draws ids [R] from logits [R, V] float32. temperature, top_p and min_p are [R] float32, top_k (0: none)
    and stream [R] int64.

    Filters apply in the order temperature, top-k, top-p, min-p. Of equal logits at a threshold the lower ids
    stay. A row without a possible token gives any one: it must not fail its neighbours.
    """
    inverse, lowest = scales(temperature, min_p)
    scores = logits.double() * inverse[:, None] + gumbel_noise(stream, logits.shape[1])
    kept = possible(logits, inverse, top_k, top_p, lowest)
    return scores.masked_fill(~kept, -torch.inf).argmax(-1)

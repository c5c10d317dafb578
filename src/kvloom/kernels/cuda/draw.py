"""Draws on a GPU, as `kernels/draw_reference.py` defines them. A program is a row, and waits for nobody.

Noise is computed only for tiles in which some token could exceed the best score so far. The token that wins
without top-k and top-p is the draw if they leave it, which the number and the mass of the tokens before it
tell; if not, the best of those before it is next. Only for both together the last token that top-k leaves is
found, bit by bit, each by a pass over the row. Products are not fused with sums, which keeps the bits of the
twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels import draw_reference as reference
from kvloom.kernels.cuda.launch import Launch, Launcher
from kvloom.kernels.reference import check

_TILE = 2048  # tokens

BLOCK = tl.constexpr(reference.BLOCK)
GOLDEN = tl.constexpr(reference.GOLDEN)
FIRST_FACTOR = tl.constexpr(reference.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(reference.SECOND_FACTOR)
HALF_ROOT = tl.constexpr(reference.HALF_ROOT)
LOG_2 = tl.constexpr(reference.LOG_2)
PER_LOG_2 = tl.constexpr(reference.PER_LOG_2)
NO_MASS = tl.constexpr(reference.NO_MASS)
POWER_BIAS = tl.constexpr(1023 + reference.MASS_BITS)
LOG_TERMS = tl.constexpr(reference.LOG_TERMS)
LOG_COUNT = tl.constexpr(len(reference.LOG_TERMS))
EXP_TERMS = tl.constexpr(reference.EXP_TERMS)
EXP_COUNT = tl.constexpr(len(reference.EXP_TERMS))


@triton.jit
def _logarithm(x):  # type: ignore[no-untyped-def]
    bits = x.to(tl.int64, bitcast=True)
    n = (bits - HALF_ROOT) >> 52
    m = (bits - (n << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = tl.zeros_like(z) + LOG_TERMS[0]
    for i in tl.static_range(1, LOG_COUNT):
        p = p * z + LOG_TERMS[i]
    return n.to(tl.float64) * LOG_2 + s * p


@triton.jit
def _mass(y):  # type: ignore[no-untyped-def]
    y = tl.where(y > NO_MASS, y, NO_MASS)
    n = (y * PER_LOG_2 - 0.5).to(tl.int64)
    r = y - n.to(tl.float64) * LOG_2
    p = tl.zeros_like(r) + EXP_TERMS[0]
    for i in tl.static_range(1, EXP_COUNT):
        p = p * r + EXP_TERMS[i]
    return (p * ((n + POWER_BIAS) << 52).to(tl.float64, bitcast=True)).to(tl.int64)


@triton.jit
def _shifted(z, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    return (z >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def _number(stream, counter):  # type: ignore[no-untyped-def]
    z = stream + (counter + 1) * GOLDEN
    z = (z ^ _shifted(z, 30)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * SECOND_FACTOR
    return z ^ _shifted(z, 31)


@triton.jit
def _variate(bits):  # type: ignore[no-untyped-def]
    return -_logarithm((_shifted(bits, 12).to(tl.float64) + 0.5) * (2.0**-52))


@triton.jit
def _keys(x):  # type: ignore[no-untyped-def]
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return (1 << 31) + tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _before(x, size, edge, token, top, inverse, MASSES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of tokens, or their mass, that have a key above `edge`, or that key and a lower id
    than `token`."""
    total = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, size, TILE):
        here = start + tl.arange(0, TILE)
        value = tl.load(x + here, mask=here < size, other=0.0)
        keys = _keys(value)
        counted = (here < size) & ((keys > edge) | ((keys == edge) & (here < token)))
        if MASSES:
            if tl.max(counted.to(tl.int32)) > 0:
                total += tl.where(counted, _mass((value.to(tl.float64) - top) * inverse), 0)
        else:
            total += counted.to(tl.int64)
    return tl.sum(total)


@triton.jit
def _mass_of_first(x, size, k, top, inverse, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the mass of the first k tokens. The last one's key is found from its highest bit on."""
    edge = k * 0
    for step in range(32):
        higher = edge | (tl.full((), 1, tl.int64) << (31 - step))
        enough = _before(x, size, higher - 1, 0, top, inverse, False, TILE) >= k
        edge = tl.where(enough, higher, edge)
    missing = k - _before(x, size, edge, 0, top, inverse, False, TILE)
    mass = _before(x, size, edge, 0, top, inverse, True, TILE)
    return mass + missing * _mass((_value(edge) - top) * inverse)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """Returns the logit of a key."""
    bits = key - (1 << 31)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _best(x, size, edge, rejected, top, inverse, least_p, stream, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the token with the largest score of those that min-p leaves and that have a key above `edge`,
    or that key and a lower id than `rejected`; `size` if there is none."""
    best, winner = tl.full((), float("-inf"), tl.float64), rejected * 0 + size
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        value = tl.load(x + token, mask=token < size, other=float("-inf"))
        keys = _keys(value)
        possible = (keys > edge) | ((keys == edge) & (token < rejected))
        possible &= (value.to(tl.float64) - top) * inverse >= least_p
        scaled = tl.where(possible, value.to(tl.float64) * inverse, float("-inf"))
        block = start // BLOCK + tl.arange(0, TILE // BLOCK)
        bits = _number(stream, -2 - block.to(tl.int64))
        least = _variate(bits) * (1 / BLOCK)
        most = -_logarithm(least)
        scores = tl.reshape(scaled, (TILE // BLOCK, BLOCK))
        if tl.max(tl.max(scores, 1) + most) > best:
            place = tl.arange(0, BLOCK)[None, :]
            here = block[:, None] * BLOCK + place
            excess = _variate(_number(stream, here.to(tl.int64)))
            excess = tl.where(place == (bits & (BLOCK - 1))[:, None], 0.0, excess)
            noise = tl.minimum(-_logarithm(least[:, None] + excess), most[:, None])
            scores += noise
            found = tl.max(tl.max(scores, 1))
            if found > best:
                first = tl.min(tl.min(tl.where(scores == found, here, size), 1))
                best, winner = found, first.to(tl.int64)
    return winner


@triton.jit(do_not_specialize=("top_k", "streams"))  # parts of other tensors, which begin anywhere
def _draw(  # type: ignore[no-untyped-def]
    logits,
    inverses,
    top_k,
    top_p,
    lowest,
    streams,  # Triton's launcher keeps `stream` to itself
    ids,
    size,
    logits_row,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * logits_row
    inverse, least_p = tl.load(inverses + row), tl.load(lowest + row)
    k, p, own = tl.load(top_k + row), tl.load(top_p + row), tl.load(streams + row)
    tops = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        tops = tl.maximum(tops, tl.load(x + token, mask=token < size, other=float("-inf")))
    top = tl.max(tops).to(tl.float64)

    ranked = (k > 0) & (k < size)
    target = k * 0
    if p < 1.0:
        if ranked:
            mass = _mass_of_first(x, size, k, top, inverse, TILE)
        else:
            mass = _before(x, size, row * 0 - 1, 0, top, inverse, True, TILE)
        target = tl.maximum(tl.ceil(mass.to(tl.float64) * p).to(tl.int64), 1)
    edge, winner, searching = row * 0 - 1, row * 0 + size, row >= 0
    while searching:
        winner = _best(x, size, edge, winner, top, inverse, least_p, own, TILE)
        searching = False
        if winner < size:
            edge = tl.sum(_keys(tl.load(x + winner + tl.zeros((1,), dtype=tl.int64))))
            if ranked:
                searching = _before(x, size, edge, winner, top, inverse, False, TILE) >= k
            if p < 1.0:
                searching |= _before(x, size, edge, winner, top, inverse, True, TILE) >= target
    winner = tl.where(winner < size, winner, 0)
    tl.store(ids + row, winner)


@Launcher
def draw_launch(
    ids: Tensor, logits: Tensor, inverse: Tensor, top_k: Tensor, top_p: Tensor, lowest: Tensor, stream: Tensor
) -> Launch:
    """Stores ids [R] int64 drawn from logits [R, V] float32, whose rows may lie anywhere. inverse, lowest:
    see `draw_reference.scales`; these and top_p are [R] float64, top_k and stream [R] int64."""
    rows, size = logits.shape
    check("logits", logits, rows, size, dtypes=(torch.float32,))
    for name, one in (("ids", ids), ("top_k", top_k), ("stream", stream)):
        check(name, one, rows, dtypes=(torch.int64,))
    for name, one in (("temperature", inverse), ("top_p", top_p), ("min_p", lowest)):
        check(name, one, rows, dtypes=(torch.float64,))
    arguments = {
        **{"logits": logits, "inverses": inverse, "top_k": top_k, "top_p": top_p, "lowest": lowest},
        **{"streams": stream, "ids": ids, "size": size, "logits_row": logits.stride(0), "TILE": _TILE},
        "enable_fp_fusion": False,
    }
    return Launch(_draw, (rows,), arguments, warps=8)


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, stream: Tensor
) -> Tensor:
    """Draws ids [R] from logits [R, V] float32, as `draw_reference.draw` says."""
    inverse, lowest = reference.scales(temperature, min_p)
    ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    draw_launch(ids, logits, inverse, top_k.contiguous(), top_p.double(), lowest, stream.contiguous())
    return ids

"""Draws on a CPU, as `kernels/draw_reference.py` defines them, to the bit. A row is one thread's.

Without filters a row is read once, for the largest logit of each block; only blocks whose largest logit, with
the block's largest noise, could exceed the best score so far are looked into.

The token that wins so is the draw of min-p, top-k or top-p, too, if the filter leaves it. That is known
without the filter's threshold: fewer than k tokens come before it, or tokens of less than the share p of the
mass. If it is not left, none of those after it is, and the best of those before it is tried next. On average
a filter that leaves the share P of the mass rejects at most ln(1/P) tokens. Masses are computed in float32
for this, in vectors, and again by their definition only where the error of float32 could decide.

If both top-k and top-p are given, p is a share of what top-k leaves. Then the tokens are gathered that are
not below a bound from the blocks' largest logits, and the least of those that stay is found digit by digit,
from the highest on (a radix select).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.cpu.lanes.draws import (
    above,
    key_of,
    least_variate,
    logarithm,
    lowest_bit,
    mass_of,
    noise,
    not_below,
    number,
    power,
    variate,
    which,
)
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    largest,
    load,
    maximum,
    multiply,
    splat,
    subtract,
    total,
)
from kvloom.kernels.cpu.memory import LINE, address_of, fetch_add, pointer_at, prefetch
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.draw_reference import BLOCK, MASS_BITS, NO_MASS, PER_LOG_2, scales
from kvloom.kernels.reference import check

_SERIAL = 1 << 15  # logits below which one thread is faster than waking a team
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
# An exponent of up to MASS_BITS + 1 bits, rounded three times in float32, changes its power by up to 5e-6 of
# it, and sums of a turn's blocks by less. Two masses are compared, and this is a part of the larger one.
_NEAR = 2e-5
_TURN = 16  # blocks whose masses are summed in float32, before a sum in float64
_SCRATCH = 3  # arrays of a word a token: keys, weights and ids of those that may stay


@njit(inline="never", error_model="numpy")
def _block_maxima(address, size, maxima):  # type: ignore[no-untyped-def]
    """Stores the largest logit of each block, and returns the block that has the largest."""
    x = carray(pointer_at(address), (size,), np.float32)
    top = 0
    for b in range(len(maxima)):
        if (b + 1) * BLOCK <= size:
            at = address + b * BLOCK * 4
            found = load(at)
            for i in range(LANES * 4, BLOCK * 4, LANES * 4):
                found = maximum(found, load(at + i))
            most = largest(found)
        else:
            most = np.float32(-np.inf)
            for i in range(b * BLOCK, size):
                most = max(most, x[i])
        maxima[b] = most
        if most > maxima[top]:
            top = b
    return top


@njit(error_model="numpy")
def _not_below(address, x, first, least):  # type: ignore[no-untyped-def]
    """Returns, as bits, which of as many tokens as a vector has have a logit of `least` or more."""
    if first + LANES <= len(x):
        return which(load(address + first * 4), splat(least))
    found = np.int64(0)
    for n in range(len(x) - first):
        found |= np.int64(x[first + n] >= least) << n
    return found


@njit(inline="never", error_model="numpy")
def _gather(address, x, maxima, least, keys, tokens):  # type: ignore[no-untyped-def]
    """Stores keys and ids of the tokens with logits from `least` on, and returns their number."""
    count, least = 0, np.float32(least)
    for b in range(len(maxima)):
        if maxima[b] >= least:
            for i in range(b * BLOCK, min(len(x), (b + 1) * BLOCK), LANES):
                found = _not_below(address, x, i, least)
                while found:
                    token = i + lowest_bit(found)
                    keys[count], tokens[count] = key_of(x[token]), token
                    count += 1
                    found &= found - 1
    return count


@njit(inline="never", error_model="numpy")
def _floor(keys, weights, count, target, histogram):  # type: ignore[no-untyped-def]
    """Returns the largest key such that the weights from it on sum to the target or more, and what is missing
    to the target above it."""
    floor = before = 0
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        histogram[:] = 0
        for i in range(count):
            if keys[i] >> (shift + _DIGIT_BITS) == floor:
                histogram[(keys[i] >> shift) & (_DIGITS - 1)] += weights[i]
        digit = _DIGITS - 1
        while digit > 0 and before + histogram[digit] < target:
            before += histogram[digit]
            digit -= 1
        floor = (floor << _DIGIT_BITS) | digit
    return floor, target - before


@njit(inline="never", error_model="numpy")
def _lead(keys, weights, tokens, count, target, histogram):  # type: ignore[no-untyped-def]
    """Keeps in place the fewest tokens, by key and then by lower id, whose weights sum to the target or more,
    and returns their number."""
    floor, missing = _floor(keys, weights, count, target, histogram)
    kept = 0
    for i in range(count):
        tied = keys[i] == floor
        keep = (keys[i] > floor) | (tied & (missing > 0))
        missing -= weights[i] if tied else 0
        keys[kept], weights[kept], tokens[kept] = keys[i], weights[i], tokens[i]
        kept += keep
    return kept


@njit(inline="never", error_model="numpy")
def _filter(address, x, maxima, top, inverse, top_k, top_p, lowest, keys, weights, tokens, histogram):  # type: ignore[no-untyped-def]
    """Stores the ids of the tokens that top-k and then top-p and min-p leave, and returns their number."""
    blocks, least = len(maxima), -np.inf
    if top_k <= blocks:  # as many blocks have a token as large as this
        for b in range(blocks):
            keys[b], weights[b], tokens[b] = key_of(maxima[b]), 1, b
        left = _lead(keys, weights, tokens, blocks, top_k, histogram)
        least = top
        for i in range(left):
            least = min(least, maxima[tokens[i]])
    count = _gather(address, x, maxima, least, keys, tokens)
    weights[:count] = 1
    count = _lead(keys, weights, tokens, count, top_k, histogram)
    whole = 0
    for i in range(count):
        weights[i] = mass_of((x[tokens[i]] - top) * inverse)
        whole += weights[i]
    count = _lead(keys, weights, tokens, count, _ceiling(whole, top_p), histogram)
    kept = 0
    for i in range(count):
        if (x[tokens[i]] - top) * inverse >= lowest:
            tokens[kept] = tokens[i]
            kept += 1
    return kept


@njit(error_model="numpy")
def _ceiling(mass, share):  # type: ignore[no-untyped-def]
    return max(1, np.int64(np.ceil(mass * share)))


@njit(inline="never", error_model="numpy")
def _store_bounds(stream, bounds):  # type: ignore[no-untyped-def]
    """Stores the largest noise of each block."""
    for b in range(len(bounds)):
        bounds[b] = -logarithm(variate(number(stream, -2 - b)) * (1 / BLOCK))


@njit(inline="never", error_model="numpy")
def _split(maxima, edge, least, blocks, others):  # type: ignore[no-untyped-def]
    """Keeps in place the blocks that have a logit of `edge` or more, stores those others that have one of
    `least` or more, and returns the numbers of both."""
    kept = count = 0
    for i in range(len(blocks)):
        b = blocks[i]
        found = maxima[b]
        blocks[kept] = others[count] = b  # no branch: which it is nobody can foresee
        kept += found >= edge
        count += (found >= least) & (found < edge)
    return kept, count


@njit(inline="never", error_model="numpy")
def _best_of_all(address, x, maxima, blocks, start, inverse, stream, bounds, lowest, edge, rejected):  # type: ignore[no-untyped-def]
    """Returns the token with the largest score of those in `blocks` that min-p leaves and that come before
    the token `rejected`, whose logit is `edge`; the number of tokens if there is none. start: the block of
    the largest logit, which goes first."""
    best, winner, top, floor = -np.inf, len(x), maxima[start], -np.inf
    if lowest > -np.inf:  # a bit lower than min-p's threshold, which a rounding must not exceed
        floor = top + lowest / inverse - 1e-12 * (abs(top) - lowest / inverse)
    for step in range(-1, len(blocks)):
        b = start if step < 0 else blocks[step]
        most = bounds[b]
        if maxima[b] >= floor and maxima[b] * inverse + most >= best:
            least, place = least_variate(stream, b)
            for first in range(b * BLOCK, min(len(x), (b + 1) * BLOCK), LANES):
                bound = (best - most) / inverse  # and a bit lower, for it is rounded
                bound -= 1e-6 * abs(bound) + 1e-12 * (abs(best) + abs(most)) / inverse
                found = _not_below(address, x, first, np.float32(bound))
                while found:
                    i = first + lowest_bit(found)
                    found &= found - 1
                    scaled = x[i] * inverse
                    if scaled + most >= best and (x[i] > edge or (x[i] == edge and i < rejected)):
                        score = scaled + noise(stream, i, least, place, most)
                        better = score > best or (score == best and i < winner)
                        if better and (x[i] - top) * inverse >= lowest:
                            best, winner = score, i
    return winner


@njit(inline="never", error_model="numpy")
def _count_before(address, x, blocks, token):  # type: ignore[no-untyped-def]
    """Returns how many tokens of these blocks come before this one: those with a larger logit, of equals the
    lower ids."""
    count, edge, own = 0.0, x[token], token // BLOCK
    edges, ones = splat(edge), splat(np.float32(1.0))
    for b in blocks:
        if b == own or (b + 1) * BLOCK > len(x):
            for i in range(b * BLOCK, min(len(x), (b + 1) * BLOCK)):
                count += (x[i] > edge) | ((x[i] == edge) & (i < token))
        else:
            count += total(_parts_before(address + b * BLOCK * 4, ones, ones, ones, ones, edges, b > own))
    return count


@njit(error_model="numpy")
def _parts_before(at, first, second, third, fourth, edges, later):  # type: ignore[no-untyped-def]
    """Returns the sums of the parts of a block's tokens that come before others with the logit `edges`, which
    are in another block, a `later` one or not."""
    a, b, c, d = load(at), load(at + LANES * 4), load(at + LANES * 8), load(at + LANES * 12)
    if later:
        first, second = above(a, edges, first), above(b, edges, second)
        third, fourth = above(c, edges, third), above(d, edges, fourth)
    else:
        first, second = not_below(a, edges, first), not_below(b, edges, second)
        third, fourth = not_below(c, edges, third), not_below(d, edges, fourth)
    return add(add(first, second), add(third, fourth))


@njit(error_model="numpy")
def _power_at(at, tops, scale):  # type: ignore[no-untyped-def]
    return power(multiply(subtract(load(at), tops), scale))


@njit(inline="never", error_model="numpy")
def _masses(x, top, inverse, token):  # type: ignore[no-untyped-def]
    """Returns the mass of the tokens that come before this one, and that of all."""
    before = whole = 0
    edge = x[token]
    for i in range(len(x)):
        mass = mass_of((x[i] - top) * inverse)
        whole += mass
        before += mass if (x[i] > edge) | ((x[i] == edge) & (i < token)) else 0
    return before, whole


@njit(inline="never", error_model="numpy")
def _near_masses(address, ahead, x, blocks, top, inverse, token):  # type: ignore[no-untyped-def]
    """Returns nearly what `_masses` does, of these blocks, in parts of the largest logit's mass. Meanwhile
    the memory has time to bring the same blocks of another row, which lies at `ahead`, nearer."""
    before = whole = 0.0
    edge, own, scale = x[token], token // BLOCK, splat(np.float32(inverse * PER_LOG_2))
    edges, tops, nothing = splat(edge), splat(np.float32(top)), splat(np.float32(0.0))
    for start in range(0, len(blocks), _TURN):
        all_parts = parts_before = nothing
        for n in range(start, min(len(blocks), start + _TURN)):
            b = blocks[n]
            if b == own or (b + 1) * BLOCK > len(x):
                for i in range(b * BLOCK, min(len(x), (b + 1) * BLOCK)):
                    mass = mass_of((x[i] - top) * inverse) * 2.0**-MASS_BITS
                    whole += mass
                    before += mass if (x[i] > edge) | ((x[i] == edge) & (i < token)) else 0.0
                continue
            at, next_at = address + b * BLOCK * 4, ahead + b * BLOCK * 4
            for i in range(0, BLOCK * 4, LINE):
                prefetch(next_at + i)
            first, second = _power_at(at, tops, scale), _power_at(at + LANES * 4, tops, scale)
            third, fourth = _power_at(at + LANES * 8, tops, scale), _power_at(at + LANES * 12, tops, scale)
            all_parts = add(all_parts, add(add(first, second), add(third, fourth)))
            found = _parts_before(at, first, second, third, fourth, edges, b > own)
            parts_before = add(parts_before, found)
        whole += total(all_parts)
        before += total(parts_before)
    return before, whole


@njit(inline="never", error_model="numpy")
def _first_kept(  # type: ignore[no-untyped-def]
    address, ahead, x, maxima, start, inverse, top_k, top_p, lowest, stream, bounds, blocks, others
):
    """Returns the token with the largest score of those that the filters leave: min-p, and top-k or top-p."""
    edge, winner, top, whole = np.float32(-np.inf), len(x), maxima[start], 0.0
    rounding = len(x) * 2.0 ** (1 - MASS_BITS)
    _store_bounds(stream, bounds)
    blocks[:] = np.arange(len(blocks))
    while True:
        winner = _best_of_all(
            address, x, maxima, blocks, start, inverse, stream, bounds, lowest, edge, winner
        )
        if winner == len(x):
            return 0  # no token is possible
        if top_p >= 1.0 and not 0 < top_k < len(x):
            return winner
        edge = x[winner]
        kept, count = _split(maxima, edge, top + NO_MASS / inverse, blocks, others)
        blocks = blocks[:kept]
        if top_p >= 1.0:
            if _count_before(address, x, blocks, winner) < top_k:
                return winner
            continue
        before, mass = _near_masses(address, ahead, x, blocks, top, inverse, winner)
        if whole == 0.0:
            whole = mass
            if before + whole * _NEAR + rounding >= whole * top_p:  # so the other blocks' masses matter
                whole += _near_masses(address, ahead, x, others[:count], top, inverse, winner)[1]
        slack = whole * _NEAR + rounding
        if before == 0.0 or before + slack < whole * top_p:
            return winner
        if before - slack <= whole * top_p:
            exactly, mass_of_all = _masses(x, top, inverse, winner)
            if exactly < _ceiling(mass_of_all, top_p):
                return winner


@njit(inline="never", error_model="numpy")
def _best_of(x, tokens, count, inverse, stream):  # type: ignore[no-untyped-def]
    """Returns the token with the largest score of those in `tokens`, whose ids ascend."""
    best, winner, block = -np.inf, 0, -1
    least, place, most = 0.0, 0, 0.0
    for n in range(count):
        i = tokens[n]
        if i // BLOCK != block:
            block = i // BLOCK
            least, place = least_variate(stream, block)
            most = -logarithm(least)
        scaled = x[i] * inverse
        if scaled + most > best:
            score = scaled + noise(stream, i, least, place, most)
            if score > best:
                best, winner = score, i
    return winner


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "team", "threads", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "blocks")),
        *((name, ctypes.c_int64) for name in ("logits", "inverse", "top_k", "top_p", "lowest", "streams")),
        *(
            (name, ctypes.c_int64)
            for name in ("ids", "maxima", "bounds", "blocks_left", "histograms", "scratch")
        ),
    ]


@kernel(_Arguments)
def _draw(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    size, blocks, rows, threads = a.size, a.blocks, a.rows, a.threads
    inverse = carray(pointer_at(a.inverse), (rows,), np.float64)
    top_k = carray(pointer_at(a.top_k), (rows,), np.int64)
    top_p = carray(pointer_at(a.top_p), (rows,), np.float64)
    lowest = carray(pointer_at(a.lowest), (rows,), np.float64)
    streams = carray(pointer_at(a.streams), (rows,), np.int64)
    ids = carray(pointer_at(a.ids), (rows,), np.int64)
    me = fetch_add(address_of(pointer) + 8, 1)
    maxima = carray(pointer_at(a.maxima + me * blocks * 8), (blocks,), np.float64)
    bounds = carray(pointer_at(a.bounds + me * blocks * 8), (blocks,), np.float64)
    left = carray(pointer_at(a.blocks_left + me * 2 * blocks * 8), (2, blocks), np.int64)
    histogram = carray(pointer_at(a.histograms + me * _DIGITS * 8), (_DIGITS,), np.int64)
    scratch = carray(pointer_at(a.scratch + me * _SCRATCH * size * 8), (_SCRATCH, size), np.int64)
    keys, weights, tokens = scratch[0], scratch[1], scratch[2]
    r = fetch_add(address_of(pointer), 1)
    while r < rows:
        at = a.logits + r * a.row_bytes
        x = carray(pointer_at(at), (size,), np.float32)
        start = _block_maxima(at, size, maxima)
        if 0 < top_k[r] < size and top_p[r] < 1.0:
            count = _filter(
                at, x, maxima, maxima[start], inverse[r], top_k[r], top_p[r], lowest[r],
                keys, weights, tokens, histogram,
            )  # fmt: skip
            ids[r] = _best_of(x, tokens, count, inverse[r], streams[r])
        else:
            ids[r] = _first_kept(
                at, at + threads * a.row_bytes, x, maxima, start, inverse[r], top_k[r], top_p[r], lowest[r],
                streams[r], bounds,
                left[0], left[1],
            )  # fmt: skip
        r = fetch_add(address_of(pointer), 1)


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, stream: Tensor
) -> Tensor:
    """Draws ids [R] from logits [R, V] float32, as `draw_reference.draw` says. Rows may lie anywhere."""
    rows, size = logits.shape
    check("logits", logits, rows, size, dtypes=(torch.float32,))
    inverse, lowest = scales(temperature, min_p)
    top_k, stream, top_p = top_k.contiguous(), stream.contiguous(), top_p.double().contiguous()
    for name, one, kind in (("top_k", top_k, torch.int64), ("stream", stream, torch.int64)):
        check(name, one, rows, dtypes=(kind,))
    for name, one in (("temperature", inverse), ("top_p", top_p), ("min_p", lowest)):
        check(name, one, rows)
    threads = 1 if rows * size < _SERIAL else min(rows, torch.get_num_threads())
    blocks = -(-size // BLOCK)
    ids = torch.zeros(rows, dtype=torch.int64)
    maxima, bounds = torch.empty(2, threads, blocks, dtype=torch.float64)
    left = torch.empty(threads, 2, blocks, dtype=torch.int64)
    histograms = torch.empty(threads, _DIGITS, dtype=torch.int64)
    scratch = torch.empty(threads, _SCRATCH, size, dtype=torch.int64)
    arguments = _Arguments(
        0, 0, threads, rows, size, logits.stride(0) * 4, blocks,
        logits.data_ptr(), inverse.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), lowest.data_ptr(),
        stream.data_ptr(), ids.data_ptr(), maxima.data_ptr(), bounds.data_ptr(), left.data_ptr(),
        histograms.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    if rows:
        _draw(arguments, threads)
    return ids


def prepare() -> None:
    """Compiles the kernel, or reads it from numba's cache, so that no request waits for it."""
    one, none = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    draw(torch.zeros(1, 1), one, none, one, one, none)

"""Plain torch twins of kernels that GPUs alone have: norms of sums, the parts of decode attention, products
over quantised weights, and the tables of FlashAttention. They define what the kernels compute, in any dtype,
at any speed."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kvloom.kernels.reference import rms_norm

FP8_CAPABILITY: Final = 8, 9
"""The oldest compute capability that multiplies FP8."""


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Adds residual [n, H] to x [n, H] in place, and returns the sum as `rms_norm` normalises it."""
    x += residual
    return rms_norm(x, weight, eps, offset)


def quantized_product(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Returns x [n, K] · weight [N, K]ᵀ + bias [N] in the number format of x.

    The weight's element at (n, k) is scales[n, g] · code + offsets[n, g], with g = k // (K / G), computed in
    float32 and rounded to the format of x; so `QuantizedWeight.dequantized` says. scales and offsets are
    float16 or float32 [N, G]. codes of 8 bits are int8 [N, K]; those of 4 bits are from 0 to 15, two
    neighbours a byte, the first in the low half, uint8 [N, K / 2]. Codes may be float8_e4m3fn [N, K], too.
    """
    numbers = codes
    if codes.dtype == torch.uint8:
        numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    groups = numbers.float().view(*scales.shape, -1) * scales.float()[..., None]
    if offsets is not None:
        groups = groups + offsets.float()[..., None]
    out = x.float() @ groups.flatten(1).to(x.dtype).float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


FP8_MAX: Final = 448.0
"""The largest number of float8_e4m3fn."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [n, K] as float8_e4m3fn [n, K] and scales, float32 [n, 1]: a row's largest magnitude becomes
    the largest number that the format has. A row with a number that is not finite has some that are none."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, FP8_MAX / most, 0.0)
    return (wide * inverse).to(torch.float8_e4m3fn), most / FP8_MAX


def scaled_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [n, K] · weight [N, K]ᵀ + bias [N] in the number format of x, with x rounded by `round_rows`
    first (W8A8). The weight's element at (n, k) is scales[n, 0] · codes[n, k]; codes are float8_e4m3fn, and
    scales float32 [N, 1]."""
    rounded, factors = round_rows(x)
    out = rounded.float() @ codes.float().T * factors * scales.T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def list_parts(work: Tensor, begins: Tensor, lengths: Tensor, window: int, least: int) -> None:
    """Lists the parts in which decode attention reads sequences of lengths [B], of the last `window` tokens
    if that is not 0: work [P, 3] gets each part's sequence, first token and end, zeros where there are fewer,
    and begins [B + 1] each sequence's first part and the number of parts, P at most.

    Parts have the same number of tokens, but the last of each sequence, so long sequences have more of them
    than short ones: the least multiple of `least` that leaves no more than P."""
    held = lengths.clamp(max=window) if window else lengths
    span = least
    while int((-(-held // span)).sum()) > len(work):
        span += least
    begins[0] = 0
    begins[1:] = (-(-held // span)).cumsum(0)
    listed = [
        (sequence, first, min(first + span, length))
        for sequence, (length, count) in enumerate(zip(lengths.tolist(), held.tolist(), strict=True))
        for first in range(length - count, length, span)
    ]
    work.zero_()
    if listed:
        work[: len(listed)] = torch.tensor(listed, dtype=work.dtype, device=work.device)


def block_tables(out: Tensor, page_map: Tensor, tables: Tensor, lengths: Tensor, page_tokens: int) -> None:
    """Writes for each sequence the blocks of the pages that it has: out [layers, B, kv_heads, P], from
    page_map [pages, layers, kv_heads], tables [B, P] and lengths [B]. Other entries are left as they are."""
    for b, length in enumerate(lengths.tolist()):
        held = -(-length // page_tokens)
        out[:, b, :, :held] = page_map[tables[b, :held].long()].permute(1, 2, 0)

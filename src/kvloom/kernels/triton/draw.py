"""Draw tokens on the device: the numbers by a kernel, the rest by torch's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.draw import draw
from kvloom.kernels.triton.launch import CHANGING, Launch, check

_ROWS = 128
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=CHANGING)
def _uniform(out, keys, indices, rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys + row, mask=row < rows, other=0).to(tl.uint64, bitcast=True)
    index = tl.load(indices + row, mask=row < rows, other=0).to(tl.uint64, bitcast=True)
    bits = _mix(_mix(key) + (index + 1) * _GOLDEN) >> 11
    # bits stay below 2^53, so that a signed conversion is exact
    tl.store(out + row, bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=row < rows)


def uniform_launch(out: Tensor, keys: Tensor, indices: Tensor) -> Launch:
    """How `uniform` is launched."""
    rows = keys.shape[0]
    check("keys", keys, rows, dtypes=(torch.int64,))
    check("indices", indices, rows, dtypes=(torch.int64,))
    arguments = {"out": out, "keys": keys, "indices": indices, "rows": rows, "ROWS": _ROWS}
    return Launch(_uniform, (triton.cdiv(rows, _ROWS),), arguments)


def uniform(keys: Tensor, indices: Tensor) -> Tensor:
    """keys [R], the bits of unsigned 64-bit numbers, and indices [R], both int64 → float64 [R] in [0, 1):
    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over the key's own stream, as `model/sampler.py`."""
    out = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    uniform_launch(out, keys, indices).run()
    return out


def sample(
    logits: Tensor,
    keys: Tensor,
    indices: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """logits [R, V] → ids [R] int64 on the device, without waiting for it. The others are [R]: keys and
    indices as `uniform` takes them, temperature (0: the likeliest token), top_k (0: all), top_p and min_p
    as `kernels.draw.draw` does. Where all rows are greedy, logits.argmax(-1) is the same for less."""
    wide = logits.float()
    drawn = draw(wide, temperature, top_k, top_p, min_p, uniform(keys, indices))
    return torch.where(temperature > 0, drawn, wide.argmax(-1))

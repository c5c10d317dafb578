"""The rotary position embedding of q and k in one launch (Su et al., 2021; the halves of a head pair up)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.triton.launch import Launch, check, power_of_two


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, x_head, cos_low, cos_high, sin_low, sin_high, HEADS: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token in place."""
    head, at = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    valid = (head < HEADS)[:, None] & (at < HALF)[None, :]
    low_at = x + (head * x_head)[:, None] + at[None, :]
    low = tl.load(low_at, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=valid, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(low_at, (low * cos_low - high * sin_low).to(kind), mask=valid)
    tl.store(low_at + HALF, (high * cos_high + low * sin_high).to(kind), mask=valid)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    q_row,
    q_head,
    k_row,
    k_head,
    cos_row,
    sin_row,
    Q_HEADS: tl.constexpr,
    Q_PADDED: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """A program is a token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_PADDED)
    valid = at < HALF
    cos_low = tl.load(cos + row * cos_row + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + row * cos_row + HALF + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + row * sin_row + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + row * sin_row + HALF + at, mask=valid, other=0.0).to(tl.float32)[None, :]
    _turn(q + row * q_row, q_head, cos_low, cos_high, sin_low, sin_high, Q_HEADS, Q_PADDED, HALF, HALF_PADDED)
    _turn(k + row * k_row, k_head, cos_low, cos_high, sin_low, sin_high, K_HEADS, K_PADDED, HALF, HALF_PADDED)


def rotate_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Launch:
    """How `rotate` is launched."""
    (rows, q_heads, head_dim), (_, k_heads, _), size = q.shape, k.shape, cos.shape[-1]
    check("q", q, rows, q_heads, head_dim)
    check("k", k, rows, k_heads, head_dim)
    check("cos", cos, rows, size)
    check("sin", sin, rows, size)
    if size % 2 or size > head_dim:
        raise ValueError(f"cos, sin: want an even size up to {head_dim}, got {size}")
    arguments = {
        **{"q": q, "k": k, "cos": cos, "sin": sin, "cos_row": cos.stride(0), "sin_row": sin.stride(0)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "k_row": k.stride(0), "k_head": k.stride(1)},
        **{"Q_HEADS": q_heads, "Q_PADDED": power_of_two(q_heads)},
        **{"K_HEADS": k_heads, "K_PADDED": power_of_two(k_heads)},
        **{"HALF": size // 2, "HALF_PADDED": power_of_two(size // 2)},
    }
    return Launch(_rotate, (rows,), arguments)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R dimensions of q [n, heads, D] and k [n, kv_heads, D] in place by cos, sin [n, R];
    i pairs with R/2 + i. Both may be parts of wider rows."""
    rotate_launch(q, k, cos, sin).run()

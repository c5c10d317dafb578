"""The gated activation between a gated MLP's two products (Shazeer, 2020)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.reference import Activation
from kvloom.kernels.triton.launch import Launch, check

_GATED_VALUES = 1024  # a program
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi) / math.log(2))  # 2u in units of log 2


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    out, x, x_row, SIZE: tl.constexpr, KIND: tl.constexpr, VALUES: tl.constexpr
):
    """A program is a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    valid = at < SIZE
    gate = tl.load(x + row * x_row + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + SIZE + at, mask=valid, other=0.0).to(tl.float32)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * _SQRT_HALF))
    else:  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        doubled = _SLOPE * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp2(-doubled))
    tl.store(out + row * SIZE + at, (gate * up).to(out.dtype.element_ty), mask=valid)


def gated_launch(out: Tensor, x: Tensor, activation: Activation) -> Launch:
    """How `gated` is launched."""
    rows, both = x.shape
    check("x", x, rows, -1)
    if both % 2:
        raise ValueError(f"x: want an even number of columns, gates first, got {both}")
    arguments = {
        **{"out": out, "x": x, "x_row": x.stride(0), "SIZE": both // 2},
        **{"KIND": activation, "VALUES": _GATED_VALUES},
    }
    return Launch(_gated, (rows, triton.cdiv(both // 2, _GATED_VALUES)), arguments)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """x [n, 2 F], gates first → activation(gates) · the rest, [n, F]. gelu is Hendrycks and Gimpel's (2016)
    by erf, gelu_tanh their approximation."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    gated_launch(out, x, activation).run()
    return out

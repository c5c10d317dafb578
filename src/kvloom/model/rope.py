"""Rotary embedding in one pass over q and one over k, put into a model's attention where it does the same."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvloom.kernels.cpu import rotate

_NAME = "apply_rotary_pos_emb"
Turn = Callable[..., tuple[Tensor, Tensor]]


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """q, k [1, H, N, D] and cos, sin [1, N, R] → q and k, rotated in place; nothing else reads them."""
    for x in (q, k):
        rotate(x[0].transpose(0, 1), cos[0], sin[0])
    return q, k


def fuse_rotary(module: nn.Module, turn: Turn = rotate_both, device: torch.device | None = None) -> None:
    """Give this attention module's forward our rotary function for the one its source names, if the two
    agree on `device`. The module's class and its file's globals stay as they are: other models share them."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return
    stock = forward.__globals__.get(_NAME)
    if stock is None or not _agrees(stock, turn, device):
        return
    ours = FunctionType(
        forward.__code__,
        forward.__globals__ | {_NAME: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(ours, module)


def _agrees(stock: Callable[..., Any], turn: Turn, device: torch.device | None) -> bool:
    """Compare on random q [1, 3, 5, 16], k [1, 1, 5, 16] with the tables that rotate-half models have."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator).to(device) for heads in (3, 1))
    angles = torch.randn(1, 5, 8, generator=generator).repeat(1, 1, 2).to(device)
    try:
        expected = stock(q, k, angles.cos(), angles.sin())
    except (TypeError, RuntimeError, ValueError):
        return False  # it has another form, and is served as it is
    found = turn(q.clone(), k.clone(), angles.cos(), angles.sin())
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, found, strict=True))

"""Linear layers over the same input as one product."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class _Last(threading.local):
    """This thread's last product, until each sister has taken her part."""

    x: Tensor | None = None
    parts: Sequence[Tensor] = ()
    left: int = 0


class Sisters:
    """Several linear layers over the same input as one product, whose columns are split by `sizes`. Each
    keeps its place in the model as a `Sister`; the first to be called computes for all. Jobs on other
    threads do not see this one's product."""

    def __init__(self, product: nn.Module, sizes: Sequence[int]) -> None:
        self.product = product
        self._sizes = list(sizes)
        self._last = _Last()

    def part(self, x: Tensor, index: int) -> Tensor:
        last = self._last
        if last.x is not x:
            last.x, last.left = x, len(self._sizes)
            last.parts = self.product(x).split(self._sizes, -1)
        part = last.parts[index]
        last.left -= 1
        if not last.left:
            last.x, last.parts = None, ()
        return part


class Sister(nn.Module):
    def __init__(self, sisters: Sisters, index: int) -> None:
        super().__init__()
        self._sisters = sisters
        self._index = index

    @property
    def product(self) -> nn.Module:
        """Hers, and her sisters'."""
        return self._sisters.product

    def forward(self, x: Tensor) -> Tensor:
        return self._sisters.part(x, self._index)


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One product whose columns are theirs, side by side. All have a bias, or none."""
    first, width = linears[0], sum(linear.out_features for linear in linears)
    together = nn.Linear(first.in_features, width, bias=first.bias is not None, device="meta")
    together.weight = _frozen([linear.weight for linear in linears])
    if first.bias is not None:
        together.bias = _frozen([linear.bias for linear in linears])
    return together


def _frozen(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), requires_grad=False)

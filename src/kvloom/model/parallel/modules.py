"""Modules whose weights are one rank's slice."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kvloom.model.parallel.group import Group


class Summed(nn.Module):
    """The sum of what each rank's `inner` gives. A bias is in one rank's `inner` alone."""

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner: Any = inner
        self.group = group

    @property
    def in_features(self) -> int:
        """Of this rank's slice."""
        return int(self.inner.in_features)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return self.group.sum(self.inner(*given, **named))

    def onto(self, x: Tensor, base: Tensor) -> Tensor:
        """base + what forward gives; the first rank adds it as it stores its part."""
        part = self.inner(x) if self.group.rank else self.inner.onto(x, base)
        return self.group.sum(part)


class Split(nn.Module):
    """`inner` over this rank's columns of an input that all ranks have whole."""

    def __init__(self, inner: nn.Module, columns: slice) -> None:
        super().__init__()
        self.inner = inner
        self._columns = columns

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x[..., self._columns])
        return out


class Gathered(nn.Module):
    """What each rank's `inner` gives side by side: `width` columns in all, of which the last rank may have
    fewer than the others."""

    def __init__(self, inner: nn.Module, group: Group, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.width = width
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.inner(x)
        missing = -(-self.width // self._group.size) - part.shape[-1]
        return self._group.gather(F.pad(part, (0, missing)) if missing else part)[..., : self.width]

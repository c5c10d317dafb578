"""Where a model is to run, as the loader asks: which number format it has there, and what makes it fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from kvloom.core.geometry import Geometry
from kvloom.model.attention import Scoring
from kvloom.model.forward import Forward
from kvloom.model.fuse import fuse
from kvloom.model.straighten import straighten


class Target(Protocol):
    def dtype(self, config: Any) -> torch.dtype:
        """The number format that `auto` means for a checkpoint with this config."""

    def place(self, module: nn.Module) -> None:
        """Bring the weights, which lie in mapped files, to where they are used. Raises ConfigError where they
        do not fit."""

    def fuse(self, module: nn.Module) -> None:
        """In place; keeps what agrees with the stock modules."""

    def settle(self, module: nn.Module) -> None:
        """The module is as it will be: let go of what it does not need."""

    def straighten(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        """A faster forward than the module's own, where there is one."""


class CpuTarget:
    """float32, in oneDNN's layouts."""

    def dtype(self, config: Any) -> torch.dtype:
        return torch.float32

    def place(self, module: nn.Module) -> None:
        """They are read where they are."""

    def fuse(self, module: nn.Module) -> None:
        fuse(module)

    def settle(self, module: nn.Module) -> None:
        for left in module.parameters():  # out of the mapped files, which would else stay in memory with them
            left.data = left.data.clone()

    def straighten(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        return straighten(module, scorings, geometry)


CPU = CpuTarget()

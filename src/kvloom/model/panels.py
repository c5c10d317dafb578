"""What oneDNN keeps a packed weight in, read where it lies: panels of 64 columns (see kernels/panels.py)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from kvloom.kernels.panels import PANEL
from kvloom.model.linear import PackedLinear


class Panels:
    """A packed weight's panels, and its bias with room for whole panels. Holds what its addresses need."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.width, self.depth = packed.shape
        self.count = -(-self.width // PANEL)
        self.stride = torch.ops.mkldnn._nbytes(packed) // self.count
        self.address: int = torch.ops.mkldnn.data_ptr(packed)
        self.bias = torch.zeros(self.count * PANEL)
        if bias is not None:
            self.bias[: self.width] = bias
        self._packed = packed

    @property
    def fields(self) -> tuple[int, int, int, int, int]:
        """LinearArguments."""
        return self.address, self.count, self.stride, self.depth, self.bias.data_ptr()


def panels_of(linear: PackedLinear) -> Panels | None:
    """None where this machine's oneDNN keeps the weight in another layout: every value is looked at."""
    size = torch.ops.mkldnn._nbytes(linear.packed)
    panels = Panels(linear.packed, linear.bias)
    wide = panels.count * PANEL
    if size % (wide * 4) or size < wide * panels.depth * 4:
        return None
    memory = (ctypes.c_float * (size // 4)).from_address(panels.address)
    held = torch.from_numpy(np.frombuffer(memory, np.float32)).view(panels.count, -1, PANEL)
    rows = held[:, : panels.depth].transpose(1, 2).flatten(0, 1)[: panels.width]
    return panels if rows.equal(linear.packed.to_dense()) else None

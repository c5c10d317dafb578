"""How decoders name their parts, and a walk through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn

QKV: Final = ("q_proj", "k_proj", "v_proj")
GATED: Final = ("gate_proj", "up_proj", "down_proj")


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent, and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child

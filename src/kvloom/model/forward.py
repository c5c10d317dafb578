"""What the executor calls: from tokens to logits."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvloom.core.arrays import I64
from kvloom.model.attention import ForwardState
from kvloom.model.linear import FEWEST_ROWS


class Forward(Protocol):
    """One forward of a model over the pages of `state`, whose plan says the positions."""

    def __call__(self, tokens: I64, kept: I64, state: ForwardState) -> Tensor:
        """tokens [N]; kept [R] rows → logits [R or more, V]: those of the kept rows come first."""


class Modular:
    """transformers' own modules, with what `fuse` has put into them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, tokens: I64, kept: I64, state: ForwardState) -> Tensor:
        logits: Tensor = self._module(
            input_ids=padded(tokens)[None],
            position_ids=padded(state.positions)[None],
            use_cache=False,
            logits_to_keep=padded(kept),
            kv=state,
        ).logits[0]
        return logits


def padded(values: I64) -> Tensor:
    """`values`, the last one repeated up to the fewest rows that linear layers run well with. A repeated row
    asks no other expert of a mixture than its original."""
    short = FEWEST_ROWS - values.size
    return torch.from_numpy(np.pad(values, (0, short), "edge") if 0 < short < FEWEST_ROWS else values)

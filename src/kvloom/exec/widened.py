"""Models whose weights have 16 bits and whose arithmetic is float32's: the plain form, in which each product
widens its weight, and which others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvloom.exec.experts import Experts
from kvloom.exec.huggingface import children

HALVES: Final = (torch.bfloat16, torch.float16)
NUMBERS_AT_ONCE: Final = 1 << 22
"""Numbers of a weight that are widened at a time, so that a head takes no more memory than a layer."""


class WidenedLinear(nn.Linear):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N] in float32; the weight has 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        rows = max(1, NUMBERS_AT_ONCE // self.in_features)
        parts = [functional.linear(x, part.float()) for part in torch.split(self.weight, rows)]
        out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return out if self.bias is None else out + self.bias


class WidenedEmbedding(nn.Embedding):
    """Returns rows of a weight of 16 bits in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


def can_widen(module: nn.Module) -> bool:
    """Returns whether all matrices are of stock linear layers and embeddings, which alone are known to do
    nothing else with their weights, or of routers beside experts with layers of their own. Routers are small.
    module: a model with weights of 16 bits, on any device. Tables of 16 bits forbid it: in float32 they would
    have other values."""
    if any(table.dtype in HALVES for table in module.buffers()):
        return False
    routers = _routers(module)
    return all(
        weight.dim() < 2 or (name == "weight" and (type(one) in (nn.Linear, nn.Embedding) or one in routers))
        for one in module.modules()
        for name, weight in one.named_parameters(recurse=False)
    )


def _routers(module: nn.Module) -> set[nn.Module]:
    """Returns the modules beside experts whose matrix has a row for each of them."""
    found = set[nn.Module]()
    for one in module.modules():
        counts = {len(part) for part in one.children() if isinstance(part, Experts)}
        for beside in one.children() if counts else ():
            weight = getattr(beside, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) in counts:
                found.add(beside)
    return found


def widen(module: nn.Module) -> None:
    """Makes a model that `can_widen` compute in float32, in place. Matrices stay where they are, except those
    of routers. These, and all other parameters, which are small, become float32. A weight that two layers
    share stays shared."""
    for parent, name, child in children(module):
        if type(child) is nn.Linear:
            bias = child.bias is not None
            linear = WidenedLinear(child.in_features, child.out_features, bias, device="meta")
            linear.weight, linear.bias = child.weight, child.bias
            setattr(parent, name, linear)
        elif type(child) is nn.Embedding:
            embedding = WidenedEmbedding(child.num_embeddings, child.embedding_dim, device="meta")
            embedding.weight = child.weight
            setattr(parent, name, embedding)
    for weight in _computing(module):
        weight.data = weight.data.float()


def computes_in_float32(module: nn.Module) -> bool:
    """Returns whether all its parameters are float32, or matrices that are widened."""
    return all(weight.dtype == torch.float32 for weight in _computing(module))


def _computing(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters but those that are widened whenever they are read."""
    for one in module.modules():
        for name, weight in one.named_parameters(recurse=False):
            if name != "weight" or not isinstance(one, WidenedLinear | WidenedEmbedding):
                yield weight

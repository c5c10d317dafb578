"""Experts of a mixture as linear layers of their own, so that each may hold few bits.

transformers holds all experts of a layer in two tensors, `gate_up_proj` and `down_proj`. If weights are
quantised, or have 16 bits that are widened, another module takes the place of the one with these tensors. It
is called in the same way, and has the linear layers `0.gate_proj`, `0.up_proj`, `0.down_proj`, `1.gate_proj`,
… . They are treated as all linear layers are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.exec.huggingface import GATED

_LAYER: Final = re.compile(rf"(.*)\.\d+\.(?:{'|'.join(GATED)})")
_STACKED: Final = ("gate_up_proj", "down_proj")
_SIZES: Final = 3, 2, 16, 8
"""The sizes of the small experts that are compared: experts, experts of a token, inputs and inner numbers."""


class Expert(nn.Module):
    """Computes down(activation(gate(x)) ∘ up(x))."""

    def __init__(self, activation: Callable[[Tensor], Tensor], gate: Any, up: Any, down: Any) -> None:
        super().__init__()
        self.act_fn = activation
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner)
        return out


class Experts(nn.ModuleList):
    """Computes for each row the sum of its experts' outputs, each times its weight. Only experts that some
    row asks are read."""

    @property
    def stacked(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors in which transformers holds them all, by name."""
        first: Any = self[0]
        inner, hidden = first.gate_proj.out_features, first.gate_proj.in_features
        return dict(zip(_STACKED, ((len(self), 2 * inner, hidden), (len(self), hidden, inner)), strict=True))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Takes x [N, K], and of each row the experts and their weights [N, E], and returns [N, K]. What a
        row's experts give is added in the order in which it names them, whatever rows are beside it."""
        each = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self)).tolist()
        found, first = x.new_empty(len(order), x.shape[1]), 0
        for expert, count in zip(self, counts, strict=True):
            if count:
                places = order[first : first + count]
                found[places] = expert(x[places // each])
                first += count
        parts = (found.view(len(x), each, -1) * weights[..., None]).unbind(1)
        out = parts[0].clone()
        for part in parts[1:]:
            out += part
        return out.to(x.dtype)


def split_experts(model: nn.Module, names: Iterable[str]) -> None:
    """Replaces the experts to which linear layers of these names would belong, as
    `model.layers.0.mlp.experts.3.up_proj`, in place. Weights have no memory then. Names of other layers, and
    of experts of another form, are left."""
    for name in dict.fromkeys(match[1] for name in names if (match := _LAYER.fullmatch(name))):
        try:
            stock = model.get_submodule(name)
        except AttributeError:
            continue
        if not isinstance(stock, Experts) and _is_served(stock):
            model.set_submodule(name, _split(stock))


def split_all_experts(model: nn.Module) -> None:
    """Replaces all experts of a model in place, but those of another form. The new weights are views of parts
    of the old tensors."""
    for name, stock in list(model.named_modules()):
        if hasattr(stock, _STACKED[0]) and _is_served(stock):
            ours = _split(stock)
            _share(ours, stock.gate_up_proj, stock.down_proj)
            model.set_submodule(name, ours)


def _share(ours: Experts, gate_up: Tensor, down: Tensor) -> None:
    """Gives each expert its parts of the tensors in which transformers holds all experts."""
    for expert, both, last in zip(ours, gate_up.detach(), down.detach(), strict=True):
        held: Any = expert
        for name, weight in zip(GATED, (*both.chunk(2), last), strict=True):
            getattr(held, name).weight = nn.Parameter(weight, requires_grad=False)


def _split(stock: Any) -> Experts:
    count, hidden, inner = stock.down_proj.shape
    dtype = stock.down_proj.dtype

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)

    return Experts(
        Expert(stock.act_fn, linear(hidden, inner), linear(hidden, inner), linear(inner, hidden))
        for _ in range(count)
    )


def _is_served(stock: Any) -> bool:
    """Returns whether `Experts` compute the same as these experts. It is tried with small random weights."""
    held = dict(stock.named_parameters())
    if held.keys() != set(_STACKED) or not callable(getattr(stock, "act_fn", None)):
        return False
    if any(one.dim() != 3 for one in held.values()):
        return False
    count, hidden, inner = held["down_proj"].shape
    if tuple(held["gate_up_proj"].shape) != (count, 2 * inner, hidden):
        return False
    small, ours, asked = _small(stock)
    with torch.inference_mode():
        try:
            expected = small(*asked)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # it wants to be called otherwise
        return torch.allclose(ours(*asked), expected, rtol=1e-4, atol=1e-5)


def _small(stock: Any) -> tuple[Any, Experts, tuple[Tensor, Tensor, Tensor]]:
    """Returns a copy of the experts with small random weights, our experts with the same weights, and inputs
    for both."""
    count, each, hidden, inner = _SIZES
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=random), requires_grad=False)

    tensors = numbers(count, 2 * inner, hidden), numbers(count, hidden, inner)
    small = copy.copy(stock)
    small.__dict__["_parameters"] = dict(zip(_STACKED, tensors, strict=True))
    small.num_experts = count
    ours = _split(small)
    _share(ours, *tensors)
    chosen = torch.stack([torch.randperm(count, generator=random)[:each] for _ in range(5)])
    return small, ours, (numbers(5, hidden), chosen, numbers(5, each))

"""Cuts a loaded model down to one rank's slice, as the plan says that transformers has for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvloom.exec.parallel.group import RankGroup
from kvloom.types.errors import ConfigError


class Summed(nn.Module):
    """The sum of what each rank's `inner` gives. A bias is in one rank's `inner` alone."""

    def __init__(self, inner: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.inner: Any = inner
        self.group = group

    @property
    def in_features(self) -> int:
        """The input features of this rank's slice."""
        return int(self.inner.in_features)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return self.group.sum(self.inner(*given, **named))

    def onto(self, x: Tensor, base: Tensor, *more: Any) -> Tensor:
        """Returns base + what forward gives; the first rank adds it as it stores its part."""
        part = self.inner(x, *more) if self.group.rank else self.inner.onto(x, base, *more)
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
    """A product whose columns the ranks' `inner` give side by side: `width` in all; the last rank may have
    fewer than the others."""

    def __init__(self, inner: nn.Module, group: RankGroup, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.width = width
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.inner(x)
        missing = -(-self.width // self._group.size) - part.shape[-1]
        return self._group.gather(F.pad(part, (0, missing)) if missing else part)[..., : self.width]


_WHOLE: Final = {"replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise"}


@torch.inference_mode(False)  # whose tensors some experts' products refuse as weights
def slice_model(model: Any, group: RankGroup) -> None:
    """Slices in place; slices go to the group's device one by one, and what stays whole stays on its device.
    Every rank has the embedding whole. Raises ConfigError if the model has no plan, the plan asks for
    something that is not known here, or a weight cannot be shared out evenly."""
    plan: dict[str, str] = model.tp_plan or {}
    if not plan:
        raise ConfigError("transformers has no tensor-parallel plan for it; `tensor_parallel: 1` is right")
    for name, weight in list(model.named_parameters()):
        style = plan.get(_generic(name))
        if style is not None:
            _replace(model, name, _parameter(name, style, weight, group))
    for name, child in list(model.named_modules()):
        style = plan.get(_generic(name))
        if style is not None and style not in _WHOLE:
            _replace(model, name, _module(name, style, child, group))
    for name, child in model.named_modules():
        # else a rank could still read K and V for a job that the others have ended
        if type(child).__name__.endswith("Attention") and not _sums(child):
            raise ConfigError(f"its tensor-parallel plan leaves {name} whole; `tensor_parallel: 1` is right")


def _generic(name: str) -> str:
    """Returns the name as plans write it: numbers of layers are stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: nn.Module, name: str, new: nn.Module | nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def _sums(module: nn.Module) -> bool:
    return any(isinstance(child, Summed) for child in module.modules())


def _module(name: str, style: str, stock: nn.Module, group: RankGroup) -> nn.Module:
    if style == "moe_tp_experts":  # its parameters have rules of their own
        return Summed(stock, group)
    make = _LINEAR.get(style)
    if make is None or not isinstance(stock, nn.Linear):
        raise ConfigError(
            f"its tensor-parallel plan has {style} for {name}, a {type(stock).__name__}, which kvloom cannot "
            "slice; `tensor_parallel: 1` is right"
        )
    return make(name, stock, group)


def _columns(name: str, stock: nn.Linear, group: RankGroup) -> nn.Module:
    _divides(name, stock.out_features, group)
    return _cut_outputs(stock, group.span(stock.out_features), group)


def _gathered(name: str, stock: nn.Linear, group: RankGroup) -> nn.Module:
    width = stock.out_features
    return Gathered(_cut_outputs(stock, group.span(width), group), group, width)


def _rows(name: str, stock: nn.Linear, group: RankGroup) -> nn.Module:
    return Summed(_cut_inputs(name, stock, group), group)


def _split_rows(name: str, stock: nn.Linear, group: RankGroup) -> nn.Module:
    columns = group.span(stock.in_features)
    return Summed(Split(_cut_inputs(name, stock, group), columns), group)


_LINEAR: Final[dict[str, Callable[[str, nn.Linear, RankGroup], nn.Module]]] = {
    "colwise": _columns,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,  # as older plans call it
    "rowwise": _rows,
    "rowwise_split_input": _split_rows,
    "rowwise_rep": _split_rows,
}


def _cut_outputs(linear: nn.Linear, span: slice, group: RankGroup) -> nn.Linear:
    linear.weight = _held(linear.weight[span], group)
    if linear.bias is not None:
        linear.bias = _held(linear.bias[span], group)
    linear.out_features = linear.weight.shape[0]
    return linear


def _cut_inputs(name: str, linear: nn.Linear, group: RankGroup) -> nn.Linear:
    """Cuts a linear layer by its inputs. The bias stays with the first rank: the sum has it once."""
    _divides(name, linear.in_features, group)
    linear.weight = _held(linear.weight[:, group.span(linear.in_features)], group)
    linear.in_features = linear.weight.shape[1]
    if group.rank:
        linear.register_parameter("bias", None)
    return linear


def _parameter(name: str, style: str, weight: Tensor, group: RankGroup) -> nn.Parameter:
    """Cuts a weight that is no linear layer's, such as all experts' [E, out, in] in one."""
    axis = {"packed_colwise": -2, "colwise": -2, "rowwise": -1}.get(style)
    if axis is None or weight.dim() < 2:
        raise ConfigError(
            f"its tensor-parallel plan has {style} for {name}, which kvloom cannot slice; "
            "`tensor_parallel: 1` is right"
        )
    parts = weight.chunk(2, axis) if style == "packed_colwise" else (weight,)  # gate over up
    length = parts[0].shape[axis]
    _divides(name, length, group)
    span = group.span(length)
    cut = [part.narrow(axis, span.start, span.stop - span.start) for part in parts]
    return _held(cut[0] if len(cut) == 1 else torch.cat(cut, axis), group)


def _held(part: Tensor, group: RankGroup) -> nn.Parameter:
    """Returns a copy in memory of its own, so that the whole weight may go."""
    return nn.Parameter(part.detach().to(group.device, copy=True), requires_grad=False)


def _divides(name: str, length: int, group: RankGroup) -> None:
    if length % group.size:
        raise ConfigError(
            f"{name} is {length} wide, which {group.size} ranks cannot share evenly; "
            "another `tensor_parallel` is right"
        )

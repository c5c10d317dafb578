"""Makes a loaded model fast without touching its code: layers over one input are merged, and norms, rotary
and gates are replaced by the device's own.

Everything is found by structure. Products that are merged are the same arithmetic. A norm, a gate or a rotary
function is replaced only if its replacement agrees with it on random input in float32, which shows a factor
or a form that half precision would hide. So an architecture that nobody thought of is served as it is rather
than wrongly. The loader compares the whole model's logits in the precision that is served.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.exec.experts import Experts
from kvloom.exec.huggingface import GATED, QKV, children
from kvloom.exec.parallel.slicing import Summed
from kvloom.exec.quantized import QuantizedLinear
from kvloom.exec.widened import WidenedLinear, computes_in_float32
from kvloom.kernels.reference import Activation

_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh", "gelu")
STOCK: Final = (nn.Linear, WidenedLinear)
"""Linear layers that do nothing else with their weights."""
RotaryFunction = Callable[..., tuple[Tensor, Tensor]]


class _Last(threading.local):
    """The last product of the calling thread, kept until each merged layer has taken its part."""

    x: Tensor | None = None
    parts: Sequence[Tensor] = ()
    left: int = 0


class MergedLinear:
    """Several linear layers over the same input as one product, whose columns are split by `sizes`. Each
    layer keeps its place in the model as a `MergedLinearPart`; the first to be called computes for all. Jobs
    on other threads do not see this one's product."""

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


class MergedLinearPart(nn.Module):
    """One layer of a `MergedLinear`."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self._merged = merged
        self._index = index

    @property
    def product(self) -> nn.Module:
        """The product of all merged layers, side by side."""
        return self._merged.product

    def forward(self, x: Tensor) -> Tensor:
        return self._merged.part(x, self._index)


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Returns one product whose columns are those of the layers, side by side. All have a bias, or none."""
    first, width = linears[0], sum(linear.out_features for linear in linears)
    together = nn.Linear(first.in_features, width, bias=first.bias is not None, device="meta")
    together.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        together.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return together


@dataclass(frozen=True)
class Replacements:
    """The modules and functions that a device has in place of stock ones."""

    fits: Callable[[Tensor], bool]
    """Returns whether the device's products take this weight."""
    product: Callable[[nn.Linear], nn.Module]
    """Makes the product of merged layers."""
    gated: Callable[[Sequence[nn.Linear], Activation], nn.Module]
    """Makes a gated MLP, down(activation(gate(x)) ∘ up(x)), from gate, up and down."""
    norm: Callable[[Tensor, float, float], nn.Module]
    """Makes a norm, x / rms(x) · (offset + weight), from weight, eps and offset."""
    rotate: RotaryFunction
    """Rotates q and k as `apply_rotary_pos_emb` of Llama does."""


def fuse(model: nn.Module, ours: Replacements) -> None:
    """Fuses in place. Stock weights are let go module by module, so at most one layer's are held twice."""
    first = next(model.parameters())
    served, device = torch.float32 if computes_in_float32(model) else first.dtype, first.device
    for parent, name, child in children(model):
        if type(child).__name__.endswith("Attention"):
            _merge_qkv(child, ours)
            fuse_rotary(child, ours.rotate, device)
        elif (gated := _gated_like(child, ours)) or (norm := _norm_like(child, served, ours)):
            setattr(parent, name, gated or norm)


def _linears(module: nn.Module, names: tuple[str, ...], alike: int, ours: Replacements) -> list[nn.Linear]:
    """Returns the module's plain linear layers of these names, whose first `alike` take one input, all or
    none with a bias; nothing if it has others."""
    found = [getattr(module, name, None) for name in names]
    linears = [
        linear
        for linear in found
        if isinstance(linear, nn.Linear) and type(linear) in STOCK and ours.fits(linear.weight)
    ]
    forms = {(linear.in_features, linear.bias is None) for linear in linears[:alike]}
    return linears if len(linears) == len(names) and len(forms) == 1 else []


def _merge_qkv(module: nn.Module, ours: Replacements) -> None:
    linears = _linears(module, QKV, 3, ours)
    if not linears:
        return
    put_merged(module, QKV, ours.product(join(linears)))


def put_merged(module: nn.Module, names: tuple[str, ...], product: nn.Module) -> None:
    """Gives the module's layers of these names their parts of a product of them all, side by side."""
    merged = MergedLinear(product, [getattr(module, name).out_features for name in names])
    for index, name in enumerate(names):
        setattr(module, name, MergedLinearPart(merged, index))


def _gated_like(stock: nn.Module, ours: Replacements) -> nn.Module | None:
    """Returns our gated MLP in the stock one's place, or None if that is something else."""
    down = getattr(stock, GATED[2], None)
    if not isinstance(down, Summed):
        return _own_gated_like(stock, ours)
    setattr(stock, GATED[2], down.inner)  # a rank's own part is compared, and then summed as before
    gated = _own_gated_like(stock, ours)
    setattr(stock, GATED[2], down)
    return gated and Summed(gated, down.group)


def _own_gated_like(stock: nn.Module, ours: Replacements) -> nn.Module | None:
    linears = _linears(stock, GATED, 2, ours)
    if not linears:
        return None
    wide = _in_float32(stock)
    parts = [getattr(wide, name) for name in GATED]
    probe = _probe(4, linears[0].in_features, linears[0].weight)
    found = find_gated(wide, lambda activation: ours.gated(parts, activation), probe)
    if found is None:
        return None
    activation, gated = found
    return gated if wide is stock else ours.gated(linears, activation)


QuantizedProduct = Callable[[Sequence[QuantizedLinear]], nn.Module | None]
QuantizedGate = Callable[[Sequence[QuantizedLinear]], Callable[[Activation], nn.Module] | None]


def fuse_quantized(model: nn.Module, product: QuantizedProduct, gated: QuantizedGate) -> None:
    """Merges quantised layers over one input, and gates with their products, in place. product: makes one
    product of layers; gated: takes gate, up and down, and returns a function that makes a gated MLP with an
    activation. Either returns None if the device has none of these layers together."""
    for parent, name, child in children(model):
        if type(child).__name__.endswith("Attention") and (linears := _quantized(child, QKV)):
            if merged := product(linears):
                put_merged(child, QKV, merged)
        elif isinstance(child, Experts):
            _fuse_experts(child, gated)
        elif (linears := _quantized(child, GATED)) and (found := _quantized_gated(child, linears, gated)):
            setattr(parent, name, found[1])


def _fuse_experts(experts: Experts, gated: QuantizedGate) -> None:
    """Makes gated MLPs of those experts whose layers are all quantised. All have the activation that the
    first of them is found to have."""
    activation: Activation | None = None
    for name, expert in experts.named_children():
        linears = _quantized(expert, GATED)
        if not linears:
            continue
        if activation is None:
            found = _quantized_gated(expert, linears, gated)
            if found is None:
                return
            activation, ours = found
        elif make := gated(linears):
            ours = make(activation)
        else:
            continue
        setattr(experts, name, ours)


def _quantized(module: nn.Module, names: tuple[str, ...]) -> list[QuantizedLinear]:
    """Returns the module's layers of these names if all are quantised, else none."""
    found = [getattr(module, name, None) for name in names]
    linears = [linear for linear in found if type(linear) is QuantizedLinear]
    return linears if len(linears) == len(names) else []


def _quantized_gated(
    stock: nn.Module, linears: Sequence[QuantizedLinear], gated: QuantizedGate
) -> tuple[Activation, nn.Module] | None:
    """Returns our gated MLP in the stock one's place; None if no activation makes them agree."""
    make = gated(linears)
    return make and find_gated(stock, make, _probe(4, linears[0].in_features, linears[0].quantized.codes))


def find_gated(
    stock: nn.Module, make: Callable[[Activation], nn.Module], probe: Tensor
) -> tuple[Activation, nn.Module] | None:
    """Returns the activation, and the gated MLP that `make` makes with it, that give what the stock one does
    on probe [rows, size]; None if none does."""
    with torch.inference_mode():
        try:
            expected = stock(probe[None])
        except (TypeError, ValueError, RuntimeError):
            return None  # it takes more than one input: it is not a plain MLP
        for activation in _ACTIVATIONS:
            gated = make(activation)
            if _agree(gated(probe[None]), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
                return activation, gated
    return None


def _norm_like(stock: nn.Module, served: torch.dtype, ours: Replacements) -> nn.Module | None:
    """Returns our norm in the stock one's place; None if the two disagree, or the weight is kept in another
    number format than what it scales."""
    weight = getattr(stock, "weight", None)
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if not type(stock).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.dtype != served:
        return None
    wide: Any = _in_float32(stock)
    probe = _probe(5, weight.shape[-1], weight)
    with torch.inference_mode():
        expected = wide(probe)
        for offset in (0.0, 1.0):
            if _agree(ours.norm(wide.weight, eps, offset)(probe), expected, rtol=1e-5, atol=1e-6):
                return ours.norm(weight, eps, offset)
    return None


def _in_float32(stock: nn.Module) -> nn.Module:
    """Returns the module itself if it computes in float32, else a copy that does."""
    if computes_in_float32(stock):
        return stock
    return copy.deepcopy(stock).float()


def _probe(rows: int, size: int, beside: Tensor) -> Tensor:
    """Returns random input [rows, size] on the device of a tensor."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(beside.device)


def _agree(found: Tensor, expected: Any, *, rtol: float, atol: float) -> bool:
    same_form = isinstance(expected, Tensor) and found.shape == expected.shape
    return same_form and torch.allclose(found, expected, rtol=rtol, atol=atol)


_ROTARY: Final = "apply_rotary_pos_emb"


def fuse_rotary(module: nn.Module, turn: RotaryFunction, device: torch.device) -> None:
    """Gives this attention module's forward our rotary function for the one its source names, if the two
    agree on `device`. The module's class and its file's globals stay as they are: other models share them.
    What transformers wraps around the forward, to rename arguments of old callers, is left out."""
    if "forward" in vars(module):
        return  # it is ours already
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return
    stock = forward.__globals__.get(_ROTARY)
    if stock is None or not _rotates_alike(stock, turn, device):
        return
    ours = FunctionType(
        forward.__code__,
        forward.__globals__ | {_ROTARY: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(ours, module)


def _rotates_alike(stock: Callable[..., Any], turn: RotaryFunction, device: torch.device) -> bool:
    """Compares the two on random q [1, 3, 5, 16], k [1, 1, 5, 16] with the tables that rotate-half models
    have."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator).to(device) for heads in (3, 1))
    angles = torch.randn(1, 5, 8, generator=generator).repeat(1, 1, 2).to(device)
    try:
        expected = stock(q, k, angles.cos(), angles.sin())
    except (TypeError, RuntimeError, ValueError):
        return False  # it has another form, and is served as it is
    found = turn(q.clone(), k.clone(), angles.cos(), angles.sin())
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, found, strict=True))

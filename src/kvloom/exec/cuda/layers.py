"""A GPU's layers in the place of a model's stock modules: norms, rotary and gates of one launch each, decoder
layers whose norms add the residual, and linear layers over weights of 8 or 4 bits. Such weights are held as
checkpoints' readers give them: codes, and scales and offsets of groups or of rows."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from kvloom.exec.cuda.operations import Operations
from kvloom.exec.fuse import MergedLinearPart, Replacements, fuse, fuse_quantized, join
from kvloom.exec.gguf.blocks import MappedEmbedding
from kvloom.exec.huggingface import children
from kvloom.exec.parallel.slicing import Summed
from kvloom.exec.quantized import Factors, QuantizedLinear, QuantizedWeight, joined, narrowed
from kvloom.kernels.reference import Activation

STEP: Final = 16
"""The number of which both sizes of a weight in FP8 must be multiples for torch's scaled product."""


class DeviceQuantizedLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N] in the number format of x. Inputs are not rounded, or
    rounded to FP8 with a scale for each row if the weight is in FP8 (W8A8)."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    def __init__(self, operations: Operations, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("codes", weight.codes.contiguous())
        self.register_buffer("scales", _plain(weight.scales))
        self.register_buffer("offsets", None if weight.offsets is None else _plain(weight.offsets))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._operations = operations
        self._rounds = False

    @classmethod
    def of(cls, operations: Operations, linears: Sequence[QuantizedLinear]) -> Self | None:
        """Returns the product of the layers, side by side; None if their weights have unlike forms, which no
        launch takes together."""
        weights = [one.quantized for one in linears]
        if len({(one.codes.dtype, one.group, one.offsets is None) for one in weights}) > 1:
            return None
        offsets = [one.offsets for one in weights if one.offsets is not None]
        codes = torch.cat([one.codes for one in weights]) if len(weights) > 1 else weights[0].codes
        scales = joined([one.scales for one in weights])
        weight = QuantizedWeight(weights[0].bits, codes, scales, joined(offsets) if offsets else None)
        return cls(operations, weight, _joined_bias(linears))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._rounds:
            out = self._operations.scaled_product(rows, self.codes, self.scales, self.bias)
        else:
            out = self._operations.quantized_product(rows, self.codes, self.scales, self.offsets, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def round_inputs(self) -> None:
        """Rounds inputs from now on, if torch's scaled product takes a weight of this form and size."""
        fits = self.out_features % STEP == self.in_features % STEP == 0
        if self.codes.dtype == torch.float8_e4m3fn and fits:
            self.scales = self.scales.float()
            self._rounds = True


def _joined_bias(linears: Sequence[QuantizedLinear]) -> Tensor | None:
    biases = [one.bias for one in linears]
    some = next((one for one in biases if one is not None), None)
    if some is None:
        return None
    pairs = zip(biases, linears, strict=True)
    return torch.cat([some.new_zeros(one.out_features) if bias is None else bias for bias, one in pairs])


def _plain(factors: Factors) -> Tensor:
    """Returns scales or offsets in float16 if that holds them exactly, else in float32."""
    return narrowed(factors.float().contiguous())


def round_inputs(model: nn.Module) -> None:
    """Lets a model's products over weights in FP8 round their inputs to it from now on."""
    for module in model.modules():
        product = module.product if isinstance(module, MergedLinearPart) else module
        if isinstance(product, DeviceQuantizedLinear):
            product.round_inputs()


def _layers(module: nn.Module) -> Iterator[QuantizedLinear]:
    for one in module.modules():
        if type(one) is QuantizedLinear:
            yield one


def hold_plainly(module: nn.Module) -> None:
    """Makes plain tensors, in place, of forms that CPUs alone read: scales that are multiples of shared ones,
    and embeddings that stay in a mapped file."""
    for layer in _layers(module):
        held = layer.quantized
        offsets = None if held.offsets is None else _plain(held.offsets)
        layer.quantized = QuantizedWeight(held.bits, held.codes, _plain(held.scales), offsets)
    for parent, name, child in children(module):
        if isinstance(child, MappedEmbedding):
            matrix = child.read()
            plain = nn.Embedding(len(matrix), matrix.shape[1], _weight=matrix)
            setattr(parent, name, plain.requires_grad_(False))


def quantized_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors of a module's quantised layers, as `hold_plainly` leaves them."""
    for layer in _layers(module):
        held = layer.quantized
        yield from (one for one in (held.codes, held.scales, held.offsets) if isinstance(one, Tensor))


def move_quantized(module: nn.Module, device: torch.device) -> None:
    """Brings the tensors that `quantized_tensors` yields to a device."""

    def moved(factors: Factors) -> Factors:
        return factors.to(device) if isinstance(factors, Tensor) else factors

    for layer in _layers(module):
        held = layer.quantized
        offsets = None if held.offsets is None else moved(held.offsets)
        layer.quantized = QuantizedWeight(held.bits, held.codes.to(device), moved(held.scales), offsets)


class _Ready(threading.local):
    """The sum that the calling thread has normalised ahead, until the norm is called with it."""

    total: Tensor | None = None
    normal: Tensor | None = None


class DeviceNorm(nn.Module):
    """Computes x / rms(x) · (offset + weight) in one launch, in which a residual may be added to x before."""

    def __init__(self, operations: Operations, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._operations = operations
        self._form = eps, offset
        self._ready = _Ready()

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds the residual to x [1, N, H], in place if x is contiguous, and returns the sum. This thread's
        next call with that tensor finds it normalised."""
        total = x.contiguous()
        size = x.shape[-1]
        normal = self._operations.add_rms_norm(
            total.view(-1, size), residual.reshape(-1, size), self.weight, *self._form
        )
        self._ready.total, self._ready.normal = total, normal.view(x.shape)
        return total

    def forward(self, x: Tensor) -> Tensor:
        ready = self._ready
        if ready.normal is not None and ready.total is x:
            normal, ready.total, ready.normal = ready.normal, None, None
            return normal
        heads = x.dim() == 4 and len(x) == 1  # [1, N, heads, D], perhaps a part of a merged product's columns
        rows = x[0] if heads else x.reshape(-1, x.shape[-1])
        return self._operations.rms_norm(rows, self.weight, *self._form).view(x.shape)


class DeviceGatedMLP(nn.Module):
    """Computes down(activation(gate(x)) ∘ up(x)), with gate and up as one product, `inner`."""

    def __init__(
        self, operations: Operations, inner: nn.Module, down: nn.Module, activation: Activation
    ) -> None:
        super().__init__()
        self.inner = inner
        self.down = down
        self.activation = activation
        self._operations = operations

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        rows = self._operations.gated(inner.view(-1, inner.shape[-1]), self.activation)
        out: Tensor = self.down(rows.view(*inner.shape[:-1], -1))
        return out


_PARTS: Final = {"self_attn", "mlp"}
_NORMS: Final = (  # before attention, after it, before the MLP, after it; "" for none
    ("input_layernorm", "", "post_attention_layernorm", ""),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)


class ResidualLayer:
    """The forward of a decoder layer, in which each sum is done by the norm that reads it: that before the
    MLP, and `following`, which is the next layer's or the model's last."""

    def __init__(self, layer: nn.Module, names: Sequence[str], following: DeviceNorm) -> None:
        """names: of the layer's norms, as in `_NORMS`."""
        norms: list[Any] = [getattr(layer, name) if name else nn.Identity() for name in names]
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = norms
        self._attention: Any = layer.self_attn
        self._mlp: Any = layer.mlp
        self._following = following

    def __call__(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """arguments: for attention alone."""
        out, _ = self._attention(hidden_states=self._before_attention(hidden_states), **arguments)
        total = self._before_mlp.add(self._after_attention(out), hidden_states)
        out = self._mlp(self._before_mlp(total))
        return self._following.add(self._after_mlp(out), total)


def add_in_norms(model: nn.Module, operations: Operations) -> None:
    """Puts a `ResidualLayer`, whose norms add the residuals, in place of each decoder layer's forward that
    computes the same. Whether it does is tried with stand-ins for attention, MLP and norms. Layers are fused
    before."""
    for backbone in model.modules():
        parts = list(backbone.children())
        lists = [part for part in parts if isinstance(part, nn.ModuleList)]
        last = [part for part in parts if isinstance(part, DeviceNorm)]
        if len(lists) != 1 or len(last) != 1:
            continue
        firsts = [getattr(layer, "input_layernorm", None) for layer in lists[0]]
        for layer, (_, following) in zip(lists[0], pairwise([*firsts, last[0]]), strict=True):
            names = _norms_of(layer)
            if names and isinstance(following, DeviceNorm) and _adds_alike(layer, names, operations):
                layer.forward = ResidualLayer(layer, names, following)


def _norms_of(layer: nn.Module) -> Sequence[str]:
    """Returns the names of a decoder layer's norms, as in `_NORMS`; nothing if it has other parts. Attention
    and a gated MLP give tensors that nobody else reads, so sums may be done in them."""
    if vars(layer)["_parameters"] or vars(layer)["_buffers"]:
        return ()
    parts = dict(layer.named_children())
    for names in _NORMS:
        norms = {name for name in names if name}
        if parts.keys() == norms | _PARTS and all(isinstance(parts[name], DeviceNorm) for name in norms):
            mlp = parts["mlp"]
            gated = isinstance(mlp.inner if isinstance(mlp, Summed) else mlp, DeviceGatedMLP)
            return names if gated else ()
    return ()


def _adds_alike(layer: nn.Module, names: Sequence[str], operations: Operations) -> bool:
    """Returns whether the layer's own forward and a `ResidualLayer` give the same result and call attention
    with the same arguments, if simple functions stand in for attention, MLP and norms. They differ if the
    layer has factors, or sums elsewhere."""
    device, size, asked = next(layer.parameters()).device, 16, list[dict[str, Any]]()

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def attend(hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        asked.append(arguments)
        return 0.5 * hidden_states.flip(-1), None

    generator = torch.Generator().manual_seed(0)
    parts: dict[str, Any] = {name: DeviceNorm(operations, random(size), 1e-6, 0.0) for name in names if name}
    parts |= {"self_attn": attend, "mlp": lambda x: 0.7 * x.roll(1, -1)}
    stock = copy.copy(layer)
    vars(stock)["_modules"] = vars(layer)["_modules"] | parts
    ours = ResidualLayer(stock, names, DeviceNorm(operations, random(size), 1e-6, 0.0))
    x, marks = random(1, 5, size), dict.fromkeys(("attention_mask", "position_ids"))
    given: dict[str, Any] = marks | {
        "position_embeddings": (random(1, 5, 8), random(1, 5, 8)),
        "kv": object(),
    }
    with torch.inference_mode():
        try:
            expected = stock(x.clone(), **given)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # it wants to be called otherwise
        found = ours(x.clone(), **given)
    return (
        isinstance(expected, Tensor)
        and all(asked[0].get(name) is value for name, value in given.items())
        and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    )


def fuse_on_device(model: nn.Module, operations: Operations) -> None:
    """Fuses the model in place, with the kernels of `operations`."""

    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotates q, k [1, H, N, D] by cos, sin [1, N, R] in place and returns them; nothing else reads
        them."""
        operations.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q, k

    def gated(linears: Sequence[nn.Linear], activation: Activation) -> nn.Module:
        return DeviceGatedMLP(operations, join(linears[:2]), linears[2], activation)

    def product(linears: Sequence[QuantizedLinear]) -> nn.Module | None:
        return DeviceQuantizedLinear.of(operations, linears)

    def gated_quantized(linears: Sequence[QuantizedLinear]) -> Callable[[Activation], nn.Module] | None:
        inner, down = product(linears[:2]), product(linears[2:])
        return inner and down and partial(DeviceGatedMLP, operations, inner, down)

    fuse_quantized(model, product, gated_quantized)
    for parent, name, child in children(model):
        if type(child) is QuantizedLinear:
            setattr(parent, name, product([child]))
    ours = Replacements(
        fits=lambda weight: True,
        product=lambda joined: joined,
        gated=gated,
        norm=partial(DeviceNorm, operations),
        rotate=rotate_both,
    )
    fuse(model, ours)
    add_in_norms(model, operations)

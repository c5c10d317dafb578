"""A GGUF file becomes transformers' module, with its quantised matrices as they are in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import nn

from kvloom.exec.experts import split_experts
from kvloom.exec.gguf.architecture import (
    StoredWeight,
    is_quantized_linear,
    rotary_factors,
    row_order,
    weights_of,
    with_experts_apart,
)
from kvloom.exec.gguf.blocks import held_bytes, map_embedding, read_plain, read_quantized
from kvloom.exec.gguf.header import GgufHeader
from kvloom.exec.huggingface import children, some_of
from kvloom.exec.quantized import QuantizedWeight, put_quantized
from kvloom.types.errors import ConfigError

_EMBEDDING = "model.embed_tokens"
_GATE_UP = ".mlp.experts.gate_up_proj"
_HALVES = "ffn_gate_exps", "ffn_up_exps"


class QuantizedRecords(Mapping[str, QuantizedWeight]):
    """The quantised matrices of linear layers by the names of their modules. Each is read when it is asked
    for, so that no more than one is held beside what is made of them."""

    def __init__(self, opened: BinaryIO, header: GgufHeader, config: Any) -> None:
        self._opened = opened
        self._header = header
        self._config = config
        self._records = {
            name.removesuffix(".weight"): weight.record
            for name, weight in with_experts_apart(weights_of(header)).items()
            if is_quantized_linear(name, weight) and not name.startswith(_EMBEDDING)
        }

    def __getitem__(self, module: str) -> QuantizedWeight:
        order = row_order(f"{module}.weight", self._header, self._config)
        return read_quantized(self._opened, self._records[module], order)

    def __contains__(self, module: object) -> bool:
        """Reads nothing, as the mapping's own would."""
        return module in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def gguf_bytes(header: GgufHeader, dtype: torch.dtype) -> int:
    """Returns the bytes of memory that the model takes at most. The embedding stays in the file if it is
    quantised. dtype: of plain matrices."""
    held, seen = 0, set[str]()
    for name, weight in with_experts_apart(weights_of(header)).items():
        if is_quantized_linear(name, weight):
            held += 0 if name.startswith(_EMBEDDING) else held_bytes(weight.record)
        elif weight.record.name not in seen:
            vector = len(weight.record.shape) == 1
            held += weight.elements * (torch.float32.itemsize if vector else dtype.itemsize)
        seen.add(weight.record.name)
    return held


def take_out_quantized(module: nn.Module, header: GgufHeader) -> None:
    """Takes the weights that are held quantised out of a module that is without memory for them."""
    quantized = {name for name, weight in weights_of(header).items() if is_quantized_linear(name, weight)}
    for name, one in module.named_modules():
        if f"{name}.weight" in quantized:
            one.register_parameter("weight", None)


def fill(module: Any, header: GgufHeader, dtype: torch.dtype, computes: torch.dtype) -> int:
    """Puts the file's tensors into the module, which is without memory for them. Returns how many parameters
    it has. dtype: of plain matrices; computes: of vectors, which are more exact than these in the file, and
    of rows of a quantised embedding. Raises ConfigError if the file lacks a tensor of it, has one of another
    shape, or has one with an infinite scale."""
    weights = weights_of(header)
    _check_shapes(module, weights)
    parameters: int = sum(one.numel() for one in module.parameters())
    with header.file.open("rb") as opened:
        quantized = QuantizedRecords(opened, header, module.config)
        split_experts(module, quantized)
        put_quantized(module, quantized)
        _put_plain(module, opened, header, quantized, dtype, computes)
        _put_rotary(module, opened, header)
    return parameters


def _check_shapes(module: nn.Module, weights: Mapping[str, StoredWeight]) -> None:
    wanted = {name: tuple(one.shape) for name, one in module.state_dict().items()}
    if lacking := wanted.keys() - weights.keys():
        raise ConfigError(f"its file lacks {some_of(lacking)}")
    for name, weight in weights.items():
        right = wanted.get(name)
        shapes = {one.shape for one in weight.parts}
        if right == weight.shape and len(shapes) == 1:
            continue
        record = weight.record
        if name.endswith(_GATE_UP) and right:  # whose two halves the file has one by one
            if len(weight.parts) != len(_HALVES):
                lacks = next(half for half in _HALVES if half not in record.name)
                raise ConfigError(f"its file has {record.name}, and lacks {lacks} beside it")
            half = (*right[:-2], right[-2] // 2, right[-1])
            record = next((one for one in weight.parts if one.shape != half), record)
            right = half
        said = "none" if right is None else f"{list(right)}"
        raise ConfigError(
            f"its {record.name} has the shape {list(record.shape)}; {said} is right by its config"
        )


def _put_plain(
    module: Any,
    opened: BinaryIO,
    header: GgufHeader,
    quantized: Mapping[str, object],
    dtype: torch.dtype,
    computes: torch.dtype,
) -> None:
    """Puts what is no quantised linear layer in its place: each tensor once, also if it has two names."""
    made: dict[str, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, weight in with_experts_apart(weights_of(header)).items():
        record = weight.record
        if name.removesuffix(".weight") in quantized:
            continue
        if name.startswith(_EMBEDDING) and record.quantized:
            module.set_input_embeddings(map_embedding(opened, record, computes))
            continue
        if record.name not in made:
            order = row_order(name, header, module.config)
            form = computes if len(record.shape) == 1 else dtype
            parts = [read_plain(opened, one, form, order) for one in weight.parts]
            values = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
            made[record.name] = nn.Parameter(values, requires_grad=False)
        state[name] = made[record.name]
    module.load_state_dict(state, strict=False, assign=True)


def _put_rotary(module: Any, opened: BinaryIO, header: GgufHeader) -> None:
    """Makes the modules that hold tables of rotary frequencies, which no file has."""
    factors = rotary_factors(header, module.config)
    for parent, name, child in children(module):
        if not any(one.is_meta for one in child._buffers.values() if one is not None):
            continue
        made: Any = type(child)(module.config)
        if factors is not None:
            made.inv_freq /= read_plain(opened, factors, torch.float32)
        setattr(parent, name, made)

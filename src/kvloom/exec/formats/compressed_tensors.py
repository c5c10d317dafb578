"""Checkpoints of compressed-tensors, whose weights are packed or plain integers, or floats of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.exec.formats.tensors import (
    KEY,
    SCALES,
    WORD,
    Layout,
    Parts,
    Reader,
    StoredTensor,
    as_bytes,
    config_error,
    groups_of,
    made,
    part_of,
    read_bits,
    require_order,
    signed,
    unpacked,
    whole_number,
)
from kvloom.exec.quantized import Bits, QuantizedWeight
from kvloom.types.errors import ConfigError

_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""The types that codes may have, by the name of the format."""
_PACKED: Final = "pack-quantized"
CODES: Final = "I8", "F8_E4M3"
"""The number formats of codes that are not packed: integers, and floats."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Holds what a config says of some layers' weights."""

    packed: bool
    bits: Bits
    group: int | None
    """The length of a group; -1 for a whole row, None for the whole matrix."""
    zeros: bool
    reordered: bool
    floats: bool


def compressed_tensors(config: Mapping[str, Any]) -> Reader:
    """Reads https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized` and
    `compressors/naive_quantized`.

    With `int-quantized`, `weight` is int8 [N, K], with `float-quantized` float8_e4m3fn [N, K], and with
    `naive-quantized` one of these; floats have a scale for each row, or one. With `pack-quantized`,
    `weight_packed` is int32 [N, ⌈K · bits / 32⌉], whose words hold the codes of a row in order, the first in
    the lowest bits, each with 2^(bits - 1) added; `weight_shape` holds N and K. `weight_scale` is [N, G], or
    one number for the whole matrix. `weight_zero_point`, which symmetric weights lack, is int8 like
    `weight_scale`, or with `pack-quantized` int32 [⌈N · bits / 32⌉, G], packed down the columns as codes
    are. An element is scale · (code - zero point). What a config says of activations, and of keys and values,
    is left out: they are not rounded.
    """
    sparse = config.get("sparsity_config")
    if sparse and not (isinstance(sparse, dict) and sparse.get("format", "dense") == "dense"):
        raise config_error("sparsity_config", sparse, "a dense model")
    if transform := config.get("transform_config"):
        raise config_error("transform_config", transform, "a model without transforms")
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise config_error("config_groups", groups, "an object")
    schemes = [
        _scheme(f"config_groups.{key[:40]}", group, config.get("format"))
        for key, group in groups.items()
        if not isinstance(group, dict) or group.get("weights") is not None
    ]
    names = {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    return Reader(frozenset(names), lambda parts: _layout(parts, schemes))


def _scheme(where: str, group: object, own: object) -> _Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise config_error(where, group, "an object with weights")
    stored = group.get("format") or own
    if not isinstance(stored, str) or stored not in _KINDS:
        raise config_error(f"{where}.format", stored, *_KINDS)
    if (kind := weights.get("type", "int")) not in _KINDS[stored]:
        raise config_error(f"{where}.weights.type", kind, *_KINDS[stored])
    floats = kind == "float"
    widths: tuple[Bits, ...] = (8,) if floats else (4, 8)
    bits = read_bits(weights, ("num_bits",), *widths, default=8)
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    strategies = ("tensor", "channel") if floats else ("tensor", "channel", "group")
    if strategy not in strategies:
        raise config_error(f"{where}.weights.strategy", strategy, *strategies)
    length = {"tensor": None, "channel": -1}.get(strategy, 0)
    if length == 0 and (length := whole_number(weights, ("group_size",))) < 1:
        raise config_error(f"{where}.weights.group_size", length, "a positive number")
    reordered = weights.get("actorder") not in (None, False, "weight", "static")
    zeros = weights.get("symmetric") is False
    return _Scheme(stored == _PACKED, bits, length, zeros, reordered, floats)


def _layout(parts: Parts, schemes: Sequence[_Scheme]) -> Layout:
    """Returns the layout by the first scheme that its tensors agree with. Raises the last one's error."""
    packed = "weight_packed" in parts
    main = part_of(parts, "weight_packed" if packed else "weight")
    part_of(parts, "weight_scale")
    refused = main.error(f"is stored as its {KEY} says of no layer")
    for scheme in schemes:
        if scheme.packed == packed:
            try:
                return _packed_layout(parts, scheme) if packed else _plain_layout(parts, scheme)
            except ConfigError as error:
                refused = error
    raise refused


def _packed_layout(parts: Parts, scheme: _Scheme) -> Layout:
    main, told, bits = parts["weight_packed"], part_of(parts, "weight_shape"), scheme.bits
    told.require([2], "I64", "I32")
    rows, columns = (int(one) for one in told.read().tolist())
    if rows < 1 or columns < 1:
        raise told.error(f"says {rows} × {columns}; positive numbers are right")
    main.matrix("I32")
    main.require([rows, -(-columns * bits // WORD)], "I32")
    scale = _scale(parts, scheme, main, rows, columns)
    groups = scale.shape[-1] if scale.shape else 1
    zero = _zero_point(parts, scheme)
    if zero is not None and zero.format == "I32":
        zero.require([-(-rows * bits // WORD), groups], "I32")
    elif zero is not None:
        zero.require(scale.shape, "I8")

    def read() -> QuantizedWeight:
        words = main.read()  # whose pages go back at the end
        codes = as_bytes(words)[:, : columns * bits // 8]
        least = 1 << (bits - 1)  # what the stored codes have over the signed ones
        held = least if bits == 4 else 0  # and what ours have
        zeros: Tensor | int = held
        if zero is not None and zero.format == "I32":
            stored = unpacked(zero.read().T, bits)[:, :rows].T
            zeros = stored.to(torch.float32) - (least - held)
        elif zero is not None:
            zeros = zero.read().to(torch.float32).view(-1, groups) + held
        scales = scale.read().view(-1, groups).expand(rows, groups)
        return made(bits, codes if bits == 4 else signed(codes), scales, zeros, main)

    return Layout((rows, columns), bits, groups, bits == 4 or zero is not None, read)


def _plain_layout(parts: Parts, scheme: _Scheme) -> Layout:
    main = parts["weight"]
    rows, columns = main.matrix(CODES[scheme.floats])
    scale, zero = _scale(parts, scheme, main, rows, columns), _zero_point(parts, scheme)
    groups = scale.shape[-1] if scale.shape else 1
    if zero is not None:
        zero.require(scale.shape, "I8")

    def read() -> QuantizedWeight:
        zeros: Tensor | int = 0
        if zero is not None:
            zeros = zero.read().to(torch.float32).view(-1, groups)
        return made(8, main.read(), scale.read().view(-1, groups).expand(rows, groups), zeros, main)

    return Layout((rows, columns), 8, groups, zero is not None, read, scheme.floats)


def _scale(parts: Parts, scheme: _Scheme, of: StoredTensor, rows: int, columns: int) -> StoredTensor:
    """Returns the tensor of the scales. Raises ConfigError if it, or the order of its groups, is another than
    the scheme says."""
    scale = parts["weight_scale"]
    if scheme.group is None:
        scale.require([1] * min(len(scale.shape), 2), *SCALES)
        order = 1
    else:
        order = groups_of(columns, scheme.group, of)
        scale.require([rows, order], *SCALES)
    if scheme.reordered or "weight_g_idx" in parts:
        require_order(part_of(parts, "weight_g_idx"), columns, order)
    return scale


def _zero_point(parts: Parts, scheme: _Scheme) -> StoredTensor | None:
    return part_of(parts, "weight_zero_point") if scheme.zeros else parts.get("weight_zero_point")

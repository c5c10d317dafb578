"""Checkpoints of GPTQ and AWQ, whose weights lie transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.exec.formats.tensors import (
    SCALES,
    WORD,
    Layout,
    Parts,
    Reader,
    config_error,
    group_size,
    groups_of,
    made,
    part_of,
    read_bits,
    require_order,
    signed,
    unpacked,
)
from kvloom.exec.quantized import QuantizedWeight, from_halves

_GPTQ: Final = {"gptq": 1, "gptq_v2": 0}  # by the name of the format: what zero points lack in the files
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word holds the first, second, … of its eight outputs


def gptq(config: Mapping[str, Any]) -> Reader:
    """Reads what https://github.com/ModelCloud/GPTQModel and AutoGPTQ write, as GPTQModel's
    `nn_modules/qlinear/torch.py` and `utils/model.py` read it.

    `qweight` is int32 [K · bits / 32, N], whose words hold neighbours of a column of the transposed matrix,
    the first in the lowest bits; `qzeros` int32 [G, N · bits / 32], whose words hold neighbours of a row;
    `scales` [G, N]; `g_idx` int32 [K] the group of each input, if there is one. An element is
    scale · (code - zero). The format `gptq`, the first version, stores zero - 1: one is taken off each number
    of a word by subtracting from the word as a whole, so that a zero of 0 borrows from its neighbour, and
    adding to the word as a whole brings all back.
    """
    bits = read_bits(config, ("bits",), 4, 8)
    group = group_size(config, ("group_size",))
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        kind = "marlin"
    if not isinstance(kind, str) or kind not in _GPTQ:
        raise config_error("checkpoint_format", kind, *_GPTQ)
    short = _GPTQ[kind] * (0x11111111 if bits == 4 else 0x01010101)

    def layout(parts: Parts) -> Layout:
        main, zero, scale = (part_of(parts, name) for name in ("qweight", "qzeros", "scales"))
        words, rows = main.matrix("I32")
        columns = words * WORD // bits
        groups = groups_of(columns, group, main)
        scale.require([groups, rows], *SCALES)
        zero.require([groups, -(-rows * bits // WORD)], "I32")
        if config.get("desc_act") or "g_idx" in parts:
            require_order(part_of(parts, "g_idx"), columns, groups)

        def read() -> QuantizedWeight:
            words = main.read()  # whose pages go back at the end
            stored = words.contiguous()[..., None].view(torch.uint8)  # [words, N, 4]
            codes = stored.transpose(0, 1).reshape(rows, -1)  # two codes of 4 bits a byte, as we hold them
            zeros = unpacked(zero.read() + short, bits)[:, :rows].T.to(torch.float32)
            if bits == 8:
                codes, zeros = signed(codes), zeros - 128
            return made(bits, codes, scale.read().T, zeros, main)

        return Layout((rows, columns), bits, groups, True, read)

    return Reader(frozenset({"qweight", "qzeros", "scales", "g_idx"}), layout)


def awq(config: Mapping[str, Any]) -> Reader:
    """Reads the packing `gemm` of https://github.com/casper-hansen/AutoAWQ, `modules/linear/gemm.py` and
    `utils/packing_utils.py`.

    `qweight` is int32 [K, N / 8] and `qzeros` int32 [G, N / 8]: a word holds eight neighbours of a row of the
    transposed matrix, from the lowest bits on those of the outputs 0, 2, 4, 6, 1, 3, 5 and 7; `scales` is
    [G, N]. An element is scale · (code - zero).
    """
    read_bits(config, ("bits", "w_bit"), 4, default=4)
    group = group_size(config, ("group_size", "q_group_size"))
    kind = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if not isinstance(kind, str) or kind.lower() != "gemm":
        raise config_error("version", kind, "gemm")

    def layout(parts: Parts) -> Layout:
        main, zero, scale = (part_of(parts, name) for name in ("qweight", "qzeros", "scales"))
        columns, words = main.matrix("I32")
        rows = words * 8
        groups = groups_of(columns, group, main)
        zero.require([groups, words], "I32")
        scale.require([groups, rows], *SCALES)

        def read() -> QuantizedWeight:
            words = main.read()  # whose pages go back at the end
            codes = _in_awq_order(words).T.contiguous()
            zeros = _in_awq_order(zero.read()).T.to(torch.float32)
            return made(4, from_halves(codes), scale.read().T, zeros, main)

        return Layout((rows, columns), 4, groups, True, read)

    return Reader(frozenset({"qweight", "qzeros", "scales"}), layout)


def _in_awq_order(words: Tensor) -> Tensor:
    """Returns int32 [R, W] as uint8 [R, 8 W], by output."""
    eights = unpacked(words, 4).view(len(words), -1, 8)
    return eights[..., _AWQ_ORDER].flatten(-2)

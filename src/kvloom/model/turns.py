"""What the decode attention of all layers is called with: what lasts made once, the rest once a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvloom.kernels.cpu_attention import AttentionArguments, span_of
from kvloom.model.attention import ForwardState
from kvloom.model.layer import DecoderLayer

_RECORD = np.dtype(AttentionArguments)
Turns = npt.NDArray[Any]


def lasting(layers: Sequence[DecoderLayer]) -> Turns:
    """[layers] records with what the model itself decides. `map` is the layer's offset in the map's rows."""
    turns = np.zeros(len(layers), _RECORD)
    for turn, layer in zip(turns, layers, strict=True):
        form, heads = layer.scoring, layer.heads
        turn["head_dim"], turn["kv_heads"], turn["group"] = heads.size, heads.kv, heads.q // heads.kv
        turn["scale"], turn["window"], turn["softcap"] = form.scale, form.window, form.softcap
        turn["map"], turn["map_page"] = layer.index * heads.kv * 4, len(layers) * heads.kv * 4
        turn["q_head"] = turn["out_head"] = heads.size * 4
        if heads.q_norm is not None and heads.k_norm is not None:
            turn["q_norm"], turn["k_norm"] = heads.q_norm.weight.data_ptr(), heads.k_norm.weight.data_ptr()
            turn["eps"], turn["offset"] = heads.q_norm.eps, heads.q_norm.offset
    return turns


def of_forward(lasting: Turns, state: ForwardState, cos: Tensor, sin: Tensor, threads: int) -> Turns:
    """The records of one forward; cos, sin [N, R]. Where q, k, v and out lie is for the caller to add."""
    turns = lasting.copy()
    arena = state.arena
    turns["arena"], turns["block_bytes"] = arena.data_ptr(), arena.stride(0) * 4
    turns["page_tokens"] = arena.shape[2]
    turns["map"] += state.page_map.data_ptr()
    turns["tables"], turns["table_row"] = state.tables.data_ptr(), state.tables.stride(0) * 4
    turns["lengths"], turns["batch"] = state.lengths.data_ptr(), len(state.lengths)
    turns["slot_page"], turns["slot_offset"] = state.slot_page.data_ptr(), state.slot_offset.data_ptr()
    turns["cos"], turns["sin"] = cos.data_ptr(), sin.data_ptr()
    turns["turned"], turns["turn_row"] = cos.shape[1], cos.stride(0) * 4
    kv_heads = int(lasting["kv_heads"][0])
    span = span_of(len(state.lengths), kv_heads, threads)
    turns["span"], turns["spans"] = span, -(-kv_heads // span)
    return turns


def place(turns: Turns, qkv: int, qkv_row: int, out: int, out_row: int) -> None:
    """Where the fused product's rows lie, q's heads first, then k's and v's, and where the output's do."""
    head = turns["q_head"]
    k = qkv + turns["kv_heads"] * turns["group"] * head
    turns["q"], turns["k"], turns["v"] = qkv, k, k + turns["kv_heads"] * head
    turns["q_row"], turns["out"], turns["out_row"] = qkv_row, out, out_row

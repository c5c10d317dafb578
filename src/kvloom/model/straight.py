"""A decoder whose layers are straight calls, without transformers' modules between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvloom.core.arrays import I64
from kvloom.kernels.cpu_attention import attend_all
from kvloom.model import turns
from kvloom.model.attention import ForwardState
from kvloom.model.few import FewRows
from kvloom.model.forward import padded
from kvloom.model.layer import DecoderLayer
from kvloom.model.linear import PackedLinear, TiedLinear
from kvloom.model.norm import FusedRMSNorm
from kvloom.model.parallel.modules import Gathered

Head = PackedLinear | TiedLinear | Gathered
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Parts:
    """rotary: transformers' own, x and positions [1, N] → cos and sin [1, N, R]."""

    embedding: nn.Embedding
    rotary: Rotary
    layers: tuple[DecoderLayer, ...]
    norm: FusedRMSNorm
    head: Head


class Straight:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns = turns.lasting(parts.layers)
        self._few = FewRows.of(parts.embedding, parts.layers, parts.norm, parts.head)

    def __call__(self, tokens: I64, kept: I64, state: ForwardState) -> Tensor:
        cos, sin = self._angles(state)
        threads, few = torch.get_num_threads(), self._few
        if state.decode and few is not None and few.takes(tokens, kept):
            split = state.polled
            if split is not None:
                split.begin(few.limits(state.lengths, state.arena.shape[2], threads), threads)
            now = turns.of_forward(self._turns, state, cos, sin, threads)
            logits = few(tokens, kept, now, threads, split, state.asking)
            for layer in self._parts.layers:
                state.send(layer.index)
            return logits
        if not state.decode or state.asking is not None or state.polled is not None:
            return self._layers(torch.from_numpy(tokens), padded(kept), cos, sin, state)
        now = turns.of_forward(self._turns, state, cos, sin, threads)
        return self._decode(torch.from_numpy(tokens), padded(kept), now, threads, state)

    def _angles(self, state: ForwardState) -> tuple[Tensor, Tensor]:
        positions = torch.from_numpy(state.positions)[None]
        cos, sin = self._parts.rotary(self._parts.embedding.weight, positions)
        return cos[0].contiguous(), sin[0].contiguous()

    def _layers(self, tokens: Tensor, kept: Tensor, cos: Tensor, sin: Tensor, state: ForwardState) -> Tensor:
        parts = self._parts
        x = parts.embedding(tokens)
        runs = 1 if state.polled is None else state.polled.runs(len(x))
        for layer in parts.layers[:-1]:
            x = layer.prefill(x, cos, sin, state, runs=runs)
        x = parts.layers[-1].prefill(x, cos, sin, state, kept, runs)
        x = parts.norm(x)
        state.poll()
        logits: Tensor = parts.head(x)
        state.poll()
        return logits

    def _decode(
        self, tokens: Tensor, kept: Tensor, now: turns.Turns, threads: int, state: ForwardState
    ) -> Tensor:
        parts = self._parts
        x = parts.embedding(tokens)
        for i, layer in enumerate(parts.layers):
            qkv = layer.qkv(layer.before(x))
            mixed = torch.empty(len(x), layer.heads.q * layer.heads.size)
            turns.place(
                now[i : i + 1], qkv.data_ptr(), qkv.stride(0) * 4, mixed.data_ptr(), mixed.stride(0) * 4
            )
            attend_all.at(now[i : i + 1].ctypes.data, threads)
            state.send(layer.index)
            x = layer.finish(x, mixed)
        logits: Tensor = parts.head(parts.norm(x[kept]))
        return logits

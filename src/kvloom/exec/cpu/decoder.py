"""Fused decoders: models whose forward is one loop over kvloom's own layers. They are found by their
structure and proved on input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvloom.exec.adapters import LayerName
from kvloom.exec.attention import ForwardState, Scoring, filling, runs_of
from kvloom.exec.cpu.adapted import AdaptedRows
from kvloom.exec.cpu.fuse import FusedRMSNorm
from kvloom.exec.cpu.layer import (
    AttentionRecords,
    DecoderLayer,
    Heads,
    forward_records,
    model_records,
    set_addresses,
)
from kvloom.exec.cpu.linear import GatedMLP, HalfEmbedding, Linear, TiedLinear
from kvloom.exec.cpu.quantized import QuantizedEmbedding
from kvloom.exec.cpu.small_batch import Embedding, SmallBatchDecode
from kvloom.exec.fuse import MergedLinearPart
from kvloom.exec.gguf.blocks import MappedEmbedding
from kvloom.exec.parallel.slicing import Gathered, Summed
from kvloom.exec.widened import WidenedEmbedding
from kvloom.kernels.cpu.attention.decode import attend_all
from kvloom.types.geometry import I64, Geometry
from kvloom.types.job import ForwardPlan

Head = Linear | TiedLinear | Gathered
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_TABLE = 8192  # positions that are computed once; 8 MB for heads of 128


class _Angles:
    """Cos and sin by position, which a rotary module computes once for the positions that steps often ask
    for. If its result changes with the longest position of a call, the module is asked each time."""

    def __init__(self, rotary: Rotary, like: Tensor) -> None:
        self._rotary, self._like = rotary, like
        self._most = 0 if getattr(rotary, "rope_type", None) in ("dynamic", "longrope") else _TABLE
        self._table = self._computed(torch.arange(1))

    def __call__(self, positions: I64) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [N, R] of positions [N]."""
        index, end = torch.from_numpy(positions), int(positions.max()) + 1
        if end > self._most:
            return self._computed(index)
        cos, sin = self._table
        if end > len(cos):
            cos, sin = self._table = self._computed(torch.arange(min(self._most, 2 * end)))
        return cos.index_select(0, index), sin.index_select(0, index)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self._like, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts of a decoder that are fused."""

    embedding: Embedding
    rotary: Rotary  # transformers' own: x and positions [1, N] → cos and sin [1, N, R]
    layers: tuple[DecoderLayer, ...]
    norm: FusedRMSNorm
    head: Head


class FusedDecoder:
    """Runs a model layer by layer; a decode step of a small batch in one kernel, if the model has one."""

    def __init__(self, parts: DecoderParts, fill: Callable[[I64], Tensor]) -> None:
        """fill: makes a tensor of the values of a forward's rows."""
        self._parts = parts
        self._fill = fill
        self._records = model_records(parts.layers)
        heads = parts.layers[0].heads
        self._heads = heads.kv, heads.q // heads.kv
        self._angles = _Angles(parts.rotary, parts.norm.weight)  # whose number format they take
        self._small_batch = SmallBatchDecode.of(parts.embedding, parts.layers, parts.norm, parts.head)

    @property
    def shapes(self) -> dict[LayerName, tuple[int, int]]:
        """Outputs and inputs of the linear layers that adapters may change."""
        found: dict[LayerName, tuple[int, int]] = {}
        for layer in self._parts.layers:
            inner = layer.mlp.inner if isinstance(layer.mlp, Summed) else layer.mlp
            assert isinstance(inner, GatedMLP)
            o = layer.o.inner if isinstance(layer.o, Summed) else layer.o
            assert isinstance(o, Linear)
            for one, name in (
                (o, "o_proj"),
                (inner.gate, "gate_proj"),
                (inner.up, "up_proj"),
                (inner.down, "down_proj"),
            ):
                found[layer.index, name] = one.out_features, one.in_features
            heads, size = layer.heads, layer.qkv.in_features
            for name, count in (("q_proj", heads.q), ("k_proj", heads.kv), ("v_proj", heads.kv)):
                found[layer.index, name] = count * heads.size, size
        return found

    def __call__(
        self, tokens: I64, kept: I64, state: ForwardState, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """adapted: the adapters of the rows, if one has any."""
        small_batch = self._small_batch if state.decode else None
        if small_batch is not None and not small_batch.takes(tokens, kept):
            small_batch = None
        apart = state.remote is not None or state.polls is not None or adapted is not None
        if small_batch is None and (apart or not state.decode):
            return self._layers(tokens, kept, state, adapted)
        cos, sin = self._angles(state.positions)
        threads, runs = torch.get_num_threads(), runs_of(state.shared, *self._heads)
        records = forward_records(self._records, state, cos, sin, threads, runs)
        if small_batch is None:
            return self._decode(tokens, kept, records, threads, state)
        split = state.polls.split if state.polls else None
        if split is not None:
            split.begin(small_batch.limits(state.lengths, state.arena.shape[2], threads), threads)
        logits = small_batch(tokens, kept, records, threads, split, state.remote, adapted)
        for layer in self._parts.layers:
            state.send(layer.index)
        return logits

    def _layers(self, tokens: I64, kept: I64, state: ForwardState, adapted: AdaptedRows | None) -> Tensor:
        """Runs layer by layer, attention by `ForwardState.attend`."""
        parts, wanted = self._parts, self._fill(kept)
        x = parts.embedding(self._fill(tokens))
        cos, sin = self._angles(self._fill(state.positions).numpy())
        chunks = 1 if state.polls is None or adapted is not None else state.polls.split.runs(len(x))
        for layer in parts.layers[:-1]:
            x = layer.prefill(x, cos, sin, state, chunks=chunks, adapted=adapted)
        x = parts.layers[-1].prefill(x, cos, sin, state, wanted, chunks, adapted)
        x = parts.norm(x)
        state.poll()
        logits: Tensor = parts.head(x)
        state.poll()
        return logits

    def _decode(
        self, tokens: I64, kept: I64, records: AttentionRecords, threads: int, state: ForwardState
    ) -> Tensor:
        """Runs a decode step of a large batch layer by layer, each layer's attention with its writes in one
        kernel."""
        parts = self._parts
        x = parts.embedding(self._fill(tokens))
        for i, layer in enumerate(parts.layers):
            qkv = layer.qkv(layer.input_norm(x))
            attended = torch.empty(len(x), layer.heads.q * layer.heads.size)
            record = records[i : i + 1]
            set_addresses(record, qkv, attended)
            attend_all.at(record.ctypes.data, threads)
            attended[tokens.size :] = attended[tokens.size - 1]  # as `ForwardState.attend` does
            state.send(layer.index)
            x = layer.finish(x, attended)
        logits: Tensor = parts.head(parts.norm(x[self._fill(kept)]))
        return logits


_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_EMBEDDINGS = (nn.Embedding, WidenedEmbedding, HalfEmbedding, MappedEmbedding, QuantizedEmbedding)
_HEAD_NORMS = {"q_norm", "k_norm"}
_PROMPT, _STEPS = 9, 3
_AGREES = 1e-5


def fuse_decoder(
    module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
) -> FusedDecoder | None:
    """Returns the fused `module` as one decoder, or None if it has another structure or other logits.
    scorings: what each layer asked of attention."""
    parts = _find(module, scorings, geometry)
    if parts is None or not all(_layer_agrees(module, parts, i, geometry) for i in range(geometry.layers)):
        return None
    decoder = FusedDecoder(parts, filling(module.modules()))
    return decoder if _agrees(module, decoder, geometry) else None


def _plain(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the children of a module that has no weights of its own beside them."""
    return {} if module._parameters else dict(module.named_children())


def _find(module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry) -> DecoderParts | None:
    """Finds a backbone of embedding, rotary table, layers and norm, and a head."""
    ends = list(_plain(module).values())
    if len(ends) != 2 or not isinstance(ends[1], Head):
        return None
    inner = list(_plain(ends[0]).values())
    embeddings = [child for child in inner if isinstance(child, Embedding) and type(child) in _EMBEDDINGS]
    rows = [child for child in inner if isinstance(child, nn.ModuleList)]
    norms = [child for child in inner if isinstance(child, FusedRMSNorm)]
    rotaries = [child for child in inner if type(child).__name__.endswith("RotaryEmbedding")]
    if not len(embeddings) == len(rows) == len(norms) == len(rotaries) == len(inner) - 3 == 1:
        return None
    layers = [
        _layer(_plain(child), i, scorings[i], geometry) for i, child in enumerate(rows[0]) if i in scorings
    ]
    found = tuple(layer for layer in layers if layer is not None)
    if len(found) != geometry.layers:
        return None
    return DecoderParts(embeddings[0], rotaries[0], found, norms[0], ends[1])


def _layer(
    children: dict[str, nn.Module], index: int, scoring: Scoring, geometry: Geometry
) -> DecoderLayer | None:
    """Returns the layer of these fused children; None if some are of another kind."""
    if set(children) != _LAYER:
        return None
    input_norm, mlp_norm = children["input_layernorm"], children["post_attention_layernorm"]
    attention, mlp = _plain(children["self_attn"]), children["mlp"]
    if set(attention) - _HEAD_NORMS != _ATTENTION:
        return None
    q, o = attention["q_proj"], attention["o_proj"]
    head_norms = attention.get("q_norm"), attention.get("k_norm")
    if not (
        isinstance(input_norm, FusedRMSNorm)
        and isinstance(mlp_norm, FusedRMSNorm)
        and isinstance(mlp, GatedMLP | Summed)
        and isinstance(getattr(mlp, "inner", mlp), GatedMLP)
        and isinstance(q, MergedLinearPart)
        and isinstance(q.product, Linear)
        and isinstance(o, Linear | Summed)
        and isinstance(getattr(o, "inner", o), Linear)
    ):
        return None
    size, kv = geometry.head_dim, geometry.kv_heads
    heads = _heads(o.in_features // size, kv, size, *head_norms)
    if heads is None or q.product.out_features != (heads.q + 2 * kv) * size:
        return None
    return DecoderLayer(index, input_norm, q.product, heads, scoring, o, mlp_norm, mlp)


def _heads(q: int, kv: int, size: int, q_norm: nn.Module | None, k_norm: nn.Module | None) -> Heads | None:
    """Returns the heads; None if their norms differ, or are not of one head each."""
    if q_norm is None and k_norm is None:
        return Heads(q, kv, size)
    if not (isinstance(q_norm, FusedRMSNorm) and isinstance(k_norm, FusedRMSNorm)):
        return None
    if not q_norm.weight.shape == k_norm.weight.shape == (size,):
        return None  # a norm over all heads at once
    alike = q_norm.eps == k_norm.eps and q_norm.offset == k_norm.offset
    return Heads(q, kv, size, q_norm, k_norm) if alike else None


class _Probe:
    """An arena of one sequence, for the forwards that the proof needs."""

    def __init__(self, geometry: Geometry) -> None:
        self.tokens = geometry.tokens_per_block
        self.pages = -(-(_PROMPT + _STEPS) // self.tokens)
        blocks = self.pages * geometry.blocks_per_page
        self.arena = torch.zeros(blocks, 2, self.tokens, geometry.head_dim)
        shape = (self.pages, geometry.layers, geometry.kv_heads)
        self.map = np.arange(blocks, dtype=np.int32).reshape(shape)

    def state(self, start: int, count: int) -> ForwardState:
        positions = np.arange(start, start + count)
        slots = positions.astype(np.int32)
        plan = ForwardPlan(
            model="",
            sequences=(0,),
            appends=np.array([count]),
            starts=np.array([start]),
            page_map=self.map,
            tables=np.arange(self.pages, dtype=np.int32)[None],
            positions=positions,
            slot_page=slots // np.int32(self.tokens),
            slot_offset=slots % np.int32(self.tokens),
        )
        return ForwardState(plan, self.arena)


def _layer_agrees(module: nn.Module, parts: DecoderParts, index: int, geometry: Geometry) -> bool:
    """Compares a layer with the stock one on random input, which shows a bound or a factor that hides in the
    logits."""
    backbone = next(iter(_plain(module).values()))
    stock: Any = next(child for child in backbone.children() if isinstance(child, nn.ModuleList))[index]
    x = 3 * torch.randn(1, _PROMPT, len(parts.norm.weight), generator=torch.Generator().manual_seed(0))
    probe = _Probe(geometry)
    with torch.inference_mode():
        turn = parts.rotary(x, torch.arange(_PROMPT)[None])
        try:
            expected = stock(x, position_embeddings=turn, kv=probe.state(0, _PROMPT))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # it wants to be called otherwise
        found = parts.layers[index].prefill(x[0], turn[0][0], turn[1][0], probe.state(0, _PROMPT))
    return isinstance(expected, Tensor) and _close(found, expected[0])


def _agrees(module: Any, decoder: FusedDecoder, geometry: Geometry) -> bool:
    """Compares logits over a prompt and three single tokens, with all rows kept."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(module.config.vocab_size, (_PROMPT + _STEPS,), generator=generator)
    ours, theirs = _Probe(geometry), _Probe(geometry)
    edges = [0, *range(_PROMPT, _PROMPT + _STEPS + 1)]
    with torch.inference_mode():
        expected = module(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            kv=theirs.state(0, len(ids)),
        ).logits[0]
        found = [
            decoder(ids[a:b].numpy(), np.arange(b - a), ours.state(a, b - a)) for a, b in pairwise(edges)
        ]
    rows = torch.cat([logits[: b - a] for logits, (a, b) in zip(found, pairwise(edges), strict=True)])
    return _close(rows, expected)


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= _AGREES * expected.abs().max()
    )

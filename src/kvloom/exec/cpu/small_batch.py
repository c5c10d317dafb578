"""Decode steps of small batches: the whole model in one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from kvloom.exec.cpu.adapted import AdaptedRows
from kvloom.exec.cpu.fuse import FusedRMSNorm
from kvloom.exec.cpu.layer import AttentionRecords, DecoderLayer, set_addresses
from kvloom.exec.cpu.linear import GatedMLP, HalfEmbedding, Linear, Stage, TiedLinear, stage_of
from kvloom.exec.cpu.quantized import QuantizedEmbedding
from kvloom.exec.gguf.blocks import MappedEmbedding
from kvloom.exec.parallel.slicing import Gathered, Summed
from kvloom.kernels.cpu.attention.tile import TILE
from kvloom.kernels.cpu.decode_step import ARRIVALS, COUNTERS, STAGES, LayerArguments, StepArguments, step
from kvloom.kernels.cpu.half import FORMATS
from kvloom.kernels.cpu.panels import PANEL
from kvloom.kernels.cpu.products import GELU, QUANTIZED, SWISH
from kvloom.offload.cpu.attention import RemoteAttention
from kvloom.offload.cpu.attention_server import OperatorSplit
from kvloom.types.geometry import I64

SMALL_BATCH_ROWS = 96  # more are faster by oneDNN's products, layer by layer
_UP = 3  # the number of `up` in a layer's products; it is in one stage with `gate` before it
_KINDS = {"silu": SWISH, "gelu_tanh": GELU}


Embedding = nn.Embedding | HalfEmbedding | MappedEmbedding | QuantizedEmbedding


class SmallBatchDecode:
    """Holds the addresses of all weights, made once; a call adds one forward's buffers and runs the
    kernel."""

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        mlps: Sequence[GatedMLP],
        norm: FusedRMSNorm,
        head: Linear | TiedLinear,
        stages: Sequence[Stage],
    ) -> None:
        """mlps: the layers' own. stages: four a layer, in the order of LayerArguments, and the head's if it
        has panels."""
        self._alive = (embedding, layers, norm, head, stages)
        self._mapped = embedding if isinstance(embedding, MappedEmbedding) else None
        weights = [one for stage in stages for one in stage.weights]
        fields = [one for stage in stages for one in stage.fields]
        self._size, first = len(norm.weight), layers[0]
        self._vocab = head.weight.shape[0] if isinstance(head, TiedLinear) else head.out_features
        self._widths = (weights[0].count * PANEL, first.heads.q * first.heads.size, weights[2].count * PANEL)
        self._panels = [
            tuple(one.count for i, one in enumerate(weights[5 * layer : 5 * layer + 5]) if i != _UP)
            for layer in range(len(layers))
        ]
        self._windows = [layer.scoring.window for layer in layers]
        self._layers = (LayerArguments * len(layers))(
            *(
                LayerArguments(
                    _norm(layer.input_norm),
                    _norm(layer.mlp_norm),
                    *fields[5 * i : 5 * i + 5],
                    _KINDS[mlp.activation],
                )
                for i, (layer, mlp) in enumerate(zip(layers, mlps, strict=True))
            )
        )
        self._model = StepArguments(
            layers=ctypes.addressof(self._layers),
            depth=len(layers),
            size=self._size,
            **_embedding(embedding),
            plain=head.weight.data_ptr() if isinstance(head, TiedLinear) else 0,
            vocab=self._vocab,
            norm=_norm(norm),
            head=fields[-1],
            ready_row=max(stage.ready_bytes for stage in stages),
        )

    @classmethod
    def of(
        cls,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: FusedRMSNorm,
        head: Linear | TiedLinear | Gathered,
    ) -> SmallBatchDecode | None:
        """Returns the step; None if the kernel lacks the activation, cannot read the packed weights, or would
        have to wait for other ranks."""
        if isinstance(head, Gathered):
            return None
        inputs: list[tuple[Linear, ...]] = []
        mlps: list[GatedMLP] = []
        for layer in layers:
            if isinstance(layer.o, Summed) or isinstance(layer.mlp, Summed):
                return None
            if layer.mlp.activation not in _KINDS:
                return None
            mlps.append(layer.mlp)
            mlp = layer.mlp
            inputs += ((layer.qkv,), (layer.o,), (mlp.gate, mlp.up), (mlp.down,))
        if isinstance(head, Linear):
            inputs.append((head,))
        stages = [found for linears in inputs if (found := stage_of(linears))]
        return cls(embedding, layers, mlps, norm, head, stages) if len(stages) == len(inputs) else None

    def takes(self, tokens: I64, kept: I64) -> bool:
        """Returns whether the batch is small enough."""
        return max(tokens.size, kept.size) <= SMALL_BATCH_ROWS

    def limits(self, lengths: Tensor, page_tokens: int, threads: int) -> list[int]:
        """Returns into how many parts the operators of a step can be split at most, stage by stage: panels of
        a product, tiles of tokens of attention over lengths [B]; of those of one thread."""
        tile = min(TILE, page_tokens)
        tiles = {
            window: int(((lengths.clamp(max=window) if window else lengths) + (tile - 1)).div_(
                tile, rounding_mode="floor"
            ).sum())
            for window in set(self._windows)
        }  # fmt: skip
        most = list[int]()
        for (qkv, o, gate, down), window in zip(self._panels, self._windows, strict=True):
            most += (qkv, tiles[window], o, gate, down)
        most.append(-(-self._vocab // PANEL))
        return [max(1, one // threads) for one in most]

    def __call__(
        self,
        tokens: I64,
        kept: I64,
        records: AttentionRecords,
        threads: int,
        split: OperatorSplit | None = None,
        remote: RemoteAttention | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """Takes tokens [B], kept [R] and the attention's `records` of this forward and returns logits [R, V].
        split: says when to look for others' tasks, and was told of this step's limits. remote: attends for
        the last rows, which are not in `records`. adapted: the adapters of the rows."""
        rows, wide = len(tokens), -(-self._size // PANEL) * PANEL
        x, qkv, attended, inner = (torch.empty(rows, width) for width in (wide, *self._widths))
        if self._mapped is not None:
            x[:, : self._size] = self._mapped(torch.from_numpy(tokens))
        logits = torch.empty(len(kept), -(-self._vocab // PANEL) * PANEL)
        counters = np.zeros((2 + STAGES * len(records)) * COUNTERS, np.int64)
        set_addresses(records, qkv, attended)
        ids, places = tokens.astype(np.int32), kept.astype(np.int32)
        call = StepArguments.from_buffer_copy(self._model)
        call.counters, call.attention, call.rows = counters.ctypes.data, records.ctypes.data, rows
        call.tokens, call.kept, call.kept_rows = ids.ctypes.data, places.ctypes.data, len(places)
        call.x, call.x_row = x.data_ptr(), wide * 4
        call.qkv, call.qkv_row = qkv.data_ptr(), qkv.stride(0) * 4
        call.attended, call.attended_row = attended.data_ptr(), attended.stride(0) * 4
        call.inner, call.inner_row = inner.data_ptr(), inner.stride(0) * 4
        call.logits, call.logits_row = logits.data_ptr(), logits.stride(0) * 4
        if split is not None:
            call.poll, call.threads = split.address, threads
            call.parts, call.ends = split.parts.ctypes.data, split.ends.ctypes.data
        adapters = None if adapted is None else adapted.arguments(threads)
        call.adapted = 0 if adapters is None else adapters.address
        if remote is not None:
            call.ask = remote.enter()
        step(call, threads)
        while remote is not None and remote.paused:
            remote.resume(qkv, attended, records)
            counters[ARRIVALS // 8] = 0
            step(call, threads)
        if remote is not None:
            remote.leave(len(records))
        if split is not None:
            split.end()
        return logits[:, : self._vocab]


def _norm(norm: FusedRMSNorm) -> tuple[int, float, float]:
    """Returns the values of NormArguments."""
    return norm.weight.data_ptr(), norm.eps, norm.offset


def _embedding(embedding: Embedding) -> dict[str, int]:
    """Returns the fields of StepArguments that are of the embedding; none if the host looks up rows of a
    mapped file."""
    if isinstance(embedding, MappedEmbedding):
        return {}
    if isinstance(embedding, QuantizedEmbedding):
        return {"embedding": ctypes.addressof(embedding.panels.record), "embedding_form": QUANTIZED}
    if isinstance(embedding, HalfEmbedding):
        panels = embedding.panels
        return {"embedding": panels.address, "embedding_form": panels.form, "embedding_panel": panels.stride}
    weight = embedding.weight
    return {"embedding": weight.data_ptr(), "embedding_form": FORMATS[weight.dtype]}

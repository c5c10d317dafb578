"""A decoder layer of fused parts, and the records by which kernels attend in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState, Scoring, padded_rows
from kvloom.exec.cpu.adapted import DOWN, GATED, QKV, AdaptedRows, O
from kvloom.exec.cpu.fuse import FusedRMSNorm
from kvloom.exec.cpu.linear import GatedMLP, Linear, Poll, no_poll
from kvloom.exec.parallel.slicing import Summed
from kvloom.kernels import reference
from kvloom.kernels.cpu import rotate
from kvloom.kernels.cpu.attention.decode import AttentionArguments, addresses_of, span_of, span_of_runs
from kvloom.kernels.cpu.attention.runs import RowRuns
from kvloom.kernels.cpu.kv_rows import KINDS


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of attention: q heads over kv heads, `size` numbers each, and the norms of a head of q and of
    k, if any."""

    q: int
    kv: int
    size: int
    q_norm: FusedRMSNorm | None = None
    k_norm: FusedRMSNorm | None = None

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the fused product [N, (q + 2 kv) · size] into q, k, v, each [N, heads, size], q and k
        rotated."""
        heads = qkv.view(len(qkv), -1, self.size)
        q, k, v = heads.tensor_split((self.q, self.q + self.kv), 1)
        if self.q_norm is None or self.k_norm is None:
            rotate(heads[:, : self.q + self.kv], cos, sin)
            return q, k, v
        q, k = self.q_norm(q), self.k_norm(k)
        rotate(q, cos, sin)
        rotate(k, cos, sin)
        return q, k, v


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Computes x + o(attention(qkv(input_norm(x)))), and to that, y, adds mlp(mlp_norm(y))."""

    index: int
    input_norm: FusedRMSNorm
    qkv: Linear
    heads: Heads
    scoring: Scoring
    o: Linear | Summed
    mlp_norm: FusedRMSNorm
    mlp: GatedMLP | Summed

    def prefill(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        state: ForwardState,
        kept: Tensor | None = None,
        chunks: int = 1,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """Takes x [N, H] and returns [N, H], or its rows `kept` alone: after the last layer's K and V nobody
        needs others. chunks: the number of chunks of rows into which products are cut, so that others
        wait less; 1 if rows have adapters."""
        if chunks > 1:
            return self._in_chunks(x, cos, sin, state, kept, chunks)
        normal = self.input_norm(x)
        qkv = self.qkv(normal)
        if adapted is not None:
            adapted.add(self.index, QKV, normal, (qkv,))
        attended = state.attend(self.index, *self.heads.split(qkv, cos, sin), self.scoring).flatten(1)
        if kept is not None:
            x, attended = x[kept], attended[kept]
            adapted = adapted and adapted.taken(kept)
        if adapted is not None:
            return self._adapt(x, attended, adapted)
        return self.finish(x, attended, state.poll)

    def _in_chunks(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: ForwardState, kept: Tensor | None, chunks: int
    ) -> Tensor:
        products, most = [], padded_rows(-(-len(x) // chunks))
        for rows in _cut(x, most):
            products.append(self.qkv(self.input_norm(rows)))
            state.poll()
        heads = self.heads.split(torch.cat(products), cos, sin)
        attended = state.attend(self.index, *heads, self.scoring).flatten(1)
        if kept is not None:
            return self.finish(x[kept], attended[kept], state.poll)
        parts = zip(_cut(x, most), _cut(attended, most), strict=True)
        return torch.cat([self.finish(*rows, state.poll) for rows in parts])

    def finish(self, x: Tensor, attended: Tensor, poll: Poll = no_poll) -> Tensor:
        """Computes what comes after attention's output `attended` [N, q · size]. poll: called after each
        product."""
        x = self.o.onto(attended, x)
        poll()
        x = self.mlp.onto(self.mlp_norm(x), x, poll)
        poll()
        return x

    def _adapt(self, x: Tensor, attended: Tensor, adapted: AdaptedRows) -> Tensor:
        """Does what `finish` does, for rows that have adapters."""
        mlp = self.mlp
        assert isinstance(mlp, GatedMLP), "ranks serve no adapters"
        x = self.o.onto(attended, x)
        adapted.add(self.index, O, attended, (x,))
        normal = self.mlp_norm(x)
        gates, ups = mlp.gate(normal), mlp.up(normal)
        adapted.add(self.index, GATED, normal, (gates, ups))
        inner = reference.activate(gates, mlp.activation).mul_(ups)
        x = mlp.down.onto(inner, x)
        adapted.add(self.index, DOWN, inner, (x,))
        return x


def _cut(x: Tensor, most: int) -> list[Tensor]:
    """Returns the rows of x in pieces of so many, of which the last may be shorter."""
    return [x[begin : begin + most] for begin in range(0, len(x), most)]


_RECORD = np.dtype(AttentionArguments)
_SHARED = "order", "runs", "run_count", "segments", "longest"
AttentionRecords = npt.NDArray[Any]


def model_records(layers: Sequence[DecoderLayer]) -> AttentionRecords:
    """Returns [layers] records with what the model itself decides. `map` is the layer's offset in the map's
    rows."""
    records = np.zeros(len(layers), _RECORD)
    for record, layer in zip(records, layers, strict=True):
        form, heads = layer.scoring, layer.heads
        record["head_dim"], record["kv_heads"], record["group"] = heads.size, heads.kv, heads.q // heads.kv
        record["scale"], record["window"], record["softcap"] = form.scale, form.window, form.softcap
        record["map"], record["map_page"] = layer.index * heads.kv * 4, len(layers) * heads.kv * 4
        record["q_head"] = record["out_head"] = heads.size * 4
        if heads.q_norm is not None and heads.k_norm is not None:
            record["q_norm"], record["k_norm"] = (
                heads.q_norm.weight.data_ptr(),
                heads.k_norm.weight.data_ptr(),
            )
            record["eps"], record["offset"] = heads.q_norm.eps, heads.q_norm.offset
    return records


def forward_records(
    fixed: AttentionRecords,
    state: ForwardState,
    cos: Tensor,
    sin: Tensor,
    threads: int,
    runs: RowRuns | None = None,
) -> AttentionRecords:
    """Returns the records of one forward; cos, sin [N, R]. The caller adds the addresses of q, k, v and out,
    and keeps `runs`."""
    records = fixed.copy()
    arena = state.arena
    records["arena"], records["block_bytes"] = arena.data_ptr(), arena.stride(0) * arena.itemsize
    records["page_tokens"], records["row_bytes"] = arena.shape[2], arena.shape[3] * arena.itemsize
    records["kind"] = KINDS[arena.dtype]
    records["map"] += state.page_map.data_ptr()
    records["tables"], records["table_row"] = state.tables.data_ptr(), state.tables.stride(0) * 4
    records["lengths"], records["batch"] = state.lengths.data_ptr(), len(state.lengths)
    records["slot_page"], records["slot_offset"] = state.slot_page.data_ptr(), state.slot_offset.data_ptr()
    records["cos"], records["sin"] = cos.data_ptr(), sin.data_ptr()
    records["rotary_dim"], records["rotary_row"] = cos.shape[1], cos.stride(0) * 4
    kv_heads, group = int(fixed["kv_heads"][0]), int(fixed["group"][0])
    span = span_of(len(state.lengths), kv_heads, threads)
    if runs is not None:
        span = span_of_runs(runs, kv_heads, group, threads)
        for name, value in zip(_SHARED, addresses_of(runs), strict=True):
            records[name] = value
    records["span"], records["spans"] = span, -(-kv_heads // span)
    return records


def set_addresses(records: AttentionRecords, qkv: Tensor, out: Tensor) -> None:
    """Sets the addresses of the fused product's rows, q's heads first, then k's and v's, and of the
    output's. Both are float32; the caller keeps them."""
    q, head = qkv.data_ptr(), records["q_head"]
    k = q + records["kv_heads"] * records["group"] * head
    records["q"], records["k"], records["v"] = q, k, k + records["kv_heads"] * head
    records["q_row"] = qkv.stride(0) * 4
    records["out"], records["out_row"] = out.data_ptr(), out.stride(0) * 4

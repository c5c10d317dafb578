"""A decoder layer as one straight call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.kernels.cpu import rotate
from kvloom.model.attention import ForwardState, Scoring
from kvloom.model.linear import Between, GatedMLP, PackedLinear, at_once
from kvloom.model.norm import FusedRMSNorm
from kvloom.model.parallel.modules import Summed


@dataclass(frozen=True, slots=True)
class Heads:
    """q heads of attention over kv heads, `size` numbers each; the norms of a head of q and of k, if any."""

    q: int
    kv: int
    size: int
    q_norm: FusedRMSNorm | None = None
    k_norm: FusedRMSNorm | None = None

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fused product [N, (q + 2 kv) · size] → q, k, v, each [N, heads, size], q and k rotated."""
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
    """x + o(attention(qkv(before(x)))), and to that the gated MLP of its own norm."""

    index: int
    before: FusedRMSNorm
    qkv: PackedLinear
    heads: Heads
    scoring: Scoring
    o: PackedLinear | Summed
    between: FusedRMSNorm
    mlp: GatedMLP

    def prefill(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        state: ForwardState,
        kept: Tensor | None = None,
        runs: int = 1,
    ) -> Tensor:
        """x [N, H] → [N, H], or its rows `kept` alone: after the last layer's K and V nobody needs others.
        runs: of rows, one after the other, into which products are cut, so that others wait less."""
        if runs > 1:
            return self._in_runs(x, cos, sin, state, kept, runs)
        qkv = self.qkv(self.before(x))
        mixed = state.attend(self.index, *self.heads.split(qkv, cos, sin), self.scoring).flatten(1)
        if kept is not None:
            x, mixed = x[kept], mixed[kept]
        return self.finish(x, mixed, state.poll)

    def _in_runs(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: ForwardState, kept: Tensor | None, runs: int
    ) -> Tensor:
        products = []
        for rows in x.tensor_split(runs):
            products.append(self.qkv(self.before(rows)))
            state.poll()
        heads = self.heads.split(torch.cat(products), cos, sin)
        mixed = state.attend(self.index, *heads, self.scoring).flatten(1)
        if kept is not None:
            return self.finish(x[kept], mixed[kept], state.poll)
        parts = zip(x.tensor_split(runs), mixed.tensor_split(runs), strict=True)
        return torch.cat([self.finish(*rows, state.poll) for rows in parts])

    def finish(self, x: Tensor, mixed: Tensor, between: Between = at_once) -> Tensor:
        """What comes after attention's output mixed [N, q · size]. between: called after each product."""
        x = self.o.onto(mixed, x)
        between()
        x = self.mlp.onto(self.between(x), x, between)
        between()
        return x

"""From logits to a drawn token in torch's own operations, on any device and without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """logits [R, V] → ids [R], by inverting the cumulative distribution over tokens from most to least
    likely. u [R] float64, in [0, 1), is where.

    Filters apply in the order temperature, top-k (0: none), top-p, min-p, each [R]. A row without a possible
    token gives any one: it must not fail its neighbours.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    probs = ((order.values - order.values[:, :1]) / temperature[:, None].clamp_min(1e-5)).softmax(-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    probs = probs.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    probs = probs.masked_fill(probs < min_p[:, None] * probs[:, :1], 0.0).double()
    total = probs.cumsum(-1)
    place = torch.searchsorted(total, u[:, None] * total[:, -1:], right=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1  # a draw at the very edge must not leave the kept tokens
    ids: Tensor = order.indices.gather(-1, torch.minimum(place, last).clamp_min(0))[:, 0]
    return ids

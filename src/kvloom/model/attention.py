"""Our attention, as transformers' AttentionInterface calls it: write the new K and V, attend over the pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kvloom.core.errors import ConfigError
from kvloom.core.plan import PageCopy, PageSend, Plan
from kvloom.kernels import cpu, reference

NAME = "kvloom"
_KNOWN = {"dropout", "position_ids", "kv", "is_causal"}  # asked for, and harmless to leave out


@dataclass(slots=True)
class ForwardState:
    """One forward of one model over the arena; made from its plan once for all layers.

    arena: [blocks, 2, T, D]; page_map: [pages, layers, heads]. [0, start) of each sequence is valid before
    the layer, [0, start + append) after its write.
    """

    plan: Plan
    arena: Tensor
    threads: int
    page_map: Tensor = field(init=False)
    decode: bool = field(init=False)
    tables: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    slot_page: Tensor = field(init=False)
    slot_offset: Tensor = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.decode = bool((plan.appends == 1).all())
        self.page_map = torch.from_numpy(plan.page_map)
        self.tables = torch.from_numpy(plan.tables)
        self.lengths = torch.from_numpy((plan.starts + plan.appends).astype("int32"))
        self.slot_page = torch.from_numpy(plan.slot_page)
        self.slot_offset = torch.from_numpy(plan.slot_offset)

    @property
    def native(self) -> bool:
        """True where the compiled kernels take this arena; the plain twins take any."""
        return self.arena.dtype == torch.float32 and self.arena.device.type == "cpu"

    def copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy on write, all layers at once."""
        for copy in copies:
            source, target = self.page_map[copy.source].flatten(), self.page_map[copy.target].flatten()
            self.arena[target, :, : copy.tokens] = self.arena[source, :, : copy.tokens]

    def send(self, layer: int, sends: tuple[PageSend, ...]) -> None:
        """Pass on this layer's tokens to receivers in the same arena."""
        for item in sends:
            source, target = self.page_map[item.source, layer], self.page_map[item.target, layer]
            begin, into, count = item.source_offset, item.target_offset, item.tokens
            self.arena[target, :, into : into + count] = self.arena[source, :, begin : begin + count]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float
    ) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] of the new tokens → [N, Hq, D]. window, softcap: 0 for none."""
        kernels: Any = cpu if self.native else reference
        extra = {"threads": self.threads} if self.native else {}
        kernels.write_kv(self.arena, self.page_map, layer, k, v, self.slot_page, self.slot_offset, **extra)
        if self.plan.sends:
            self.send(layer, self.plan.sends)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.decode:
            kernels.decode_attention(
                out, q, self.arena, self.page_map, layer, self.tables, self.lengths, scale, window, softcap, **extra
            )
        else:
            self._prefill(out, layer, q, k, v, scale, window, softcap)
        return out

    def _prefill(
        self, out: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
    ) -> None:
        begin = 0
        for i, (start, count) in enumerate(zip(self.plan.starts.tolist(), self.plan.appends.tolist(), strict=True)):
            new = slice(begin, begin + count)
            first = 0
            keys, values = k[new].transpose(0, 1), v[new].transpose(0, 1)
            if start:
                first = max(0, start - window + 1) if window else 0
                keys, values, first = self._gather(layer, i, first, start + count)
            out[new] = attend_dense(
                q[new].transpose(0, 1), keys, values, start - first, scale=scale, window=window, softcap=softcap
            ).transpose(0, 1)
            begin += count

    def _gather(self, layer: int, i: int, first: int, end: int) -> tuple[Tensor, Tensor, int]:
        """K and V [Hkv, end − first', D] of sequence i from the page that holds `first` on; first' is that
        page's first position."""
        tokens = self.arena.shape[2]
        low = first // tokens
        pages = self.tables[i, low : -(-end // tokens)]
        blocks = self.arena[self.page_map[pages, layer]]  # [P, Hkv, 2, T, D]
        both = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : end - low * tokens]
        return both[0], both[1], low * tokens


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, offset: int, *, scale: float, window: int, softcap: float
) -> Tensor:
    """Causal attention of q [Hq, n, D], at positions offset…offset+n−1, over k and v [Hkv, L, D]."""
    n, length = q.shape[1], k.shape[1]
    simple = not softcap and offset == 0 and not (window and window < n)
    mask = None
    if not simple:
        ahead = torch.arange(offset, offset + n)[:, None] - torch.arange(length)
        mask = (ahead >= 0) & (ahead < window) if window else ahead >= 0
    if not softcap:
        grouped = q.shape[0] != k.shape[0]
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=simple, scale=scale, enable_gqa=grouped
        )[0]
    group = q.shape[0] // k.shape[0]
    scores = q.unflatten(0, (-1, group)) @ k[:, None].transpose(-1, -2) * scale
    scores = torch.tanh(scores / softcap) * softcap
    assert mask is not None
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(v.dtype)
    return (weights @ v[:, None]).flatten(0, 1)


def kvloom_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, N, D], key and value [1, Hkv, N, D] → [1, N, Hq, D]. `kv` is the ForwardState, or the
    loader's observer, which has the same `attend`."""
    state: ForwardState = kwargs["kv"]
    strange = sorted(name for name, given in kwargs.items() if name not in _KNOWN and given)
    if strange or attention_mask is not None:
        raise ConfigError(f"its attention asks for {', '.join(strange) or 'a mask'}, which kvloom does not have")
    out = state.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out[None], None


AttentionInterface.register(NAME, kvloom_attention)

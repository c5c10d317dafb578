"""One forward of one model over the arena on a device, as transformers' layers see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvloom.model.attention import Scoring
from kvloom.model.gpu.operations import Operations


@dataclass(frozen=True, slots=True)
class Places:
    """Where a forward's tokens are: arena [blocks, 2, T, D]; page_map [pages, layers, kv_heads], tables [B,
    P], slot_page and slot_offset [N], int32, as a plan says. A slot of page −1 is written nowhere."""

    arena: Tensor
    page_map: Tensor
    tables: Tensor
    slot_page: Tensor
    slot_offset: Tensor


class _State:
    """What `kvloom_attention` calls: `attend` writes K and V of the new tokens, and attends over the
    pages."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        written: Callable[[int], None],
        poll: Callable[[], None],
    ) -> None:
        """written: called after each layer's write, on whose stream it is. poll: called after each layer's
        attention, where others may have something to do."""
        self._operations = operations
        self._places = places
        self._written = written
        self._poll = poll

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] of the new tokens → [N, Hq, D]."""
        places = self._places
        self._operations.write_kv(
            places.arena, places.page_map, layer, k, v, places.slot_page, places.slot_offset
        )
        self._written(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._over_pages(out, layer, q, scoring)
        self._poll()
        return out

    def _over_pages(self, out: Tensor, layer: int, q: Tensor, scoring: Scoring) -> None:
        raise NotImplementedError


class DecodeState(_State):
    """One new token a sequence. lengths: [B] int32, the new token counted; 0 for a row that is padding."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        lengths: Tensor,
        multiprocessors: int,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(operations, places, lambda layer: None, poll)
        self._lengths = lengths
        self._multiprocessors = multiprocessors
        self._workspace: Any = None

    def _over_pages(self, out: Tensor, layer: int, q: Tensor, scoring: Scoring) -> None:
        places = self._places
        if self._workspace is None:  # of all layers, one after the other
            (batch, heads, head_dim), kv_heads = q.shape, places.page_map.shape[2]
            longest = places.tables.shape[1] * places.arena.shape[2]
            self._workspace = self._operations.workspace(
                batch, heads, kv_heads, head_dim, self._multiprocessors, longest, q.device
            )
        self._operations.decode_attention(
            out, q, places.arena, places.page_map, layer, places.tables, self._lengths,
            scoring.scale, scoring.window, scoring.softcap, workspace=self._workspace,
        )  # fmt: skip


class PrefillState(_State):
    """starts: [B] tokens that each sequence has; begins: [B + 1] rows; both int32."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        starts: Tensor,
        begins: Tensor,
        written: Callable[[int], None] = lambda layer: None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(operations, places, written, poll)
        self._starts = starts
        self._begins = begins

    def _over_pages(self, out: Tensor, layer: int, q: Tensor, scoring: Scoring) -> None:
        places = self._places
        self._operations.prefill_attention(
            out, q, places.arena, places.page_map, layer, places.tables, self._starts, self._begins,
            scoring.scale, scoring.window, scoring.softcap,
        )  # fmt: skip

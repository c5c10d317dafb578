"""A model on the device: its weights, its view of the arena, and one forward of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kvloom.core.arrays import AnyArray
from kvloom.core.geometry import Geometry
from kvloom.core.plan import PageCopy
from kvloom.core.request import ModelCard
from kvloom.kv.arena import Store
from kvloom.model.gpu.operations import Operations
from kvloom.model.gpu.page_map import DevicePageMap
from kvloom.model.gpu.staging import Sent
from kvloom.model.gpu.state import DecodeState, PrefillState
from kvloom.model.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """heads: of q, in all layers; 0 where they differ. arena: [blocks, 2, T, D], as this model sees `memory`,
    the pool's bytes."""

    module: Any
    geometry: Geometry
    card: ModelCard
    heads: int
    operations: Operations
    memory: Tensor
    arena: Tensor
    page_map: DevicePageMap

    @classmethod
    def place(cls, loaded: LoadedModel, store: Store, operations: Operations) -> DeviceModel:
        geometry, device = loaded.geometry, store.bytes.device
        pages = store.blocks // geometry.blocks_per_page
        view = store.view(geometry.head_dim, loaded.dtype)
        page_map = DevicePageMap(geometry, pages, device)
        form = geometry, loaded.card, loaded.heads
        return cls(loaded.module, *form, operations, store.bytes, view, page_map)

    def logits(
        self, tokens: Tensor, positions: Tensor, state: DecodeState | PrefillState, kept: Tensor | None = None
    ) -> Tensor:
        """tokens, positions [N] int64 → logits of the rows `kept`, or of all, [R, V]."""
        out: Tensor = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if kept is None else kept,
            kv=state,
        ).logits[0]
        return out

    def advance(self, sent: Sent, ids: Tensor) -> None:
        """A decode step's inputs become the next one's: ids [B] are what its first B rows have drawn."""
        names = ("tokens", "positions", "lengths", "slot_page", "slot_offset", "tables")
        self.operations.advance(ids, *(sent.arrays[name] for name in names), self.geometry.tokens_per_block)

    def copies(self, copies: tuple[PageCopy, ...]) -> dict[str, AnyArray]:
        """What `copy_pages` needs on the device."""
        lists = {
            "copy_sources": [copy.source for copy in copies],
            "copy_targets": [copy.target for copy in copies],
            "copy_counts": [copy.tokens for copy in copies],
        }
        return {name: np.asarray(values, dtype=np.int32) for name, values in lists.items()} if copies else {}

    def copy_pages(self, sent: Sent) -> None:
        """Copy on write, all layers at once."""
        if "copy_sources" not in sent.arrays:
            return
        lists = (sent.arrays[name] for name in ("copy_sources", "copy_targets", "copy_counts"))
        self.operations.copy_pages(
            self.memory,
            self.page_map.blocks,
            *lists,
            block_bytes=self.geometry.block_bytes,
            page_tokens=self.geometry.tokens_per_block,
            token_bytes=self.geometry.token_bytes // 2,
        )

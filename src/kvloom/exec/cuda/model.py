"""A model on the device: its weights, its view of the arena, and one forward of it."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.attention import Scoring
from kvloom.exec.cuda.device import PartitionLane, StreamEvent
from kvloom.exec.cuda.operations import Operations
from kvloom.exec.cuda.staging import SentInputs
from kvloom.exec.loader import LoadedModel
from kvloom.kernels.cuda.flash import HeadSequences
from kvloom.kv.arena import ArenaMemory
from kvloom.types.geometry import I64, AnyArray, Geometry
from kvloom.types.job import ForwardPlan, PageCopy
from kvloom.types.request import ModelCard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a forward's tokens, as a plan says. A slot of page −1 is written nowhere."""

    arena: Tensor  # [blocks, 2, T, D]
    page_map: Tensor  # [pages, layers, kv_heads] int32
    tables: Tensor  # [B, P] int32
    slot_page: Tensor  # [N] int32
    slot_offset: Tensor  # [N] int32


class _DeviceState(ABC):
    """The state that `kvloom_attention` calls: `attend` writes K and V of the new tokens, and attends over
    the pages, by FlashAttention if the operations have it and its tables have room for this batch."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        multiprocessors: int,
        written: Callable[[int], None],
        poll: Callable[[], None],
        sequences: int,
    ) -> None:
        """multiprocessors: those of the stream. written: called with each layer after its write, on the same
        stream. poll: called after each layer's attention, to look for tasks of other units. sequences: the
        number that FlashAttention would have for each KV head."""
        self._operations = operations
        self._places = places
        self._multiprocessors = multiprocessors
        self._written = written
        self._poll = poll
        (_, *blocks), pages, flash = places.page_map.shape, places.tables.shape[1], operations.flash
        fits = flash is not None and pages <= flash.widest(sequences, math.prod(blocks))
        self._flash = flash if fits else None
        self._heads: HeadSequences | None = None  # of all layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Takes q [N, Hq, D], k and v [N, Hkv, D] of the new tokens and returns [N, Hq, D]."""
        places = self._places
        self._operations.write_kv(
            places.arena, places.page_map, layer, k, v, places.slot_page, places.slot_offset
        )
        self._written(layer)
        form = scoring.scale, scoring.window, scoring.softcap
        if self._flash is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._over_pages(out, layer, q, *form)
        else:
            if self._heads is None:
                self._heads = self._head_sequences(len(q))
            given = q, places.arena, self._heads, layer, *form
            out = self._flash.attend(*given, multiprocessors=self._multiprocessors)
        self._poll()
        return out

    @abstractmethod
    def _over_pages(
        self, out: Tensor, layer: int, q: Tensor, scale: float, window: int, softcap: float
    ) -> None:
        """Attends by the kernels here, into `out`."""

    @abstractmethod
    def _head_sequences(self, rows: int) -> HeadSequences:
        """Returns the batch, which has so many rows of q, as FlashAttention takes it."""


class DecodeState(_DeviceState):
    """Attends for one new token a sequence. lengths: [B] int32, the new token counted; 0 for a row that is
    padding."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        lengths: Tensor,
        multiprocessors: int,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(operations, places, multiprocessors, lambda layer: None, poll, len(lengths))
        self._lengths = lengths
        self._workspaces: dict[int, Any] = {}  # of all layers with such a window, one after the other

    def _over_pages(
        self, out: Tensor, layer: int, q: Tensor, scale: float, window: int, softcap: float
    ) -> None:
        places = self._places
        if window not in self._workspaces:
            longest = places.tables.shape[1] * places.arena.shape[2]
            self._workspaces[window] = self._operations.workspace(
                q, self._lengths, places.page_map.shape[2], self._multiprocessors, longest, window
            )
        self._operations.decode_attention(
            out, q, places.arena, places.page_map, layer, places.tables, self._lengths,
            scale, window, softcap, workspace=self._workspaces[window],
        )  # fmt: skip

    def _head_sequences(self, rows: int) -> HeadSequences:
        places = self._places
        given = self._operations.block_tables, places.page_map, places.tables
        return HeadSequences.of_steps(*given, self._lengths, places.arena.shape[2])


class PrefillState(_DeviceState):
    """Attends for prompts. starts: [B], the tokens that each sequence has cached; cu_seqlens: [B + 1], the
    edges of the sequences' rows, which the kernels call `begins`; both int32."""

    def __init__(
        self,
        operations: Operations,
        places: Places,
        starts: Tensor,
        cu_seqlens: Tensor,
        multiprocessors: int,
        written: Callable[[int], None] = lambda layer: None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(operations, places, multiprocessors, written, poll, len(cu_seqlens))
        self._starts = starts
        self._cu_seqlens = cu_seqlens

    def _over_pages(
        self, out: Tensor, layer: int, q: Tensor, scale: float, window: int, softcap: float
    ) -> None:
        places = self._places
        self._operations.prefill_attention(
            out, q, places.arena, places.page_map, layer, places.tables, self._starts, self._cu_seqlens,
            scale, window, softcap,
        )  # fmt: skip

    def _head_sequences(self, rows: int) -> HeadSequences:
        places = self._places
        given = self._operations.block_tables, places.page_map, places.tables
        return HeadSequences.of_prompts(*given, self._starts, self._cu_seqlens, rows, places.arena.shape[2])


Send = Callable[[Mapping[str, AnyArray]], SentInputs]


class DevicePageMap:
    """The page map on the device. A row that has changed travels with the job that is the first to need it;
    jobs on other lanes wait for that copy, and for nothing else."""

    def __init__(self, geometry: Geometry, pages: int, device: torch.device) -> None:
        shape = (pages, geometry.layers, geometry.kv_heads)
        self.blocks = torch.zeros(shape, dtype=torch.int32, device=device)  # [pages, layers, kv_heads]
        self._versions: I64 = np.full(pages, -1, dtype=np.int64)
        self._counted: I64 | None = None  # by whom: another pool counts anew
        self._updates: dict[PartitionLane, StreamEvent] = {}
        self._lock = threading.Lock()

    def refresh(self, plan: ForwardPlan, lane: PartitionLane, send: Send) -> SentInputs:
        """Brings the map up to date for the pages of a plan, on the stream of the lane that runs the plan's
        job. send: sends arrays to the device, together with the job's other inputs; its result is
        returned."""
        with self._lock:
            pages, seen = self._stale(plan)
            sent = send({"map_pages": pages, "map_rows": plan.page_map[pages]})
            for other, mark in self._updates.items():
                if other is not lane:
                    lane.stream.follow(mark)
            if pages.size:
                self.blocks.index_copy_(0, sent.arrays["map_pages"], sent.arrays["map_rows"])
                self._updates[lane] = lane.mark()
                self._versions[pages] = seen
        return sent

    def _stale(self, plan: ForwardPlan) -> tuple[I64, I64]:
        """Returns the pages that the forward may read or write and whose rows the device does not have yet,
        and the rows' versions. Entries of a table past a sequence's own pages do no harm: their rows are sent
        again when somebody gets those pages."""
        if plan.versions is not self._counted:
            self._counted = plan.versions
            self._versions[:] = -1
        copied = [page for copy in plan.copies for page in (copy.source, copy.target)]
        pages = np.concatenate((plan.tables.ravel(), np.asarray(copied, dtype=np.int32)))
        if plan.versions is not None:
            pages = pages[plan.versions[pages] != self._versions[pages]]
        stale: I64 = np.unique(pages).astype(np.int64)
        # before the rows are read: one that changes meanwhile is of no page of this plan, and comes again
        seen = plan.versions[stale] if plan.versions is not None else np.full(stale.size, -1)
        return stale, seen


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One model on the device."""

    module: Any
    geometry: Geometry
    card: ModelCard
    heads: int  # of q, in all layers; 0 if they differ
    operations: Operations
    memory: Tensor  # the pool's bytes
    arena: Tensor  # [blocks, 2, T, D], as this model sees the pool
    page_map: DevicePageMap
    records: bool = True  # False if its steps are known not to be recordable
    proved: bool = False  # whether it is known what attends for it

    @classmethod
    def place(
        cls,
        loaded: LoadedModel,
        store: ArenaMemory,
        operations: Operations,
        *,
        records: bool = True,
        flash: bool | None = None,
    ) -> DeviceModel:
        """flash: whether FlashAttention attends, if the operations have it; None if that is not known yet."""
        geometry, device = loaded.geometry, store.bytes.device
        pages = store.blocks // geometry.blocks_per_page
        view = store.view(geometry.head_dim, loaded.kv_dtype)
        page_map = DevicePageMap(geometry, pages, device)
        if flash is False:
            operations = replace(operations, flash=None)
        if operations.flash is not None and (why := operations.flash.refuses(view)):
            _log.warning("%s does not attend by %s: %s", loaded.card.name, operations.flash.name, why)
            operations = replace(operations, flash=None)
        form = geometry, loaded.card, loaded.heads
        return cls(loaded.module, *form, operations, store.bytes, view, page_map, records, flash is not None)

    def widest(self, sequences: int) -> int:
        """Returns the most pages that the tables of so many sequences in a recording may have."""
        pages, flash = self.geometry.pages(self.card.context_length), self.operations.flash
        return pages if flash is None else min(pages, flash.widest(sequences, self.geometry.blocks_per_page))

    def widths(self, sequences: int) -> list[int]:
        """Returns the pages of the tables for which a decode step of so many sequences is recorded: those
        that FlashAttention has room for, and all, the fewest first."""
        return sorted({self.widest(sequences), self.geometry.pages(self.card.context_length)} - {0})

    def logits(
        self, tokens: Tensor, positions: Tensor, state: DecodeState | PrefillState, kept: Tensor | None = None
    ) -> Tensor:
        """Takes tokens, positions [N] int64 and returns logits [R, V] of the rows `kept`, or of all."""
        out: Tensor = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if kept is None else kept,
            kv=state,
        ).logits[0]
        return out

    def advance(self, sent: SentInputs, ids: Tensor) -> None:
        """Turns a decode step's inputs into the next step's. ids [B]: the tokens that its first B rows have
        drawn."""
        names = ("tokens", "positions", "lengths", "slot_page", "slot_offset", "tables")
        self.operations.advance(ids, *(sent.arrays[name] for name in names), self.geometry.tokens_per_block)

    def copies(self, copies: tuple[PageCopy, ...]) -> dict[str, AnyArray]:
        """Returns the arrays that `copy_pages` needs on the device."""
        lists = {
            "copy_sources": [copy.source for copy in copies],
            "copy_targets": [copy.target for copy in copies],
            "copy_counts": [copy.tokens for copy in copies],
        }
        return {name: np.asarray(values, dtype=np.int32) for name, values in lists.items()} if copies else {}

    def copy_pages(self, sent: SentInputs) -> None:
        """Copies on write, in all layers at once."""
        if "copy_sources" not in sent.arrays:
            return
        lists = (sent.arrays[name] for name in ("copy_sources", "copy_targets", "copy_counts"))
        self.operations.copy_pages(self.memory, self.page_map.blocks, *lists, **self._layout)

    def rehearse_sends(self, sent: SentInputs) -> None:
        """Runs the copy that sends to other units use, over no tokens."""
        ids, counts = sent.arrays["copy_sources"], sent.arrays["copy_counts"]
        lists = ids, ids, counts, counts
        self.operations.copy_blocks(self.memory, self.memory, *lists, **self._layout)

    @property
    def _layout(self) -> dict[str, int]:
        geometry = self.geometry
        return {
            "block_bytes": geometry.block_bytes,
            "page_tokens": geometry.tokens_per_block,
            "token_bytes": geometry.token_bytes // 2,
        }

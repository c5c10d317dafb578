"""A loan between two ends in this process, over a mailbox in what stands for a device's memory, with the
attention that is right in the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvloom.kernels.mailbox import SPAN, BorrowerState, LenderState, LentArena, MailboxTensors
from kvloom.kernels.reference import block_view
from kvloom.offload.memory.device import BorrowerDeviceMailbox, LenderDeviceMailbox, MailboxDtype
from kvloom.offload.memory.mailbox import MailboxForm

LAYERS, PAGES, WIDTH, SPARE = 2, 6, 3, 4
WRAPS = (1 << 32) - 2
CLOSE = {"float32": 2e-5, "float16": 4e-3}


class _Same:
    """Exported and mapped in one process: the same memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def export(self, memory: Tensor) -> bytes:
        return b"here"

    def map(self, handle: bytes) -> Tensor:
        return self._memory


@dataclass(frozen=True)
class Shape:
    """tokens: of a page."""

    dtype: MailboxDtype = "float32"
    slots: int = 2
    rows: int = 3
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    tokens: int = 4

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def form(self) -> MailboxForm:
        return MailboxForm(
            self.slots, self.rows, WIDTH, PAGES, LAYERS, self.heads, self.kv_heads, self.head_dim
        )


@dataclass
class Loaned:
    """Rows have two pages each of the loan's, one after the other. Blocks that are not lent are NaN."""

    shape: Shape
    start: int = WRAPS
    seed: int = 0
    span: int = SPAN
    seen: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draws = torch.Generator(torch.get_default_device()).manual_seed(self.seed)
        shape, dtype = self.shape, getattr(torch, self.shape.dtype)
        here = torch.get_default_device()
        self.box = LenderDeviceMailbox(shape.form, shape.dtype, here, self.start)
        device = _Same(self.box.memory)
        self.borrowed = BorrowerDeviceMailbox(self.box.place(device), "lender", device)  # type: ignore[arg-type]
        self.lender_state = LenderState(self.start, self.mailbox, self.span)
        count = PAGES * LAYERS * shape.kv_heads
        size = -(-2 * shape.tokens * shape.head_dim * dtype.itemsize // 64) * 64
        values = torch.full(((count + SPARE) * size // dtype.itemsize,), torch.nan, dtype=dtype)
        arena = block_view(values.view(torch.uint8), size, shape.head_dim, dtype)
        self.lent = LentArena(torch.randperm(count + SPARE, generator=self.draws)[:count].int(), arena)
        arena[self.lent.blocks.long()] = 0

    @property
    def mailbox(self) -> MailboxTensors:
        return self.box.tensors

    @property
    def borrower_state(self) -> BorrowerState:
        return self.borrowed.state

    def begin(self, lengths: list[int], first: int = 0) -> None:
        """An iteration over rows with so many tokens, the last of them new; those before, unless they were
        computed here, are what the loan got by a move."""
        shape = self.shape
        page_map = np.random.default_rng(self.seed).permutation(len(self.lent.blocks)).astype(np.int32)
        page_map = page_map.reshape(PAGES, LAYERS, shape.kv_heads)
        order = np.random.default_rng(self.seed + 1).permutation(PAGES).astype(np.int32)
        tables = order[: 2 * len(lengths)].reshape(len(lengths), 2)
        descriptor = self.borrowed.describe(
            np.array(lengths, np.int32), tables, page_map, np.ones(PAGES, np.int64), first
        )
        here = self.borrower_state.step.device
        self.borrowed.begin({name: torch.from_numpy(one).to(here) for name, one in descriptor.items()})
        for row, length in enumerate(lengths):
            for layer in range(LAYERS):
                tokens = self.seen.setdefault((row, layer), [])
                del tokens[length - 1 :]
                while len(tokens) < length - 1:
                    page, offset = divmod(len(tokens), shape.tokens)
                    blocks = self.lent.blocks[page_map[tables[row, page], layer]].long()
                    k, v = torch.randn(2, shape.kv_heads, shape.head_dim, generator=self.draws).to(
                        self.lent.arena.dtype
                    )
                    self.lent.arena[blocks, 0, offset], self.lent.arena[blocks, 1, offset] = k, v
                    tokens.append((k, v))

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of `count` rows, parts of wider ones."""
        shape = self.shape
        heads = shape.heads + 2 * shape.kv_heads + 1
        wide = torch.randn(count, heads, shape.head_dim, generator=self.draws).to(self.lent.arena.dtype)
        q, k, v, _ = torch.split(wide, [shape.heads, shape.kv_heads, shape.kv_heads, 1], 1)
        return q, k, v

    def wanted(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """What attention of the offloaded rows gives: [rows, heads, D] float64. Their K and V count as
        computed from here on."""
        _, rows, first = self.borrower_state.step.tolist()
        outs = []
        for row in range(rows):
            tokens = self.seen[row, layer]
            tokens.append((k[first + row], v[first + row]))
            last = tokens[-window:] if window else tokens
            keys, values = (torch.stack([one[i] for one in last], 1).double() for i in (0, 1))
            heads = q[first + row].double().view(self.shape.kv_heads, self.shape.group, -1)
            scores = torch.einsum("hgd,htd->hgt", heads, keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            outs.append(torch.einsum("hgt,htd->hgd", scores.softmax(-1), values).flatten(0, 1))
        return torch.stack(outs)

    def state(self) -> dict[str, Tensor]:
        """All memory that kernels write."""
        parts = ("words", "head", "lengths", "tables", "map", "notes", "qkv", "out")
        own = {
            "claim": self.lender_state.claim,
            "lender_state": self.lender_state.words,
            "borrower_state": self.borrower_state.words,
        }
        own["counts"] = self.lender_state.counts
        return {"arena": self.lent.arena, **own, **{name: getattr(self.mailbox, name) for name in parts}}


def scale_of(shape: Shape) -> float:
    return 1 / math.sqrt(shape.head_dim)


def same(one: Loaned, other: Loaned) -> None:
    """Both are in the same state."""
    close = CLOSE[one.shape.dtype]
    for (name, found), wanted in zip(one.state().items(), other.state().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=close, atol=close, equal_nan=True, msg=name)

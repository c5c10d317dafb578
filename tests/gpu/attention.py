"""The attention kernels, or FlashAttention if the operations have it, against their twins in float32, over
contexts of any length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.exec.cuda.operations import Operations
from kvloom.kernels import reference
from kvloom.kernels.cuda.flash import HeadSequences
from tests.kernels.paged import Paged, paged

# Of the outputs' root mean square: a half's weights and outputs are rounded once each.
FURTHEST = {torch.float32: 5e-5, torch.float16: 1.5 * 2**-10, torch.bfloat16: 1.5 * 2**-7}
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Form:
    """window, softcap: 0 for none. group: query heads of a KV head."""

    head_dim: int
    dtype: torch.dtype
    window: int = 0
    softcap: float = 0.0
    group: int = 4
    tokens: int = 32  # of a page

    def pool(self, lengths: list[int]) -> Paged:
        given = {"head_dim": self.head_dim, "group": self.group, "tokens": self.tokens}
        return paged(self.head_dim, lengths, dtype=self.dtype, **given)

    @property
    def scale(self) -> float:
        """Larger than a model's: few tokens count, so what is left out or read twice is seen."""
        return 2 / math.sqrt(self.head_dim)


def check_decode(form: Form, operations: Operations, lengths: list[int]) -> None:
    p = form.pool(lengths)
    q = p.queries(len(lengths))
    out, truth = torch.full_like(q, torch.nan), torch.empty(q.shape)
    sizes = p.page_map.shape[2], MULTIPROCESSORS, max(lengths)
    room = operations.workspace(q, p.lengths, *sizes, form.window)
    scoring, flash = (form.scale, form.window, form.softcap), operations.flash
    if flash is None:
        operations.decode_attention(out, q, *p.cache, p.lengths, *scoring, workspace=room)
    else:
        given = operations.block_tables, p.page_map, p.tables, p.lengths, p.arena.shape[2]
        heads = HeadSequences.of_steps(*given)
        out = flash.attend(q, p.arena, heads, 1, *scoring, multiprocessors=flash.multiprocessors)
    reference.decode_attention(truth, q.float(), *p.cache, p.lengths, *scoring)
    _check(out, truth, p.lengths > 0, form.dtype)


def check_prefill(form: Form, operations: Operations, lengths: list[int], counts: list[int]) -> None:
    """The last counts[b] tokens of each sequence are new."""
    p, new = form.pool(lengths), torch.tensor(counts, dtype=torch.int32)
    q = p.queries(sum(counts))
    out, truth = torch.full_like(q, torch.nan), torch.empty(q.shape)
    begins = F.pad(new.cumsum(0), (1, 0)).int()
    scoring, flash = (form.scale, form.window, form.softcap), operations.flash
    given = (*p.cache, p.lengths - new, begins, *scoring)
    if flash is None:
        operations.prefill_attention(out, q, *given)
    else:
        new_rows = p.lengths - new, begins, len(q), p.arena.shape[2]
        heads = HeadSequences.of_prompts(operations.block_tables, p.page_map, p.tables, *new_rows)
        out = flash.attend(q, p.arena, heads, 1, *scoring, multiprocessors=flash.multiprocessors)
    reference.prefill_attention(truth, q.float(), *given)
    _check(out, truth, torch.ones(len(q), dtype=torch.bool), form.dtype)


def _check(out: Tensor, truth: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
    """Row by row: a sequence that is wrong does not hide among those that are right."""
    error = (out.float() - truth)[rows].square().mean((1, 2)).sqrt()
    size = truth[rows].square().mean((1, 2)).sqrt()
    worst = float((error / size).max())
    assert worst <= FURTHEST[dtype], f"{worst:.1e} of the outputs, at most {FURTHEST[dtype]:.1e} is right"

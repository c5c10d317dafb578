"""FlashAttention 3, if a package with it is installed, against the Triton kernels: what both compute, and how
long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from tools.gpu_checks.models import BLOCK_BYTES, Ground
from tools.gpu_checks.report import Figure
from tools.gpu_checks.steps import timed
from torch import Tensor

from kvloom.kernels.cuda.flash import PACKAGES, FlashAttention, HeadSequences
from kvloom.kv.arena import view_blocks

CASES: Final = (
    (1, 1, 1024),
    (32, 1, 1024),
    (128, 1, 1024),
    (8, 1, 16384),
    (1, 512, 0),
    (1, 512, 8192),
    (1, 8192, 0),
)
"""Sequences, new tokens of each, cached ones of each."""
_FURTHEST: Final = 2 * 1.5 * 2**-7  # of the outputs: each kernel is off by 1.5 roundings at most


@dataclass(frozen=True)
class Sizes:
    """Those of Llama-3-8B."""

    layers: int = 32
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True)
class Batch:
    """Sequences over random K and V of layer 0; other layers' blocks are any."""

    arena: Tensor
    page_map: Tensor
    tables: Tensor
    starts: Tensor
    begins: Tensor
    q: Tensor

    @classmethod
    def of(cls, case: tuple[int, int, int], sizes: Sizes, ground: Ground) -> Batch:
        (count, new, cached), device, dtype = case, ground.device.torch, ground.dtype
        width = sizes.head_dim * dtype.itemsize
        pages = -(-(new + cached) // (sizes.block_bytes // (2 * width)))
        blocks = count * pages * sizes.kv_heads
        memory = torch.empty(blocks * sizes.block_bytes // dtype.itemsize, dtype=dtype, device=device)
        arena = view_blocks(memory.normal_().view(torch.uint8), sizes.block_bytes, sizes.head_dim, dtype)
        shape = count * pages, sizes.layers, sizes.kv_heads
        page_map = torch.randint(blocks, shape, dtype=torch.int32, device=device)
        page_map[:, 0] = torch.randperm(blocks, device=device).view(-1, sizes.kv_heads)
        tables = torch.randperm(count * pages, device=device).view(count, pages).int()
        starts = torch.full((count,), cached, dtype=torch.int32, device=device)
        begins = torch.arange(count + 1, dtype=torch.int32, device=device) * new
        heads = sizes.kv_heads * sizes.group
        q = torch.randn(count * new, heads, sizes.head_dim, device=device).to(dtype)
        return cls(arena, page_map, tables, starts, begins, q)

    def heads(self, ground: Ground) -> HeadSequences:
        size = self.arena.shape[2]
        given = ground.operations.block_tables, self.page_map, self.tables
        if len(self.q) == len(self.starts):
            return HeadSequences.of_steps(*given, self.starts + 1, size)
        return HeadSequences.of_prompts(*given, self.starts, self.begins, len(self.q), size)

    def own(self, ground: Ground, out: Tensor, scale: float) -> Callable[[], None]:
        """Returns the attention of the kernels here."""
        operations, pool = ground.operations, (self.arena, self.page_map, 0, self.tables)
        if len(self.q) > len(self.starts):
            return lambda: operations.prefill_attention(out, self.q, *pool, self.starts, self.begins, scale)
        lengths, longest = self.starts + 1, self.tables.shape[1] * self.arena.shape[2]
        sizes = self.page_map.shape[2], ground.device.compute, longest
        room = operations.workspace(self.q, lengths, *sizes, 0)
        return lambda: operations.decode_attention(out, self.q, *pool, lengths, scale, workspace=room)


def against_triton(
    ground: Ground,
    cases: tuple[tuple[int, int, int], ...] = CASES,
    sizes: Sizes = Sizes(),
    timed: Callable[[Callable[[], object]], float] = timed,
) -> Iterator[Figure]:
    """Raises LookupError if no package is installed, AssertionError if the outputs differ."""
    flash = ground.operations.flash
    if flash is None:
        raise LookupError(f"not installed, or not for this device: {' or '.join(PACKAGES.values())}")
    for case in cases:
        yield from _compared(Batch.of(case, sizes, ground), case, flash, ground, timed)


def _compared(
    batch: Batch,
    case: tuple[int, int, int],
    flash: FlashAttention,
    ground: Ground,
    timed: Callable[[Callable[[], object]], float],
) -> Iterator[Figure]:
    scale, heads, wanted = batch.q.shape[2] ** -0.5, batch.heads(ground), torch.empty_like(batch.q)
    own = batch.own(ground, wanted, scale)

    def attend() -> Tensor:
        given = batch.q, batch.arena, heads, 0, scale
        return flash.attend(*given, multiprocessors=ground.device.compute)

    own()
    difference = (attend().float() - wanted.float()).square().mean().sqrt()
    error = float(difference / wanted.float().square().mean().sqrt())
    name = "{} sequences, {} new tokens after {}".format(*case)
    assert error <= _FURTHEST, f"{name}: outputs differ by {error:.1e}, at most {_FURTHEST:.1e} is right"
    tables, found, theirs = (timed(work) * 1e6 for work in (lambda: batch.heads(ground), attend, own))
    note = f"Triton's {theirs:,.1f}; tables of all layers {tables:,.1f}; {flash.name}"
    yield Figure(name=f"FlashAttention 3, a layer: {name}", value=found, unit="µs", note=note)

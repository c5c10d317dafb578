"""Forwards over a small arena of their own, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvloom.exec.attention import Forward, ForwardState
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64, Geometry
from kvloom.types.job import ForwardPlan


class Batch:
    """`rows` sequences of one float32 model."""

    def __init__(self, geometry: Geometry, rows: int) -> None:
        arena = Arena(geometry.blocks_per_page * rows * 8, geometry.block_bytes)
        self._view = arena.view(geometry.head_dim, torch.float32)
        self._pool = Pool(arena.blocks, {"m": geometry}, max_sequences=rows, max_tokens={"m": 128})
        self._cache = self._pool.caches["m"]
        self._sequences = list(range(rows))
        for sequence in self._sequences:
            self._cache.add_sequence(sequence)

    def forward(
        self,
        forward: Forward,
        tokens: I64,
        appends: Sequence[int],
        kept: I64,
        state: Callable[[ForwardPlan, Tensor], ForwardState] = ForwardState,
    ) -> Tensor:
        """Append `appends[i]` tokens to each sequence → logits of the rows `kept`."""
        plan = self._cache.begin_forward(self._sequences, list(appends))
        with torch.inference_mode():
            logits = forward(tokens, kept, state(plan, self._view))
        self._cache.end_forward(plan)
        return logits[: len(kept)]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

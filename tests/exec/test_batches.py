"""Sequences of a batch get what each gets by itself: rows that share a prefix, and tokens beside prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvloom.exec.attention import Forward, ForwardState, Modular
from kvloom.exec.cpu import small_batch
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.exec.loading import load

PROMPT, BRANCH, STEPS = WINDOW + 45, 60, 3
ROWS = (0, 1, 2, 3, 4, 5)  # 1 to 3 go on from the prompt; 4 and 5 from what 1 has then, and from its end


class Tree:
    """Sequences that branch, over an arena of their own."""

    def __init__(self, model: LoadedModel, dtype: torch.dtype) -> None:
        arena = Arena(model.geometry.blocks_per_page * 200, model.geometry.block_bytes)
        self._view = arena.view(model.geometry.head_dim, dtype)
        pool = Pool(arena.blocks, {"m": model.geometry}, max_sequences=8, max_tokens={"m": 200})
        self._cache: ModelCache = pool.caches["m"]
        self._cache.add_sequence(0)
        self.most = 0  # tokens that a row shared with the one before it

    def grow(self, forward: Forward, rows: Sequence[int], tokens: Sequence[I64]) -> Tensor:
        """Appends tokens[i] to each row → logits [rows, V] after the last of each."""
        counts = [len(one) for one in tokens]
        plan = self._cache.begin_forward(rows, counts)
        state = ForwardState(plan, self._view)
        if state.shared is not None:
            self.most = max(self.most, int(state.shared.common.max()))
        with torch.inference_mode():
            state.copy_pages(plan.copies)
            logits = forward(np.concatenate(tokens), np.cumsum(counts) - 1, state)
        self._cache.end_forward(plan)
        return logits[: len(rows)].clone()

    def plant(self, forward: Forward) -> None:
        rng = np.random.default_rng(7)
        self.grow(forward, [0], [rng.integers(0, VOCAB, PROMPT)])
        for row in (1, 2, 3):
            self._cache.fork_sequence(0, row)
        self.grow(forward, [1], [rng.integers(0, VOCAB, BRANCH)])
        for row in (4, 5):
            self._cache.fork_sequence(1, row)
        self.grow(forward, [5], [rng.integers(0, VOCAB, 40)])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("limit", [0, 100])  # layer by layer, and all in one kernel
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_a_step_of_all_is_each_by_itself(
    architecture: str, limit: int, kv_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral's layers have a window, and so have some of gemma2's, which has a soft cap and keeps its own
    modules."""
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", limit)
    model = load(make_checkpoint(tmp_path, architecture), kv_dtype=str(kv_dtype).removeprefix("torch."))
    together, alone = Tree(model, kv_dtype), Tree(model, kv_dtype)
    rng = np.random.default_rng(1)
    order = [3, 5, 0, 4, 2, 1]
    for tree in (together, alone):
        tree.plant(model.forward)
        tree.most = 0
    for _ in range(STEPS):
        tokens = list(rng.integers(0, VOCAB, (len(ROWS), 1)))
        found = together.grow(model.forward, order, tokens)
        wanted = torch.cat([alone.grow(model.forward, [row], [tokens[i]]) for i, row in enumerate(order)])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()))
    assert together.most > PROMPT
    assert alone.most == 0
    assert isinstance(model.forward, Modular) == (architecture == "gemma2")


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tokens_beside_chunks_of_prompts_are_each_by_itself(
    architecture: str, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load(make_checkpoint(tmp_path, architecture), kv_dtype=str(kv_dtype).removeprefix("torch."))
    together, alone = Tree(model, kv_dtype), Tree(model, kv_dtype)
    rng = np.random.default_rng(2)
    order = [1, 3, 0, 5, 2, 4]
    for tree in (together, alone):
        tree.plant(model.forward)
    for counts in ([1, 1, 9, 17, 1, 1], [3, 1, 1, 1, 1, 12]):
        tokens = [rng.integers(0, VOCAB, count) for count in counts]
        found = together.grow(model.forward, order, tokens)
        wanted = torch.cat(
            [alone.grow(model.forward, [row], [own]) for row, own in zip(order, tokens, strict=True)]
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()))

"""A forward of rows with adapters gives each row what its adapter's merged weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.exec.cpu import small_batch
from kvloom.exec.cpu.adapted import ServedAdapters
from kvloom.exec.cpu.decoder import FusedDecoder
from tests.adapters import make_adapter, merge
from tests.checkpoints import VOCAB, make_checkpoint
from tests.exec.batches import Batch, on_threads
from tests.exec.loading import load

LENGTHS = [5, 1, 9, 3, 12, 2, 7]
ROWS = len(LENGTHS)
NAMES = ["one", "", "two", "one", "three", "", "two"]
KEPT = np.arange(ROWS)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("limit", [0, 100])  # layer by layer, and all in one kernel
@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("mistral", "float16")]
)
def test_each_row_has_its_own_adapter(
    architecture: str, dtype: str, limit: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, scales, targets and number formats differ; sizes are no multiples of a panel's, so that a panel
    may hold outputs of q and of k."""
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", limit)
    base = make_checkpoint(tmp_path / "base", architecture, intermediate_size=88, tie_word_embeddings=False)
    form = getattr(torch, dtype)
    adapters = {
        "one": make_adapter(tmp_path / "one", base, seed=1, dtype=form),
        "two": make_adapter(tmp_path / "two", base, rank=9, alpha=6, targets=("k_proj", "down_proj"), seed=2),
        "three": make_adapter(
            tmp_path / "three", base, targets=("q_proj", "v_proj"), seed=3, use_rslora=True
        ),
    }
    model = load(base)
    ours: Any = model.forward
    assert isinstance(ours, FusedDecoder)
    served = ServedAdapters(ours.shapes)
    for name, path in adapters.items():
        served.load(name, str(path))
    merged = {
        name: load(merge(tmp_path / f"{name}-merged", base, path)).forward for name, path in adapters.items()
    }
    merged[""] = ours
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, sum(LENGTHS)))
    ends = np.cumsum(LENGTHS)

    def answers(forward: Any) -> list[torch.Tensor]:
        batch = Batch(model.geometry, ROWS)
        found = [batch.forward(forward, tokens[0], LENGTHS, ends - 1)]
        return found + [batch.forward(forward, tokens[i, :ROWS], [1] * ROWS, KEPT) for i in (1, 2)]

    def adapted(ids: Any, kept: Any, state: Any) -> torch.Tensor:
        return ours(ids, kept, state, served.rows(NAMES, state.plan.appends))

    with on_threads(threads):
        found = answers(adapted)
        expected = {name: answers(forward) for name, forward in merged.items()}
    for i, logits in enumerate(found):
        for row, name in enumerate(NAMES):
            right = expected[name][i][row]
            torch.testing.assert_close(logits[row], right, rtol=1e-4, atol=2e-5 * float(right.abs().max()))
    assert not torch.allclose(expected["one"][0][0], expected[""][0][0], rtol=1e-2)

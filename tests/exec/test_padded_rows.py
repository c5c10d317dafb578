"""Rows are filled up to few numbers, for each of which oneDNN compiles a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvloom.exec.attention import padded, padded_rows
from tests.checkpoints import make_checkpoint
from tests.exec.batches import Batch
from tests.exec.loading import load
from tests.pooling_models import make_encoder, save_pooling


@given(st.integers(1, 1 << 16))
def test_few_rows_are_added(rows: int) -> None:
    filled = padded_rows(rows)
    assert rows <= filled == padded_rows(filled)
    assert filled - rows < max(8, rows / 16)


def test_prompts_come_in_few_sizes() -> None:
    assert len({padded_rows(rows) for rows in range(1, 513)}) <= 50


@given(st.lists(st.integers(0, 99), max_size=40))
def test_the_last_value_is_repeated(values: list[int]) -> None:
    found = padded(np.array(values, np.int64)).tolist()
    assert found[: len(values)] == values
    assert set(found[len(values) :]) <= set(values[-1:])
    assert len(found) == (padded_rows(len(values)) if values else 0)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down how many rows oneDNN multiplies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "mkldnn":
            self.rows.add(args[0].numel() // args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def _rows_of(forward: Callable[[int], object]) -> set[int]:
    """Returns the numbers of rows in products if `forward` is called with 1 to 40 tokens."""
    products = _Products()
    with products:
        for tokens in range(1, 41):
            forward(tokens)
    return products.rows


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # fused, and by the modules
def test_prompts_of_any_length_ask_for_few_products(architecture: str, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, architecture))

    def forward(tokens: int) -> None:
        batch = Batch(model.geometry, 1)
        batch.forward(model.forward, np.zeros(tokens, np.int64), [tokens], np.array([tokens - 1]))

    assert _rows_of(forward) == {4, 8, 16, 24, 32, 40}


def test_texts_of_any_length_ask_for_few_products(tmp_path: Path) -> None:
    save_pooling(make_encoder(tmp_path, "bert"))
    pooling_model = load(tmp_path).pooling_model
    assert pooling_model is not None

    def forward(tokens: int) -> None:
        with torch.inference_mode():
            pooling_model(np.zeros(tokens, np.int64), np.array([tokens]), (0,))

    assert _rows_of(forward) == {4, 8, 16, 24, 32, 40}

"""A decode step in one kernel of which some rows are away: it posts and collects their tasks by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.decoder import FusedDecoder
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.offload.cpu.attention import RemoteAttention
from kvloom.offload.cpu.attention_server import AttentionServer
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.memory.lender import Lending
from kvloom.offload.terms import Borrow
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.address import KVForm
from kvloom.types.geometry import I64
from kvloom.types.job import ForwardPlan
from tests.checkpoints import VOCAB, make_checkpoint
from tests.exec.batches import Batch, on_threads
from tests.exec.loading import load
from tests.exec.test_fused_decoder import FORMS, enliven

_PAGES = 24
_START = (1 << 32) - 20  # of counters: they wrap in each test


class Loaned:
    """The last `away` of some sequences have all their tokens at a lender in this process."""

    def __init__(self, model: LoadedModel, home: int, away: int, patience: float) -> None:
        geometry = model.geometry
        lent = np.arange(_PAGES * geometry.blocks_per_page, dtype=np.int32)
        self.arena = Arena(len(lent), geometry.block_bytes)
        self.transport = ShmTransport("lender", self.arena, slots=8)
        borrow = Borrow(
            model="m",
            pid=os.getpid(),
            form=KVForm.of(geometry, "float32"),
            heads=model.heads,
            rows=away,
            width=8,
            pages=_PAGES,
        )
        self.lending = Lending(borrow, lent, self.transport, start=_START)
        self.server = AttentionServer(self.lending, self.arena, borrow, lambda _: None)
        self.tasks = BorrowedBlocks(borrow, self.lending.loan, patience).tasks
        self._forward = model.forward
        self._own = Arena(_PAGES * geometry.blocks_per_page, geometry.block_bytes)
        self._caches = [
            Pool(len(lent), {"m": geometry}, max_sequences=8, max_tokens={"m": 128}).caches["m"]
            for _ in range(2)
        ]
        self._ids = list(range(home)), list(range(away))
        for cache, ids in zip(self._caches, self._ids, strict=True):
            for number in ids:
                cache.add_sequence(number)

    def step(self, tokens: I64, kept: I64) -> tuple[Tensor, str | None]:
        plans = [
            cache.begin_forward(ids, [1] * len(ids)) if ids else ForwardPlan.none("m", cache.pages.map)
            for cache, ids in zip(self._caches, self._ids, strict=True)
        ]
        geometry = self._caches[0].geometry
        with torch.inference_mode():
            remote = RemoteAttention(self.tasks, len(plans[0].sequences), plans[1])
            view = self._own.view(geometry.head_dim, torch.float32)
            state = ForwardState(plans[0], view, remote)
            logits = self._forward(tokens, kept, state)
        for cache, plan in zip(self._caches, plans, strict=True):
            if plan.sequences:
                cache.end_forward(plan)
        return logits[: len(kept)], remote.lost

    def end(self) -> None:
        self.server.close()
        assert self.lending.close()
        self.transport.close_all()


@contextmanager
def loaned(model: LoadedModel, home: int, away: int, patience: float = 30.0) -> Iterator[Loaned]:
    made = Loaned(model, home, away, patience)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_checkpoint(tmp_path_factory.mktemp("hot"), "qwen2"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("architecture", "dtype"), FORMS)
def test_is_bit_for_bit_what_it_is_at_home(
    architecture: str, dtype: str, threads: int, tmp_path: Path
) -> None:
    """By kernels alone, and where the host has to wait for each output."""
    path = make_checkpoint(tmp_path, architecture)
    enliven(path)
    model, rng = load(path, dtype=dtype), np.random.default_rng(threads)
    assert isinstance(model.forward, FusedDecoder)
    for (home, away), spins in (((3, 2), 1 << 40), ((0, 3), 1 << 40), ((2, 2), 0)):
        rows = home + away
        kept = np.array([*range(0, rows, 2), rows - 1])
        plain = Batch(model.geometry, rows)
        with on_threads(threads), loaned(model, home, away) as made:
            made.tasks.record.spins = spins
            for turn in range(12):
                tokens = rng.integers(0, VOCAB, rows)
                found, lost = made.step(tokens, kept)
                assert lost is None
                assert found.equal(plain.forward(model.forward, tokens, [1] * rows, kept)), turn
            posted = (made.tasks.record.count - _START) & 0xFFFFFFFF
            assert posted == 12 * model.geometry.layers == made.server.waits().tasks_total
            made.tasks.begin(np.array([1], np.int32), *tables(made))
            told = made.lending.mailbox.memory.pace
            assert 0 < told[0] < told[1]


def tables(made: Loaned) -> tuple[np.ndarray, np.ndarray, I64]:
    cache = made._caches[1]
    return np.zeros((1, 1), np.int32), cache.pages.map, cache.pages.versions


def test_a_lender_that_ends_the_loan_leaves_zeros_and_the_rows_at_home(model: LoadedModel) -> None:
    """Before a step, and while one waits."""
    tokens, kept = np.array([5, 6, 7]), np.arange(3)
    plain = Batch(model.geometry, 3)
    expected = plain.forward(model.forward, tokens, [1] * 3, kept)
    with loaned(model, 2, 1) as made:
        made.server.close()
        found, lost = made.step(tokens, kept)
        assert lost is not None
        assert "wants its blocks back" in lost
        assert made.tasks.record.count == _START  # it was not even asked
        assert found[:2].equal(expected[:2])
        assert found.isfinite().all()
    with loaned(model, 2, 1) as made:
        made.tasks.record.spins = 0
        answers = [made.step(tokens, kept) for _ in range(2)]
        assert answers[0][1] is None
        assert answers[0][0].equal(expected)
        post = made.tasks.record
        with made.server._polling.held():  # nobody does a task
            post.spins = 5
            made.tasks._patience = 0.05
            found, lost = made.step(tokens, kept)
        assert lost is not None
        assert "has not attended within 0.05 s" in lost
        for _ in range(2):
            plain.forward(model.forward, tokens, [1] * 3, kept)
        assert found.isfinite().all()


def test_a_lender_that_says_it_has_done_what_nobody_posted_is_left(model: LoadedModel) -> None:
    tokens, kept = np.array([5, 6, 7]), np.arange(3)
    with loaned(model, 2, 1) as made:
        made.lending.mailbox.memory.done.set((_START + 7) & 0xFFFFFFFF)
        found, lost = made.step(tokens, kept)
        assert lost is not None
        assert "wait at" in lost
        assert found.isfinite().all()

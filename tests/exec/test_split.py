"""A step whose operators are split computes what it does in one piece, and does others' tasks meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.decoder import FusedDecoder
from kvloom.offload.cpu.attention import Polls
from kvloom.offload.cpu.attention_server import AttentionServer, OperatorSplit
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.queueing import Rule, split
from kvloom.types.geometry import F64
from kvloom.types.job import ForwardPlan
from tests.checkpoints import VOCAB, make_checkpoint
from tests.exec.batches import Batch, on_threads
from tests.exec.loading import load
from tests.exec.test_attention_server import attending
from tests.exec.test_fused_decoder import FORMS, enliven
from tests.transfer.loans import GEOMETRY, HEADS, begin, borrowed

_TOTAL = HEADS + 2 * GEOMETRY.kv_heads


def polls(server: AttentionServer) -> Callable[[ForwardPlan, Tensor], ForwardState]:
    """What a forward of the model `m` is given."""
    return lambda plan, view: ForwardState(plan, view, polls=Polls(server, server.split("m")))


def post(loan: BorrowedBlocks, rows: int = 1) -> int:
    return loan.tasks.post(0, np.ones((rows, _TOTAL, GEOMETRY.head_dim), np.float32), 1.0, 0, 0.0)


@contextmanager
def asking(loan: BorrowedBlocks) -> Iterator[None]:
    """One task after the other."""
    ends = threading.Event()

    def ask() -> None:
        lengths = [1, 2]
        while not ends.is_set():
            begin(loan, lengths)
            for _ in range(4):
                loan.tasks.collect(post(loan, 2), np.empty((2, HEADS, GEOMETRY.head_dim), np.float32))
            lengths = [1 + (lengths[0] + 3) % 16, lengths[1] % 16 + 1]

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("architecture", "dtype"), FORMS)
def test_is_bit_for_bit_what_one_piece_is(
    architecture: str, dtype: str, threads: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(threads)
    sizes = {"vocab_size": VOCAB + 13, "intermediate_size": int(rng.integers(130, 400))}
    path = make_checkpoint(tmp_path, architecture, **sizes)
    enliven(path)
    model = load(path, dtype=dtype)
    assert isinstance(model.forward, FusedDecoder)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with attending() as (made, server, _):
            step = server.split("m")
            for rows in (1, 3, 6):
                plain, other = Batch(model.geometry, rows), Batch(model.geometry, rows)
                with asking(borrowed(made.lending.loan)) if rows > 3 else threading.Lock():
                    for turn in range(20):
                        tokens = rng.integers(0, VOCAB, rows)
                        kept = np.array([*range(0, rows, 2), rows - 1])
                        given = (model.forward, tokens, [1] * rows, kept)
                        with server.polled():
                            found = other.forward(*given, polls(server))
                        assert found.equal(plain.forward(*given)), (rows, turn)
                        step.parts[:] = rng.integers(1, 30, len(step.parts))
            assert server.waits().tasks_total > 0
            assert (np.diff(step.ends, prepend=0) > 0).all()
            assert (step.pieces[: step.ends[-1]] >= 0).all()
    finally:
        torch.set_num_threads(before)


def test_a_step_does_what_waits_for_it(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen2"))
    with attending() as (made, server, ends), server.polled():  # so the thread does nothing
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        task = post(loan)
        batch, given = Batch(model.geometry, 2), (np.array([1, 2]), [1, 1], np.array([0, 1]))
        batch.forward(model.forward, *given)
        assert server.waits().tasks_total == 0
        with on_threads(1):
            batch.forward(model.forward, *given, polls(server))
        waits = server.waits()
        assert waits.tasks_total == 1
        assert waits.wait > 0
        assert waits.expected_wait > 0
        assert waits.parts == 5 * model.geometry.layers + 1
        loan.tasks.collect(task, np.empty((1, HEADS, GEOMETRY.head_dim), np.float32))
        assert not ends


def test_a_step_that_outlives_the_loan_does_nothing_more(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen2"))
    with attending() as (made, server, _), server.polled():
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        batch, given = Batch(model.geometry, 1), (np.array([1]), [1], np.array([0]))
        for tasks in (1, 2):
            post(loan)
            batch.forward(model.forward, *given, polls(server))
            assert server.waits().tasks_total == tasks
        post(loan)
        before = made.arena.bytes.clone()
        server.close()
        batch.forward(model.forward, *given, polls(server))
        assert server.waits().tasks_total == 2
        assert made.arena.bytes.equal(before)


def test_a_layer_by_layer_forward_looks_too(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "gpt2"))
    with attending() as (made, server, _), server.polled():
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        post(loan)
        looked: list[Polls] = []

        def state(plan: ForwardPlan, view: Tensor) -> ForwardState:
            looked.append(Polls(server, server.split("m")))
            return ForwardState(plan, view, polls=looked[-1])

        Batch(model.geometry, 1).forward(model.forward, np.arange(5), [5], np.array([4]), state)
        assert server.waits().tasks_total == 1
        assert len(looked[0].pieces) == 2 * model.geometry.layers - 1


def test_the_plan_is_algorithm_1s_over_what_was_measured() -> None:
    rule: list[Rule | None] = [None]
    told: list[F64] = []
    step = OperatorSplit(0, lambda: rule[0], told.append)
    limits = [8, 2, 8]
    for _ in range(40):
        step.begin(limits)
        step.pieces[:3], step.ends[:] = (40_000, 10_000, 4_000), (1, 2, 3)
        step.end()
    assert step.parts.tolist() == [1, 1, 1]
    assert told[-1] == pytest.approx([4e-5, 1e-5, 4e-6])
    rule[0] = Rule(2e-6, 3e-6)
    for _ in range(32):
        step.begin(limits)
        step.pieces[:4], step.ends[:] = (30_000, 10_000, 10_000, 4_000), (2, 3, 4)
        step.end()
    assert step.parts.tolist() == split([4e-5, 1e-5, 4e-6], 2e-6, 3e-6, limits)
    assert told[-1] == pytest.approx([3e-5, 1e-5, 1e-5, 4e-6])  # as they were, however even
    step.begin([8, 2, 8, 1])
    assert step.parts.tolist() == [1, 1, 1, 1]


def test_many_rows_go_in_runs(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen3"))
    rows, lengths = 4, [40, 1, 47, 12]
    tokens, kept = np.random.default_rng(2).integers(0, VOCAB, 100), np.cumsum(lengths) - 1
    with attending() as (_, server, _), server.polled():
        step = OperatorSplit(server.split("m").record.poll, lambda: Rule(0.0, 5e-6), lambda _: None)
        looked: list[Polls] = []

        def state(plan: ForwardPlan, view: Tensor) -> ForwardState:
            looked.append(Polls(server, step))
            return ForwardState(plan, view, polls=looked[-1])

        given = (model.forward, tokens, lengths, kept, state)
        whole = Batch(model.geometry, rows).forward(*given)
        step.ran(100, 1.0, [])
        in_runs = Batch(model.geometry, rows).forward(*given)
        assert step.runs(100) == 3
        assert len(looked[1].pieces) > 2 * len(looked[0].pieces)
        assert 0 < looked[0].longest <= max(looked[0].pieces)
        torch.testing.assert_close(in_runs, whole, rtol=1e-5, atol=1e-6)


def test_runs_are_as_many_as_the_longest_product_needs() -> None:
    rule: list[Rule | None] = [Rule(1e-3, 2e-3)]
    step = OperatorSplit(0, lambda: rule[0], lambda _: None)
    assert step.runs(512) == 1
    step.ran(512, 0.019, [0.001, 0.019, 0.04])
    assert step.runs(512) == 4  # of 5 ms each
    assert step.runs(128) == 1
    step.ran(512, 0.0095, [0.001, 0.0095, 0.04])
    assert step.runs(512) == 2
    rule[0] = Rule(0.0, 1e-6)
    assert step.runs(512) == 16
    rule[0] = None
    assert step.runs(512) == 1

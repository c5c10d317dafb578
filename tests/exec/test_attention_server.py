"""The lender's attention: what a mailbox asks for, over lent blocks, and over nothing else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kernels import reference
from kvloom.offload.cpu import polling
from kvloom.offload.cpu.attention_server import AttentionServer
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import AnyArray
from tests.processes import DEADLINE
from tests.transfer.loans import (
    BLOCKS,
    GEOMETRY,
    HEADS,
    LENT,
    PAGES,
    Lender,
    asked,
    begin,
    borrowed,
    lender_here,
    memory_of,
)

_TOTAL = HEADS + 2 * GEOMETRY.kv_heads


@contextmanager
def attending() -> Iterator[tuple[Lender, AttentionServer, list[str]]]:
    ends: list[str] = []
    with lender_here() as made:
        random = np.random.default_rng(3).standard_normal(made.arena.bytes.numel() // 4, np.float32)
        made.arena.bytes.view(torch.float32).copy_(torch.from_numpy(random))
        server = AttentionServer(made.lending, made.arena, asked(os.getpid()), ends.append)
        try:
            yield made, server, ends
        finally:
            server.close()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 2.0)])
@pytest.mark.parametrize("polled", [False, True])
def test_is_what_the_twin_computes(window: int, softcap: float, polled: bool) -> None:
    lengths = [13, 1, 8]
    with attending() as (made, server, _):
        loan = borrowed(made.lending.loan)
        begin(loan, lengths)
        qkv = np.random.default_rng(1).standard_normal((3, _TOTAL, GEOMETRY.head_dim), np.float32)
        out = np.empty((3, HEADS, GEOMETRY.head_dim), np.float32)
        page_map = torch.from_numpy(LENT.reshape(PAGES, GEOMETRY.layers, GEOMETRY.kv_heads))
        arena = made.arena.view(GEOMETRY.head_dim, torch.float32).clone()
        for layer in range(GEOMETRY.layers):
            if polled:
                with server.polled():
                    task = loan.tasks.post(layer, qkv, 0.3, window, softcap)
                    server.poll()
                    loan.tasks.collect(task, out)
            else:
                loan.tasks.collect(loan.tasks.post(layer, qkv, 0.3, window, softcap), out)
            tables = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
            q, k, v = torch.from_numpy(qkv).tensor_split((HEADS, HEADS + GEOMETRY.kv_heads), 1)
            slots = torch.tensor([1, 2, 4], dtype=torch.int32), torch.tensor([4, 0, 7], dtype=torch.int32)
            reference.write_kv(arena, page_map, layer, k, v, *slots)
            expected, counts = torch.empty_like(q), torch.tensor(lengths, dtype=torch.int32)
            reference.decode_attention(
                expected, q, arena, page_map, layer, tables, counts, 0.3, window, softcap
            )
            torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(made.arena.view(GEOMETRY.head_dim, torch.float32), arena)


@settings(max_examples=30)
@given(data=st.data())
def test_bytes_at_random_touch_nothing_that_is_not_lent(data: st.DataObject) -> None:
    """Neither in the task that tells of an iteration, which Python checks, nor in one that follows, which the
    kernel does. What is not lent is no number, so that it shows in the output where it is read."""
    with attending() as (made, server, _):
        blocks = made.arena.bytes.numpy().reshape(BLOCKS, -1)
        own = np.ones(BLOCKS, np.bool_)
        own[LENT] = False
        blocks[own] = np.full((own.sum(), GEOMETRY.block_bytes // 4), np.nan, np.float32).view(np.uint8)
        before = blocks[own].copy()
        loan = borrowed(made.lending.loan, patience=20.0)
        qkv, out = np.ones((2, _TOTAL, GEOMETRY.head_dim), np.float32), np.zeros((2, HEADS, 8), np.float32)
        with server.polled():  # it is found when the forging is done
            begin(loan, [3, 10])
            if data.draw(st.booleans()):
                first = loan.tasks.post(0, qkv, 1.0, 0, 0.0)
                server.poll()
                loan.tasks.collect(first, out)
            task = loan.tasks.post(1, qkv, 1.0, 0, 0.0)
            memory = memory_of(made)
            fields = ["head", "pace", "lengths", "tables", "changed", "map", "notes", "qkv"]
            names = data.draw(st.lists(st.sampled_from(fields)))
            for name in names:
                flat = getattr(memory, name).reshape(-1).view(np.uint8)
                flat[data.draw(st.integers(0, flat.size - 1))] = data.draw(st.integers(0, 255))
            server.poll()
        with suppress(Unavailable):  # it was refused
            loan.tasks.collect(task, out)
        np.testing.assert_array_equal(blocks[own], before)
        assert np.isfinite(out).all() or {"notes", "qkv"}.intersection(names)  # these may be no numbers


def test_forwards_poll_while_tasks_come_and_a_while_longer() -> None:
    with attending() as (made, server, _):
        assert not server.lively()
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        task = loan.tasks.post(0, np.ones((1, _TOTAL, GEOMETRY.head_dim), np.float32), 1.0, 0, 0.0)
        loan.tasks.collect(task, np.empty((1, HEADS, GEOMETRY.head_dim), np.float32))
        assert [server.lively() for _ in range(70)] == [True] * 63 + [False] * 7


def test_no_task_is_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """While forwards that look begin and end at any time, on two threads: a task that comes between them
    wakes the thread, which else would sleep for much longer than it is waited for."""
    monkeypatch.setattr(polling, "_SLICE", 60.0)
    over = threading.Event()
    with attending() as (made, server, _):

        def works(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not over.is_set():
                with server.polled():
                    for _ in range(rng.integers(0, 3)):
                        server.poll()
                time.sleep(float(rng.choice([0.0, 0.0, 0.001])))

        threads = [threading.Thread(target=works, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        try:
            loan = borrowed(made.lending.loan, patience=20.0)
            qkv, out = (
                np.ones((1, _TOTAL, GEOMETRY.head_dim), np.float32),
                np.empty((1, HEADS, 8), np.float32),
            )
            for turn in range(600):
                if turn == 300:
                    over.set()  # from here on there is the thread alone
                begin(loan, [3])
                loan.tasks.collect(loan.tasks.post(0, qkv, 1.0, 0, 0.0), out)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert server.waits().tasks_total == 600


def test_a_borrower_that_forges_loses_the_loan() -> None:
    with attending() as (made, _, ends):
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        memory_of(made).lengths[0] = 1 << 20
        task = loan.tasks.post(0, np.ones((1, _TOTAL, GEOMETRY.head_dim), np.float32), 1.0, 0, 0.0)
        with pytest.raises(Unavailable, match="refuses what this unit wrote"):
            loan.tasks.collect(task, np.empty((1, HEADS, GEOMETRY.head_dim), np.float32))
    assert ends == ["weave: rows of 1048576 to 1048576 tokens; want 1 to 32"]


def test_nothing_is_done_for_who_has_forged_or_was_closed() -> None:
    """Though the next task keeps to the rules."""
    for forged in (True, False):
        with attending() as (made, server, ends):
            loan = borrowed(made.lending.loan)
            before = made.arena.bytes.clone()
            if forged:
                memory_of(made).posted.set(77)
                memory_of(made).posted.wake()
                server.poll()
            else:
                server.close()
            while not memory_of(made).over.get():
                time.sleep(0)
            begin(loan, [3])
            memory_of(made).posted.set(memory_of(made).done.get() + 1)
            memory_of(made).posted.wake()
            done = memory_of(made).done.get()
            server.poll()
            time.sleep(0.12)  # the idle thread has looked twice
            assert memory_of(made).done.get() == done
            assert bool((made.arena.bytes == before).all())
            assert len(ends) == forged


def test_no_task_is_done_while_a_part_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the map, and tell of new pages there, which is about to change."""
    with attending() as (made, server, _):
        loan, receiver = borrowed(made.lending.loan), made.lending.receiver
        out, done = np.empty((1, HEADS, GEOMETRY.head_dim), np.float32), list[int]()
        task, forget = 0, receiver.forget

        def forgets(numbers: AnyArray) -> None:
            nonlocal task
            begin(loan, [3])
            qkv = np.ones((1, _TOTAL, GEOMETRY.head_dim), np.float32)
            task = loan.tasks.post(0, qkv, 1.0, 0, 0.0)
            with server.polled():
                server.poll()
            done.append(server.waits().tasks_total)
            forget(numbers)

        monkeypatch.setattr(receiver, "forget", forgets)
        server.take_back(np.arange(PAGES * GEOMETRY.blocks_per_page // 2, PAGES * GEOMETRY.blocks_per_page))
        loan.tasks.collect(task, out)
        assert (done, server.waits().tasks_total) == ([0], 1)


def test_a_borrower_that_leaves_is_noticed() -> None:
    left = threading.Event()
    with lender_here() as made:
        server = AttentionServer(made.lending, made.arena, asked(os.getpid()), lambda _: left.set())
        borrowed(made.lending.loan).tasks.close()
        assert left.wait(DEADLINE)
        server.close()

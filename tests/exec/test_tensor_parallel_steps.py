"""What ranks are told of a job is what the first one has, and of the page map no more than has changed."""

from __future__ import annotations

import socket
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.exec.parallel.wire import Go, RankReady, SentMaps, Step, ToldMap, Wire
from kvloom.kv.pool import Pool
from kvloom.types.errors import OutOfBlocks
from kvloom.types.geometry import I32, I64, Geometry
from kvloom.types.job import ForwardPlan, Job, Phase

BLOCKS = 48
GEOMETRIES = {"a": Geometry(2, 1, 4, 4, 128), "b": Geometry(1, 3, 8, 4, 256)}
ARRAYS = ("appends", "starts", "tables", "positions", "slot_page", "slot_offset")


class Ranks:
    """The first rank's pool, and what another one makes of its steps."""

    def __init__(self) -> None:
        self.pool = Pool(BLOCKS, GEOMETRIES, max_sequences=8, max_tokens=dict.fromkeys(GEOMETRIES, 40))
        self.sent = SentMaps(GEOMETRIES, BLOCKS)
        self.maps = {name: ToldMap(geometry, BLOCKS) for name, geometry in GEOMETRIES.items()}

    def tell(self, plan: ForwardPlan, tokens: I64, kept: I64) -> Step:
        job = Job(plan.model, Phase.PREFILL, 1, plan, tokens, ())
        body = msgspec.msgpack.encode(self.sent.step(0, job, kept))
        step = msgspec.msgpack.decode(body, type=Step)
        told = self.maps[plan.model].plan(step)
        for name in ARRAYS:
            mine, its = getattr(plan, name), getattr(told, name)
            assert mine.dtype == its.dtype
            assert np.array_equal(mine, its)
        assert told.copies == plan.copies
        for page in used(plan):
            assert np.array_equal(told.page_map[page], plan.page_map[page])
        assert [step.array(name).tolist() for name in ("tokens", "kept")] == [tokens.tolist(), kept.tolist()]
        return step


def used(plan: ForwardPlan) -> set[int]:
    tokens = GEOMETRIES[plan.model].tokens_per_block
    counts = -(-(plan.starts + plan.appends) // tokens)
    pages = {int(page) for row, count in zip(plan.tables, counts, strict=True) for page in row[:count]}
    return pages | {copy.source for copy in plan.copies}


def move(ranks: Ranks, random: Random) -> None:
    cache: Any = ranks.pool.caches[random.choice(["a", "b"])]
    held = list(cache.sequences)
    kind = random.choice(["add", "fork", "remove", "receive", "forward", "forward", "forward"])
    if kind == "add" and len(held) < 8:
        cache.add_sequence(max(held, default=0) + 1)
    elif kind == "fork" and 0 < len(held) < 8:
        cache.fork_sequence(random.choice(held), max(held) + 1)
    elif kind == "remove" and held:
        cache.remove_sequence(random.choice(held))
    elif kind == "receive" and len(held) < 8 and ranks.pool.free >= 8:
        cache.add_sequence(max(held, default=0) + 1)
        cache.prepare_receive(max(held, default=0) + 1, count := random.randint(1, 8))
        cache.commit_receive(max(held, default=0) + 1, count)  # a peer has written it
    elif kind == "forward" and held:
        batch = [one for one in random.sample(held, random.randint(1, len(held))) if cache.length(one) < 32]
        appends = [random.randint(1, 8) for _ in batch]
        if not batch or ranks.pool.free < 1:
            return
        try:
            plan = cache.begin_forward(batch, appends)
        except OutOfBlocks:
            return
        ranks.tell(plan, np.arange(sum(appends)), np.arange(len(batch)))
        cache.end_forward(plan)


@given(seed=st.integers(0, 1 << 32))
def test_whatever_the_pool_does(seed: int) -> None:
    ranks, random = Ranks(), Random(seed)
    for _ in range(40):
        move(ranks, random)


def test_what_is_known_is_not_sent_again() -> None:
    ranks = Ranks()
    cache = ranks.pool.caches["a"]
    cache.add_sequence(1)
    changes = []
    for count in (5, 1, 1, 4):  # a page holds 4 tokens
        plan = cache.begin_forward([1], [count])
        step = ranks.tell(plan, np.arange(count), np.zeros(1, dtype=np.int64))
        changes.append(len(step.array("pages")))
        cache.end_forward(plan)
    assert changes == [2, 0, 0, 1]


def test_rows_that_are_not_the_plans_are_not_read() -> None:
    """They may be changing. Tables are padded with page 0."""
    page_map: I32 = np.arange(4, dtype=np.int32)[:, None, None] + np.zeros((4, 2, 1), dtype=np.int32)
    plan: Any = SimpleNamespace(
        model="a",
        appends=np.array([1, 1]),
        starts=np.array([0, 5]),
        page_map=page_map,
        tables=np.array([[1, 0], [2, 3]], dtype=np.int32),
        positions=np.array([0, 5]),
        slot_page=np.array([1, 3], dtype=np.int32),
        slot_offset=np.array([0, 1], dtype=np.int32),
        copies=(),
        versions=np.arange(1, 5),
    )
    step = SentMaps(GEOMETRIES, BLOCKS).step(
        0, Job("a", Phase.DECODE, 1, plan, np.arange(2), ()), np.arange(2)
    )
    assert step.array("pages").tolist() == [1, 2, 3]


def test_messages_one_after_the_other_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    one, other = Wire(ours), Wire(theirs)
    one.send(RankReady())
    one.send(Go())
    assert [msgspec.msgpack.decode(other.receive() or b"") for _ in range(2)] == [
        {"type": "here"},
        {"type": "go"},
    ]
    one.close()
    assert other.receive() is None


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours, seconds=1)
    arrays = {"tokens": bytearray(1 << 24)}
    step = Step(slot=0, model="m", phase=Phase.DECODE, share=1, arrays=arrays)
    with theirs, pytest.raises(OSError, match="temporarily unavailable"):
        wire.send(step)

"""Scattered blocks that go through staging buffers: what arrives, in how many descriptors, and when that
pays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.kv.arena import Arena
from kvloom.transfer.grants import ClaimRefused, Granted, Grants, Quit, Scattered, Staged, WriteClaim
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import Agent, HostPlace, Spans
from kvloom.transfer.staging import (
    ALWAYS,
    MOST_SPANS,
    NEVER,
    SINK,
    WINDOWS,
    Staging,
    StagingCosts,
    free_window,
)
from kvloom.transfer.target import WritableBytes, WriteTarget
from kvloom.types.address import KVAddress, KVForm, Ticket
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.transfer import BlockCopies
from tests.transfer.kinds import NIXL

TOKENS, TOKEN_BYTES = 32, 64
BLOCK = 2 * TOKENS * TOKEN_BYTES
FORM = KVForm(layers=1, kv_heads=1, head_dim=16, dtype="float32", block_bytes=BLOCK, tokens_per_block=TOKENS)
BLOCKS = 96
GRANT = 2.0


def _target(allowed: I32) -> WriteTarget:
    free = np.zeros(BLOCKS, np.bool_)
    free[allowed] = True
    return WriteTarget(BLOCK, TOKENS, TOKEN_BYTES, BLOCKS, free)


def _arenas(seed: int) -> tuple[AnyArray, AnyArray]:
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8) for _ in range(2))
    return first, second


@st.composite
def copies(draw: st.DrawFn) -> BlockCopies:
    """Draws copies between random blocks, of which some are adjacent in both arenas, whole and in part."""
    count = draw(st.integers(1, BLOCKS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    own, peer = (rng.permutation(BLOCKS)[:count].astype(np.int32) for _ in range(2))
    if draw(st.booleans()):
        own, peer = np.sort(own), np.sort(peer)
    offsets = rng.integers(0, TOKENS, count).astype(np.int32)
    counts = (rng.integers(0, TOKENS + 1, count) % (TOKENS - offsets + 1)).astype(np.int32)
    whole = rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    offsets[whole], counts[whole] = 0, TOKENS
    return BlockCopies(own, peer, offsets, counts)


@given(copies(), st.integers(1, 12))
def test_what_is_gathered_and_scattered_is_what_is_written_span_by_span(
    some: BlockCopies, blocks: int
) -> None:
    half = 2 * blocks * BLOCK
    source, plain = _arenas(1)
    staged = plain.copy()
    target = _target(some.peer)
    for own, peer, size in zip(*(part.tolist() for part in target.spans(some)), strict=True):
        plain[peer : peer + size] = source[own : own + size]
    here, there = Staging(source, half), Staging(staged, half)
    for number, (own, peer, sizes) in enumerate(target.pieces(some, half // 2, MOST_SPANS)):
        window, part = number % WINDOWS, number % 2
        here.gather(window, part, own, sizes)
        out, into, size = here.outward(window, part), there.inward(window, part), int(sizes.sum())
        assert size <= half
        there.memory[into : into + size] = here.memory[out : out + size]
        there.scatter(window, part, peer, sizes)
    np.testing.assert_array_equal(staged, plain)


@given(st.integers(1, 1 << 22))
def test_nothing_in_a_staging_buffer_overlaps(half: int) -> None:
    staging = Staging(np.zeros(1, np.uint8), half)
    parts = [
        at(window, one) for at in (staging.inward, staging.outward) for window in range(4) for one in (0, 1)
    ]
    assert sorted(parts) == [number * half for number in range(16)]
    assert staging.sink == 16 * half
    assert staging.size == staging.sink + SINK


@given(
    st.integers(2, 1000),
    st.integers(1, 1 << 24),
    st.floats(0, 1e-3),
    st.floats(1e-12, 1e-6),
)
def test_staging_pays_where_descriptors_cost_more_than_copies(
    spans: int, size: int, descriptor: float, copy: float
) -> None:
    costs = StagingCosts(descriptor, copy)
    assert costs.pays(spans, size) == ((spans - 1) * descriptor > 2 * size * copy) or (
        (spans - 1) * descriptor == pytest.approx(2 * size * copy)
    )
    if costs.pays(spans, size):
        assert costs.pays(spans + 1, size)
        assert costs.pays(spans, size - 1)


def test_one_span_is_never_staged() -> None:
    assert not ALWAYS.pays(1, BLOCK)
    assert ALWAYS.pays(2, BLOCK)
    assert not NEVER.pays(1 << 20, 1)


# who may scatter


@dataclass
class Receiver:
    arena: AnyArray
    staging: Staging
    grants: Grants
    ticket: Ticket

    @staticmethod
    def make(*blocks: int) -> Receiver:
        arena = np.zeros(BLOCKS * BLOCK, np.uint8)
        staging = Staging(arena, 4 * BLOCK)
        grants = Grants("u", 64, GRANT, staging)
        runs = KVAddress.compress(np.array(blocks, np.int32))
        return Receiver(arena, staging, grants, grants.open(0, 7, WritableBytes(runs, BLOCK)))

    def claim(self, number: int = 1, ticket: Ticket | None = None) -> object:
        claim = WriteClaim(number, ticket or self.ticket, 7, 0, 32, b"", stages=True)
        ((_, answer),) = self.grants.hear("s", claim, 0.0)
        return answer

    def staged(self, starts: list[int], sizes: list[int], *, half: int = 0, now: float = 0.0) -> object:
        spans = np.array([starts, sizes], "<i8").T.tobytes()
        ((_, answer),) = self.grants.hear("s", Staged(1, half, spans), now)
        return answer


def test_what_was_staged_lies_where_it_belongs_once_the_receiver_has_heard_of_it() -> None:
    receiver = Receiver.make(3, 9)
    assert receiver.claim() == Granted(1, 0)
    receiver.staging.memory[receiver.staging.inward(0, 1) :][: 2 * BLOCK] = np.repeat([1, 2], BLOCK)
    assert receiver.staged([9 * BLOCK, 3 * BLOCK], [BLOCK, BLOCK], half=1) == Scattered(1, 1)
    assert np.flatnonzero(receiver.arena.reshape(BLOCKS, BLOCK).max(axis=1)).tolist() == [3, 9]
    assert (receiver.arena[9 * BLOCK], receiver.arena[3 * BLOCK]) == (1, 2)


@pytest.mark.parametrize(
    ("starts", "sizes", "half"),
    [
        ([4 * BLOCK], [BLOCK], 0),
        ([3 * BLOCK], [BLOCK + 1], 0),
        ([3 * BLOCK - 1], [BLOCK], 0),
        ([-BLOCK], [BLOCK], 0),
        ([3 * BLOCK], [0], 0),
        ([3 * BLOCK], [-1], 0),
        ([3 * BLOCK], [BLOCK], 2),
        ([3 * BLOCK], [BLOCK], -1),
        ([3 * BLOCK] * 5, [BLOCK] * 5, 0),
        ([1 << 62], [1 << 62], 0),
    ],
)
def test_what_leaves_the_blocks_or_the_window_is_refused(
    starts: list[int], sizes: list[int], half: int
) -> None:
    receiver = Receiver.make(3, 9)
    receiver.claim()
    receiver.staging.memory[:] = 1
    assert isinstance(receiver.staged(starts, sizes, half=half), ClaimRefused)
    assert not receiver.arena.any()


def test_nothing_is_scattered_for_a_reservation_that_closes_or_a_grant_that_is_over() -> None:
    for late in (False, True):
        receiver = Receiver.make(3)
        receiver.claim()
        receiver.staging.memory[:] = 1
        if not late:
            assert not receiver.grants.close(receiver.ticket, 0.0)[0]
        answer = receiver.staged([3 * BLOCK], [BLOCK], now=100.0 if late else 0.0)
        assert isinstance(answer, ClaimRefused)
        assert not receiver.arena.any()


def test_a_window_is_one_senders_until_its_claim_is_forgotten() -> None:
    receiver = Receiver.make(3)
    tickets = [receiver.grants.open(0, 7, WritableBytes(b"", BLOCK)) for _ in range(WINDOWS)]
    granted = [receiver.claim(2 + i, ticket) for i, ticket in enumerate(tickets)]
    assert granted == [Granted(2 + i, i) for i in range(WINDOWS)]
    assert receiver.claim() == Granted(1, -1)
    receiver.grants.hear("s", Quit(1), 0.0)
    receiver.grants.hear("s", Quit(3), 0.0)
    assert receiver.claim() == Granted(1, 1)
    assert free_window({-1, 0, 1, 3}) == 2


# how many descriptors there are


class Counting(Agent):
    """NIXL's agent, which remembers how many descriptors each write had."""

    counts: list[int]

    def write(self, name: str, own: Spans, peer: Spans) -> int:
        self.counts.append(len(own))
        return super().write(name, own, peer)


async def _send(costs: StagingCosts, own: I32, peer: I32, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    monkeypatch.setattr(Counting, "counts", counts, raising=False)
    monkeypatch.setattr("kvloom.transfer.nixl.Agent", Counting)
    ends = [
        NixlTransport(unit, Arena(BLOCKS, BLOCK), HostPlace(16 * BLOCK), costs=costs) for unit in ("a", "b")
    ]
    sender, receiver = ends
    try:
        blocks = KVAddress.compress(peer)
        ticket = receiver.open(0, 7, blocks)
        end = TOKENS * len(peer)
        address = KVAddress(model="m", form=FORM, begin=0, end=end, blocks=blocks, ticket=ticket)
        transfer = sender.claim(receiver.endpoint, address, 7, 0, end)
        full = np.full_like(own, TOKENS)
        transfer.put(BlockCopies(own, peer, np.zeros_like(own), full))
        async with asyncio.timeout(60):
            await transfer.arrived()
        assert receiver.received(ticket) == end
    finally:
        for one in ends:
            one.close_all()
    return counts


@pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
def test_scattered_blocks_are_a_descriptor_each_or_one_for_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    even, odd = (np.arange(first, BLOCKS, 2, dtype=np.int32) for first in (0, 1))
    adjacent: I32 = np.arange(48, dtype=np.int32)
    found: dict[str, list[int]] = {}
    for name, costs in (("plain", NEVER), ("staged", ALWAYS)):
        found[name] = asyncio.run(_send(costs, even, odd, monkeypatch))
        assert asyncio.run(_send(costs, adjacent, adjacent, monkeypatch)) == [1, 1, 1]
    assert found == {"plain": [16, 16, 16], "staged": [1, 1, 1]}


@pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
def test_nixl_measures_a_peer_and_what_staging_costs_there() -> None:
    ends = [NixlTransport(unit, Arena(512, BLOCK), HostPlace()) for unit in ("a", "b")]
    try:
        assert ends[0].measure(ends[1].endpoint) > 1e6
        costs = ends[0].staging_costs(ends[1].endpoint)
        assert costs is not None
        assert costs.descriptor >= 0
        assert costs.copy > 0
    finally:
        for one in ends:
            one.close_all()

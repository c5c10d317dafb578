"""The modelled KV plane: what a copy takes, and the fences that the real planes have."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvloom.lab.sim.links import ModelledPlane, ModelledTransfer, ModelledTransport, TimedLink
from kvloom.types.address import KVAddress, KVForm
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from kvloom.types.geometry import I32, Geometry
from kvloom.types.transfer import BlockCopies
from tests.lab.sim.fleets import now, virtually

FORM = KVForm.of(Geometry(layers=1, kv_heads=1, head_dim=16, itemsize=4, block_bytes=1024), "float32")
TOKENS = FORM.tokens_per_block  # 8, of 128 bytes each
BLOCKS, DIGEST = 10, 42
SECOND = 1024.0  # bytes a second: a block takes one


def ends(latency: float = 0.0) -> tuple[ModelledTransport, ModelledTransport]:
    """Returns a sender and a receiver. The sender's block i holds i + 1, the receiver's 0."""
    plane = ModelledPlane()
    arenas = np.zeros((2, BLOCKS, TOKENS), np.int64)
    arenas[0] += np.arange(1, BLOCKS + 1)[:, None]
    source, target = (
        plane.join(f"unit-{i}", BLOCKS, TimedLink(SECOND, latency), arena=arenas[i], slots=4)
        for i in range(2)
    )
    return source, target


def address(target: ModelledTransport, blocks: int = 4, first: int = 0) -> KVAddress:
    spots = np.arange(first, first + blocks, dtype=np.int32).reshape(blocks, 1, 1)
    return KVAddress(
        model="m",
        form=FORM,
        begin=0,
        end=blocks * TOKENS,
        blocks=KVAddress.compress(spots),
        ticket=target.open(0, DIGEST),
    )


def claim(source: ModelledTransport, target: ModelledTransport, where: KVAddress) -> ModelledTransfer:
    return source.claim(target.endpoint, where, DIGEST, 0, where.end)


def copies(*blocks: int) -> BlockCopies:
    own: I32 = np.array(blocks, np.int32)
    return BlockCopies(own, own, np.zeros_like(own), np.full_like(own, TOKENS))


@virtually
async def test_copies_share_the_way_out_and_each_has_its_latency() -> None:
    seen: list[tuple[str, float]] = []
    link = TimedLink(100.0, 0.5)
    for name, size in (("a", 100), ("b", 200), ("turn", 0), ("c", 100)):
        link.wait(size, lambda name=name: seen.append((name, now())))  # type: ignore[misc]
    await asyncio.sleep(10)
    link.wait(100, lambda: seen.append(("late", now())))
    await asyncio.sleep(10)
    assert [name for name, _ in seen] == ["turn", "a", "b", "c", "late"]
    assert [at for _, at in seen] == pytest.approx([0.0, 1.5, 3.5, 4.5, 11.5])


@virtually
async def test_a_transfer_takes_what_its_bytes_take() -> None:
    source, target = ends(0.1)
    where = address(target)
    transfer = claim(source, target, where)
    transfer.put(copies(0, 1, 2))
    transfer.put(copies(3))
    await asyncio.sleep(3.2)  # three blocks and the latency
    assert target.arena is not None
    assert target.arena[:4, 0].tolist() == [1, 2, 3, 0]
    assert target.received(where.ticket) == 0
    await transfer.arrived()
    assert now() == pytest.approx(4.2)
    assert target.arena[:4].tolist() == [[i + 1] * TOKENS for i in range(4)]
    assert target.received(where.ticket) == where.end
    assert target.close(where.ticket)


@virtually
async def test_two_transfers_share_a_units_way_out() -> None:
    source, target = ends()
    first, second = (claim(source, target, address(target, 2, at)) for at in (0, 2))
    first.put(copies(0, 1))
    second.put(copies(2, 3))
    await first.arrived()
    assert now() == pytest.approx(2.0)
    await second.arrived()
    assert now() == pytest.approx(4.0)


@virtually
async def test_layers_follow_each_other_as_they_come() -> None:
    source, target = ends()
    transfer = claim(source, target, address(target))
    for block in range(4):
        transfer.put(copies(block))
        await asyncio.sleep(1.5)
    await transfer.arrived()
    assert now() == pytest.approx(6.0)  # the last went out from 4.5 to 5.5


@virtually
async def test_a_ticket_that_is_copied_to_closes_later_and_nothing_is_written_after() -> None:
    source, target = ends()
    where = address(target)
    transfer = claim(source, target, where)
    transfer.put(copies(0))
    transfer.put(copies(1))
    await asyncio.sleep(0.5)
    assert not target.close(where.ticket)
    with pytest.raises(BadRequest, match="the reservation at unit-1 is over"):
        claim(source, target, where)
    with pytest.raises(BadRequest, match="the reservation at unit-1 is over"):
        await transfer.arrived()
    assert target.close(where.ticket)
    await asyncio.sleep(10)
    assert target.arena is not None
    assert target.arena[:2, 0].tolist() == [1, 0]  # the piece that was under way, and no more


@virtually
async def test_an_old_ticket_is_no_ticket() -> None:
    source, target = ends()
    old = address(target)
    assert target.close(old.ticket)
    new = address(target)
    assert new.ticket.slot == old.ticket.slot
    with pytest.raises(BadRequest, match="the reservation at unit-1 is over"):
        claim(source, target, old)
    with pytest.raises(ValueError, match="was closed before"):
        target.close(old.ticket)
    claim(source, target, new)


@virtually
async def test_claims_follow_on_each_other_and_come_back() -> None:
    source, target = ends()
    where = address(target)
    first = source.claim(target.endpoint, where, DIGEST, 0, TOKENS)
    with pytest.raises(BadRequest, match=f"claimed up to {TOKENS}, not 0"):
        claim(source, target, where)
    first.put(copies(0))
    first.abandon()
    with pytest.raises(Unavailable, match="given up"):
        await first.arrived()
    again = claim(source, target, where)
    again.put(copies(0, 1, 2, 3))
    await again.arrived()
    assert target.received(where.ticket) == where.end


@virtually
async def test_what_is_not_the_receivers_is_refused() -> None:
    source, target = ends()
    where = address(target)
    with pytest.raises(BadRequest, match="address"):
        source.claim(target.endpoint, where, DIGEST + 1, 0, where.end)
    with pytest.raises(BadRequest, match="outside the peer's arena"):
        claim(source, target, address(target, 4, BLOCKS - 3))
    for _ in range(2):
        target.open(0, DIGEST)
    with pytest.raises(QueueFull, match="too many reservations"):
        target.open(0, DIGEST)


@virtually
async def test_who_is_gone_is_named() -> None:
    source, target = ends()
    where = address(target)
    transfer = claim(source, target, where)
    transfer.put(copies(0))
    transfer.put(copies(1))
    await asyncio.sleep(0.5)
    target.plane.kill(target)
    with pytest.raises(Unavailable, match="unit-1 is gone"):
        await transfer.arrived()
    with pytest.raises(Unavailable, match="unit-1 cannot be reached"):
        claim(source, target, where)

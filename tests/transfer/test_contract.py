"""What every transport keeps to, between two processes."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import BadRequest, QueueFull
from tests.transfer.context import HEADS, LAYERS, Context
from tests.transfer.units import Unit
from tests.transfer.wire import BLOCKS, SLOTS

SPANS = [
    (0, 1),
    (7, 7),
    (0, 32),
    (0, 33),
    (31, 33),
    (5, 20),
    (32, 64),
    (30, 250),
    (64, 190),
    (21, 63),
    (0, 1000),
]


@pytest.mark.parametrize("head_dim", [16, 24])  # 32 tokens a block, and 21 with waste
@pytest.mark.parametrize(("begin", "end"), SPANS)
def test_what_arrives_is_what_was_there_and_nothing_else_changes(
    pair: tuple[Unit, Unit], begin: int, end: int, head_dim: int
) -> None:
    context = Context.make(*pair, begin, end, seed=begin + end, head_dim=head_dim)
    assert context.received() == begin
    context.send(begin, end)
    assert context.received() == end
    context.check(begin, end)
    assert context.receiver.call("close", ticket=context.ticket)


def test_one_put_of_all_layers(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 10, 500, seed=1)
    transfer = context.claim(10, 500)
    assert context.sender.call("state", number=transfer) in ("planned", "claimed")  # NIXL asks
    context.sender.result(context.put(transfer, context.whole(10, 500)))
    context.sender.call("arrived", number=transfer)
    assert context.sender.call("state", number=transfer) == "arrived"
    context.check(10, 500)
    context.receiver.close_soon(context.ticket)


def test_two_sends_to_one_address_follow_each_other(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 3, 90, seed=2)
    context.send(3, 40)
    assert context.received() == 40
    context.check(3, 40)
    context.send(40, 90)
    assert context.received() == 90
    context.check(3, 90)
    context.receiver.close_soon(context.ticket)


def test_a_send_that_ends_early_waits_for_the_one_before(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 90, seed=3)
    first, second = context.claim(0, 50), context.claim(50, 90)
    for copies in context.layers(50, 90):
        context.sender.result(context.put(second, copies))
    early = context.sender.start("arrived", number=second)
    assert context.received() == 0
    for copies in context.layers(0, 50):
        context.sender.result(context.put(first, copies))
    context.sender.call("arrived", number=first)
    context.sender.result(early)
    assert context.received() == 90
    context.check(0, 90)
    context.receiver.close_soon(context.ticket)


def test_tokens_are_claimed_once_and_in_order(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=5)
    context.send(0, 40)
    for begin, end in ((0, 40), (30, 50), (50, 60)):
        with pytest.raises(BadRequest, match="40 of this reservation"):
            context.send(begin, end)
    for begin, end in ((40, 101), (60, 50)):
        with pytest.raises(BadRequest, match="are not all in the address"):
            context.send(begin, end)
    assert context.received() == 40
    context.check(0, 40)
    context.receiver.close_soon(context.ticket)


def test_what_is_abandoned_can_be_claimed_again(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=6)
    transfer = context.claim(0, 60)
    context.sender.result(context.put(transfer, context.layers(0, 60)[0]))
    context.sender.call("abandon", number=transfer)
    with pytest.raises(BadRequest, match="given up"):
        context.sender.call("arrived", number=transfer)
    assert context.sender.call("state", number=transfer) == "failed"
    assert context.received() == 0
    context.send(0, 100)
    context.sender.call("abandon", number=transfer)  # has no effect
    context.check(0, 100)
    context.receiver.close_soon(context.ticket)


def test_a_closed_reservation_takes_nothing(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=7)
    assert context.receiver.call("close", ticket=context.ticket)
    assert context.receiver.call("close", ticket=context.ticket)
    with pytest.raises(BadRequest, match="over"):
        context.send(0, 100)
    with pytest.raises(BadRequest, match="over"):
        context.received()
    context.check_untouched()


def test_a_reservation_closed_between_claim_and_copy_takes_nothing(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=8)
    transfer = context.claim(0, 100)
    context.receiver.close_soon(context.ticket)
    for copies in context.layers(0, 100):
        context.sender.result(context.put(transfer, copies))
    with pytest.raises(BadRequest, match="reservation at receiver is over"):
        context.sender.call("arrived", number=transfer)
    context.check_untouched()


def test_a_slot_used_again_refuses_tickets_of_before(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=9)
    receiver, old = context.receiver, context.ticket
    opened = [receiver.open(0) for _ in range(SLOTS - 1)]
    with pytest.raises(QueueFull, match=str(SLOTS)):
        receiver.open(0)
    receiver.close_soon(old)
    again = receiver.open(0)
    assert again.slot == old.slot
    assert again.generation > old.generation
    with pytest.raises(BadRequest, match="over"):
        context.send(0, 100)
    assert receiver.call("close", ticket=old)
    assert receiver.call("received", ticket=again) == 0
    for ticket in (*opened, again):
        receiver.close_soon(ticket)
    context.check_untouched()


def _forgeries(address: KVAddress) -> Iterator[tuple[str, KVAddress]]:
    form = address.form
    changes: dict[str, dict[str, Any]] = {
        "arena of 512": {"blocks": struct.pack("<ii", BLOCKS, 4 * LAYERS * HEADS)},
        "block 534 of": {"blocks": struct.pack("<ii", BLOCKS - 1, 4 * LAYERS * HEADS)},
        "blocks for 4 pages": {"blocks": struct.pack("<ii", 0, 1)},
        "are not all": {"end": 50},
        "slot|over": {"ticket": Ticket(SLOTS, 1)},
        "over": {"ticket": Ticket(address.ticket.slot, address.ticket.generation + 1)},
        "blocks of": {"form": msgspec.structs.replace(form, block_bytes=8192)},
        "tokens of": {"form": msgspec.structs.replace(form, tokens_per_block=31)},
        "number format": {"form": msgspec.structs.replace(form, dtype="float33")},
        "tokens": {"form": msgspec.structs.replace(form, dtype="float16")},
        ">= 1": {"form": msgspec.structs.replace(form, head_dim=0)},
    }
    for words, change in changes.items():
        yield words, msgspec.structs.replace(address, **change)


def test_forged_addresses_are_refused(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=10)
    honest = context.address
    for words, forged in _forgeries(honest):
        with pytest.raises(BadRequest, match=words):
            context.sender.call("arrived", number=dataclasses.replace(context, address=forged).claim(0, 100))
    context.check_untouched()
    context.send(0, 100)
    context.check(0, 100)
    context.receiver.close_soon(honest.ticket)


@pytest.mark.parametrize("which", ["own", "peer", "offsets"])
def test_copies_outside_the_address_are_refused(pair: tuple[Unit, Unit], which: str) -> None:
    context = Context.make(*pair, 0, 100, seed=11)
    transfer, copies = context.claim(0, 100), context.layers(0, 100)[0]
    stray = set(range(BLOCKS)) - set(context.address.block_map.ravel().tolist())
    value = {"own": BLOCKS, "peer": min(stray), "offsets": 32}[which]
    array = getattr(copies, which).copy()
    array[-1] = value
    context.sender.result(context.put(transfer, dataclasses.replace(copies, **{which: array})))
    with pytest.raises(BadRequest, match="outside the address"):
        context.sender.call("arrived", number=transfer)
    context.check_untouched()
    context.receiver.close_soon(context.ticket)


def test_endpoints_that_cannot_be_are_refused(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=12)
    good = context.receiver.endpoint
    other = Endpoint(unit="receiver", kind="modelled", where=good.where)
    broken = Endpoint(unit="receiver", kind=good.kind, where=good.where[:-3])
    for forged in (other, broken):
        with pytest.raises(BadRequest, match="peer:"):
            context.sender.call("arrived", number=context.sender.claim(forged, context.address, 0, 0, 100))
    context.send(0, 100)
    context.check(0, 100)
    context.receiver.close_soon(context.ticket)

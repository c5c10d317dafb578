"""What every transport keeps to, between two processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest

from kvloom.core.address import Endpoint, KVAddress, Ticket
from kvloom.core.errors import BadRequest, KvloomError, QueueFull, Unavailable
from tests.transport.context import HEADS, LAYERS, Context
from tests.transport.units import Unit, units
from tests.transport.wire import BLOCKS, SLOTS

NIXL = find_spec("nixl_cu13") is not None
KINDS = [
    "shm",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'"),
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Unit, Unit]]:
    """A sender and a receiver that outlive a test."""
    with units(request.param, "sender", "receiver") as (sender, receiver):
        yield sender, receiver


@pytest.fixture(params=KINDS)
def mortal(request: pytest.FixtureRequest) -> Iterator[tuple[Unit, Unit]]:
    """A sender and a receiver for one test."""
    with units(request.param, "sender", "receiver") as (sender, receiver):
        yield sender, receiver


SPANS = [(0, 1), (0, 32), (0, 33), (31, 33), (5, 20), (32, 64), (30, 250), (64, 190), (21, 63), (0, 1000)]


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


def test_one_parcel_of_all_layers(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 10, 500, seed=1)
    shipment = context.ship(10, 500)
    context.sender.result(context.put(shipment, context.whole(10, 500)))
    context.sender.call("arrived", number=shipment)
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
    first, second = context.ship(0, 50), context.ship(50, 90)
    for parcel in context.layers(50, 90):
        context.sender.result(context.put(second, parcel))
    early = context.sender.start("arrived", number=second)
    assert context.received() == 0
    for parcel in context.layers(0, 50):
        context.sender.result(context.put(first, parcel))
    context.sender.call("arrived", number=first)
    context.sender.result(early)
    assert context.received() == 90
    context.check(0, 90)
    context.receiver.close_soon(context.ticket)


def test_nothing_to_send_is_fine(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 7, 7, seed=4)
    context.send(7, 7)
    assert context.received() == 7
    context.check_untouched()
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
    shipment = context.ship(0, 60)
    context.sender.result(context.put(shipment, context.layers(0, 60)[0]))
    context.sender.call("abandon", number=shipment)
    with pytest.raises(BadRequest, match="given up"):
        context.sender.call("arrived", number=shipment)
    assert context.received() == 0
    context.send(0, 100)
    context.sender.call("abandon", number=shipment)  # has no effect
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
    shipment = context.ship(0, 100)
    context.receiver.close_soon(context.ticket)
    for parcel in context.layers(0, 100):
        context.sender.result(context.put(shipment, parcel))
    with pytest.raises(BadRequest, match="reservation at receiver is over"):
        context.sender.call("arrived", number=shipment)
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
        "arena of 512": {"blocks": ((BLOCKS, 4 * LAYERS * HEADS),)},
        "block 534 of": {"blocks": ((BLOCKS - 1, 4 * LAYERS * HEADS),)},
        "blocks for 4 pages": {"blocks": ((0, 1),)},
        "are not all": {"end": 50},
        "slot|over": {"ticket": Ticket(SLOTS, 1)},
        "over": {"ticket": Ticket(address.ticket.slot, address.ticket.generation + 1)},
        "blocks of": {"form": msgspec.structs.replace(form, block_bytes=8192)},
        "tokens of": {"form": msgspec.structs.replace(form, tokens_per_block=31)},
        "number format": {"form": msgspec.structs.replace(form, dtype="float33")},
        "tokens": {"form": msgspec.structs.replace(form, dtype="float16")},
        "sizes": {"form": msgspec.structs.replace(form, head_dim=0)},
    }
    for words, change in changes.items():
        yield words, msgspec.structs.replace(address, **change)


def test_forged_addresses_are_refused(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=10)
    honest = context.address
    for words, forged in _forgeries(honest):
        with pytest.raises(BadRequest, match=words):
            context.sender.call("arrived", number=dataclasses.replace(context, address=forged).ship(0, 100))
    context.check_untouched()
    context.send(0, 100)
    context.check(0, 100)
    context.receiver.close_soon(honest.ticket)


@pytest.mark.parametrize("which", ["own", "peer", "offsets"])
def test_parcels_outside_the_address_are_refused(pair: tuple[Unit, Unit], which: str) -> None:
    context = Context.make(*pair, 0, 100, seed=11)
    shipment, parcel = context.ship(0, 100), context.layers(0, 100)[0]
    stray = set(range(BLOCKS)) - set(context.address.block_map().ravel().tolist())
    value = {"own": BLOCKS, "peer": min(stray), "offsets": 32}[which]
    array = getattr(parcel, which).copy()
    array[-1] = value
    context.sender.result(context.put(shipment, dataclasses.replace(parcel, **{which: array})))
    with pytest.raises(BadRequest, match="outside the address"):
        context.sender.call("arrived", number=shipment)
    context.check_untouched()
    context.receiver.close_soon(context.ticket)


def test_endpoints_that_cannot_be_are_refused(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=12)
    good = context.receiver.endpoint
    other = Endpoint(unit="receiver", kind="modelled", where=good.where)
    broken = Endpoint(unit="receiver", kind=good.kind, where=good.where[:-3])
    for forged in (other, broken):
        with pytest.raises(BadRequest, match="peer:"):
            context.sender.call("arrived", number=context.sender.ship(forged, context.address, 0, 100))
    context.send(0, 100)
    context.check(0, 100)
    context.receiver.close_soon(context.ticket)


def test_after_close_says_true_a_stalled_sender_writes_nothing(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=13)
    sender, receiver = pair
    shipment = context.ship(0, 100)
    sender.call("set_gate", where="before", skip=1)
    context.put(shipment, context.whole(0, 100))
    sender.call("at_gate")
    receiver.close_soon(context.ticket)
    receiver.call("fill", seed=99)  # the blocks are used for something else
    after = receiver.arena.copy()
    sender.call("ungate")
    with pytest.raises((BadRequest, Unavailable), match="receiver"):
        sender.call("arrived", number=shipment)
    np.testing.assert_array_equal(receiver.arena, after)


def test_shipments_that_have_not_arrived_fail_at_the_end(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=14)
    first, second = context.ship(0, 50), context.ship(50, 100)
    early = context.sender.start("arrived", number=second)
    context.sender.call("close_all")
    with pytest.raises(Unavailable, match="stopping"):
        context.sender.result(early)
    context.sender.result(context.put(first, context.whole(0, 50)))
    with pytest.raises(Unavailable, match="stopping"):
        context.sender.call("arrived", number=first)
    context.receiver.close_soon(context.ticket)
    context.check_untouched()


def test_a_receiver_that_dies_makes_the_send_fail(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=15)
    sender, receiver = mortal
    shipment = context.ship(0, 100)
    sender.call("set_gate", where="before", skip=2)
    context.put(shipment, context.whole(0, 100))
    sender.call("at_gate")
    receiver.kill()
    sender.call("ungate")
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=shipment)
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=context.ship(0, 100))


def test_a_sender_that_dies_half_way_leaves_a_reservation_that_closes(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=16)
    sender, receiver = mortal
    shipment = context.ship(0, 100)
    sender.call("set_gate", where="inside", skip=2)
    context.put(shipment, context.whole(0, 100))
    sender.call("at_gate")
    sender.kill()
    assert context.received() == 0
    receiver.close_soon(context.ticket)
    assert receiver.call("close", ticket=receiver.open(0))


def test_a_restarted_receiver_is_another_peer(mortal: tuple[Unit, Unit]) -> None:
    sender, receiver = mortal
    context = Context.make(sender, receiver, 0, 100, seed=17)
    context.send(0, 50)
    with units(receiver.endpoint.kind, "receiver") as (restarted,):
        receiver.kill()
        with pytest.raises(KvloomError, match="receiver"):
            context.send(50, 100)
        again = Context.make(sender, restarted, 0, 100, seed=18)
        again.send(0, 100)
        again.check(0, 100)

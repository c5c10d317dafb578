"""Stalled, stopped, killed and restarted units, whatever the transport."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from tests.transfer.context import Context
from tests.transfer.units import Unit, units


def test_after_close_says_true_a_stalled_sender_writes_nothing(pair: tuple[Unit, Unit]) -> None:
    context = Context.make(*pair, 0, 100, seed=13)
    sender, receiver = pair
    transfer = context.stall("before", skip=1)
    assert sender.call("state", number=transfer) == "copying"
    receiver.close_soon(context.ticket)
    receiver.call("fill", seed=99)  # the blocks are used for something else
    after = receiver.arena.copy()
    sender.call("ungate")
    with pytest.raises((BadRequest, Unavailable), match="receiver"):
        sender.call("arrived", number=transfer)
    np.testing.assert_array_equal(receiver.arena, after)


def test_transfers_that_have_not_arrived_fail_at_the_end(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=14)
    first, second = context.claim(0, 50), context.claim(50, 100)
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
    transfer = context.stall("before", skip=2)
    receiver.kill()
    sender.call("ungate")
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=transfer)
    with pytest.raises(Unavailable, match="receiver"):
        sender.call("arrived", number=context.claim(0, 100))


def test_a_sender_that_dies_half_way_leaves_a_reservation_that_closes(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=16)
    sender, receiver = mortal
    context.stall("inside", skip=2)
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

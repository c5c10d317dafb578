"""A transport whose thread has met what nobody foresaw: nobody waits for it, and it is asked for no more."""

from __future__ import annotations

import pytest

from kvloom.types.errors import Unavailable
from tests.transfer.context import Context
from tests.transfer.units import Unit

FAILED = r"the KV plane of this unit has failed \(TypeError\(.*restart the unit"


def test_all_that_has_not_arrived_fails_and_nothing_more_is_sent(mortal: tuple[Unit, Unit]) -> None:
    context = Context.make(*mortal, 0, 100, seed=30)
    sender, receiver = mortal
    context.send(0, 30)
    broken, waiting, silent = context.claim(30, 50), context.claim(50, 70), context.claim(70, 90)
    early = sender.start("arrived", number=waiting)  # it waits for what goes before
    sender.call("put_junk", number=broken)
    with pytest.raises(Unavailable, match=FAILED):
        sender.result(early)
    sender.result(context.put(silent, context.whole(70, 90)))
    for transfer in (silent, broken):
        with pytest.raises(Unavailable, match=FAILED):
            sender.call("arrived", number=transfer)
        sender.call("abandon", number=transfer)
    with pytest.raises(Unavailable, match=FAILED):
        context.claim(90, 100)
    assert context.received() == 30
    context.check(0, 30)
    receiver.close_soon(context.ticket)
    sender.call("close_all")
    with pytest.raises(Unavailable, match=FAILED):
        context.claim(90, 100)


def test_where_the_thread_is_needed_for_receiving_no_reservation_is_opened(
    mortal: tuple[Unit, Unit],
) -> None:
    """A ledger needs none; over NIXL nobody would answer the senders. What is open can be closed."""
    context = Context.make(*mortal, 0, 100, seed=32)
    sender, _ = mortal
    back = sender.open(0, context.address.digest(context.prompt, sender.endpoint))
    transfer = context.claim(0, 100)
    sender.call("put_junk", number=transfer)
    with pytest.raises(Unavailable, match=FAILED):
        sender.call("arrived", number=transfer)
    if sender.endpoint.kind != "nixl":
        assert sender.call("close", ticket=sender.open(0))
    else:
        with pytest.raises(Unavailable, match=FAILED):
            sender.open(0)
    assert sender.call("received", ticket=back) == 0
    assert sender.call("close", ticket=back)
    context.receiver.close_soon(context.ticket)

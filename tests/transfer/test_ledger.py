"""The ledger alone: both its ends in one process, which its locks keep apart like two."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvloom.transfer.ledger import Ledger, PeerLedger
from kvloom.types.address import Ticket
from kvloom.types.errors import BadRequest, QueueFull

DIGEST = -(2**63)


@pytest.fixture
def ends() -> Iterator[tuple[Ledger, PeerLedger]]:
    ledger = Ledger(slots=2)
    fd = os.open(f"/proc/self/fd/{ledger.fd}", os.O_RDWR)
    yield ledger, PeerLedger("u", fd, 2)
    os.close(fd)
    ledger.release()


def test_claims_and_deliveries_are_in_order(ends: tuple[Ledger, PeerLedger]) -> None:
    ledger, peer = ends
    ticket = ledger.open(5, DIGEST)
    assert ledger.received(ticket) == 5
    with pytest.raises(BadRequest, match="up to 5 "):
        peer.claim(ticket, DIGEST, 6, 9)
    peer.claim(ticket, DIGEST, 5, 9)
    peer.claim(ticket, DIGEST, 9, 12)
    assert not peer.deliver(ticket, 9, 12)
    assert ledger.received(ticket) == 5
    assert peer.deliver(ticket, 5, 9)
    assert peer.deliver(ticket, 9, 12)
    assert peer.deliver(ticket, 9, 9)  # of no tokens
    assert ledger.received(ticket) == 12


def test_whoever_shows_another_digest_claims_nothing(ends: tuple[Ledger, PeerLedger]) -> None:
    ledger, peer = ends
    ticket, other = ledger.open(0, 7), ledger.open(0, 2**63 - 1)
    for forged in (8, -7, 2**63 - 1, DIGEST):
        with pytest.raises(BadRequest, match="address: the reservation at u is for other blocks"):
            peer.claim(ticket, forged, 0, 4)
    peer.claim(ticket, 7, 0, 4)
    peer.claim(other, 2**63 - 1, 0, 4)
    ledger.close(ticket)
    with pytest.raises(BadRequest, match="over"):
        peer.claim(ticket, 7, 4, 5)
    peer.claim(ledger.open(0, 9), 9, 0, 4)


def test_only_the_last_claim_can_be_given_back(ends: tuple[Ledger, PeerLedger]) -> None:
    ledger, peer = ends
    ticket = ledger.open(0, DIGEST)
    peer.claim(ticket, DIGEST, 0, 4)
    peer.claim(ticket, DIGEST, 4, 8)
    peer.give_back(ticket, 0, 4)
    with pytest.raises(BadRequest, match="up to 8 "):
        peer.claim(ticket, DIGEST, 0, 4)
    peer.give_back(ticket, 4, 8)
    peer.claim(ticket, DIGEST, 4, 6)
    ledger.close(ticket)
    again = [ledger.open(4, DIGEST), ledger.open(4, DIGEST)]
    peer.give_back(ticket, 3, 4)  # long over
    for ticket in again:
        peer.claim(ticket, DIGEST, 4, 5)


def test_close_waits_for_writers_and_stops_the_next(ends: tuple[Ledger, PeerLedger]) -> None:
    ledger, peer = ends
    ticket = ledger.open(0, DIGEST)
    peer.claim(ticket, DIGEST, 0, 4)
    with peer.writing(ticket):
        assert not ledger.close(ticket)
        assert ledger.received(ticket) == 0
    for refused in (lambda: peer.deliver(ticket, 0, 4), lambda: peer.claim(ticket, DIGEST, 4, 5)):
        with pytest.raises(BadRequest, match="the reservation at u is over"):
            refused()
    assert ledger.close(ticket)
    with pytest.raises(BadRequest, match="over"):
        ledger.received(ticket)


def test_a_claim_holds_up_the_slot_and_not_its_closing(ends: tuple[Ledger, PeerLedger]) -> None:
    """The blocks come back at once; the row, into which the claimer may still write, when it is done."""
    ledger, peer = ends
    ticket, other = ledger.open(0, DIGEST), ledger.open(2, DIGEST)
    with peer._claiming(ticket) as row:
        assert ledger.close(ticket)
        with pytest.raises(QueueFull):
            ledger.open(5, DIGEST)
        row[:] = -1
    with pytest.raises(BadRequest, match="the reservation at u is over"):
        peer.deliver(ticket, 0, 4)
    new = ledger.open(5, DIGEST)
    assert (new.slot, new.generation) == (ticket.slot, ticket.generation + 1)
    assert (ledger.received(new), ledger.received(other)) == (5, 2)
    peer.claim(new, DIGEST, 5, 6)


def test_a_slot_comes_back_with_another_generation(ends: tuple[Ledger, PeerLedger]) -> None:
    ledger, peer = ends
    old, other = ledger.open(1, DIGEST), ledger.open(2, DIGEST)
    with pytest.raises(QueueFull):
        ledger.open(3, DIGEST)
    with peer.writing(old):
        assert not ledger.close(old)
        with pytest.raises(QueueFull):  # until nobody writes there
            ledger.open(3, DIGEST)
    assert ledger.close(old)
    new = ledger.open(3, DIGEST)
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    assert ledger.close(old)
    assert ledger.received(new) == 3
    assert ledger.received(other) == 2
    with pytest.raises(BadRequest, match="over"):
        peer.claim(old, DIGEST, 1, 2)
    peer.claim(new, DIGEST, 3, 4)


def test_slots_that_are_not_are_refused(ends: tuple[Ledger, PeerLedger]) -> None:
    with pytest.raises(BadRequest, match="no slot 2"):
        ends[1].claim(Ticket(2, 1), DIGEST, 0, 1)
    with pytest.raises(BadRequest, match="over"):
        ends[1].claim(Ticket(0, 1), DIGEST, 0, 1)

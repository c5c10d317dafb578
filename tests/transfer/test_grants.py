"""Who may write, where messages and a clock decide it."""

from __future__ import annotations

from kvloom.transfer.grants import (
    GRACE,
    ClaimRefused,
    ClaimRenewal,
    Delivered,
    FromReceiver,
    Granted,
    Grants,
    Quit,
    WriteClaim,
    WritesDone,
)
from kvloom.types.address import Ticket

GRANT = 2.0
LONG = GRANT + GRACE
DIGEST = 7


def _grants() -> Grants:
    return Grants("u", 8, GRANT)


def _claim(
    grants: Grants, ticket: Ticket, number: int, begin: int, end: int, now: float, digest: int = DIGEST
) -> FromReceiver:
    ((agent, answer),) = grants.hear("s", WriteClaim(number, ticket, digest, begin, end, b""), now)
    assert agent == "s"
    return answer


def test_a_silent_sender_holds_a_reservation_for_as_long_as_its_grant() -> None:
    grants = _grants()
    ticket = grants.open(0, DIGEST)
    assert _claim(grants, ticket, 1, 0, 5, now=10.0) == Granted(1)
    closed, letters = grants.close(ticket, now=11.0)
    assert not closed
    assert letters == [("s", ClaimRefused(1, "the reservation at u is over"))]
    assert grants.close(ticket, now=10.0 + LONG - 0.01) == (False, [])
    assert grants.close(ticket, now=10.0 + LONG) == (True, [])


def test_renewing_holds_on_until_it_closes() -> None:
    grants = _grants()
    ticket = grants.open(0, DIGEST)
    _claim(grants, ticket, 1, 0, 5, now=0.0)
    assert grants.hear("s", ClaimRenewal(1), now=2.0) == [("s", Granted(1))]
    assert not grants.close(ticket, now=LONG)[0]
    ((_, refused),) = grants.hear("s", ClaimRenewal(1), now=LONG)
    assert isinstance(refused, ClaimRefused)
    assert grants.close(ticket, now=2.0 + LONG)[0]


def test_who_quits_or_is_done_is_not_waited_for() -> None:
    grants = _grants()
    ticket = grants.open(0, DIGEST)
    _claim(grants, ticket, 1, 0, 5, now=0.0)
    _claim(grants, ticket, 2, 5, 9, now=0.0)
    assert grants.hear("s", WritesDone(2), now=0.1) == []
    assert grants.received(ticket) == 0
    assert not grants.close(ticket, now=0.2)[0]
    assert grants.hear("s", Quit(1), now=0.3) == []
    assert grants.close(ticket, now=0.3)[0]


def test_what_is_there_counts_once_what_is_before_it_is_there() -> None:
    grants = _grants()
    ticket = grants.open(0, DIGEST)
    for number, (begin, end) in enumerate([(0, 5), (5, 5), (5, 9)]):
        assert _claim(grants, ticket, number, begin, end, now=0.0) == Granted(number)
    assert grants.hear("s", WritesDone(2), now=0.1) == []
    assert grants.hear("s", WritesDone(0), now=0.2) == [("s", Delivered(0)), ("s", Delivered(2))]
    assert grants.received(ticket) == 9
    assert grants.hear("s", WritesDone(1), now=0.3) == [("s", Delivered(1))]  # which was of no tokens
    assert grants.received(ticket) == 9


def test_a_claim_that_has_run_out_is_free_again() -> None:
    grants = _grants()
    ticket = grants.open(0, DIGEST)
    _claim(grants, ticket, 1, 0, 5, now=0.0)
    assert isinstance(_claim(grants, ticket, 2, 0, 5, now=LONG - 0.01), ClaimRefused)
    assert _claim(grants, ticket, 3, 0, 5, now=LONG) == Granted(3)
    assert isinstance(grants.hear("s", WritesDone(1), now=LONG)[0][1], ClaimRefused)
    assert grants.received(ticket) == 0


def test_whoever_shows_another_digest_claims_nothing() -> None:
    grants = _grants()
    ticket, other = grants.open(0, DIGEST), grants.open(0, DIGEST + 1)
    refused = _claim(grants, ticket, 1, 0, 5, now=0.0, digest=DIGEST + 1)
    assert isinstance(refused, ClaimRefused)
    assert refused.reason.startswith("address: the reservation at u is for other blocks")
    assert grants.hear("s", ClaimRenewal(1), now=0.1) == [
        ("s", ClaimRefused(1, "the reservation at u is over"))
    ]
    assert _claim(grants, ticket, 2, 0, 5, now=0.2) == Granted(2)
    assert grants.close(other, now=0.2) == (True, [])

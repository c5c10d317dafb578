"""What the plane's thread tells a peer that connects slowly, or is silent; the test plays the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from kvloom.core.address import Endpoint, Ticket
from kvloom.core.arrays import I32
from kvloom.core.errors import Unavailable
from kvloom.core.shipment import Parcel
from kvloom.transport.agent import Agent, Spans
from kvloom.transport.grants import Grants
from kvloom.transport.messages import Claim, Delivered, Done, FromReceiver, FromSender, Granted, Message
from kvloom.transport.nixl_plane import NixlPlane
from kvloom.transport.nixl_shipment import NixlShipment, Where
from kvloom.transport.room import Room

GRANT = 2.0
BLOCK = 64
PEER = Where("peer-1", b"", 0, 4, BLOCK)


class Network(Agent):
    """`now` is its clock. answer: what the peer says to each message. connecting: seconds. Transfers do not
    end; failing: nor do they begin well."""

    def __init__(
        self,
        answer: Callable[[FromSender], FromReceiver | None],
        *,
        connecting: float = 0.0,
        failing: bool = False,
    ) -> None:
        self.name, self.metadata = "own-1", b"own"
        self.now = 0.0
        self.log: list[str] = []
        self._answer, self._connecting, self._failing = answer, connecting, failing
        self._heard: list[tuple[str, bytes]] = []

    def meet(self, name: str, metadata: bytes) -> None:
        self.log.append("meet")
        self.now += self._connecting

    def part(self, name: str) -> None:
        self.log.append("part")

    def tell(self, name: str, message: bytes) -> None:
        said: FromSender = msgspec.msgpack.decode(message, type=Message)
        self.log.append(type(said).__name__)
        answer = self._answer(said)
        if answer is None:
            self.now += GRANT  # it is waited for
        else:
            self._heard.append((name, msgspec.msgpack.encode(answer)))

    def heard(self) -> list[tuple[str, bytes]]:
        heard, self._heard = self._heard, []
        return heard

    def write(self, name: str, own: Spans, peer: Spans) -> int:
        self.log.append("write")
        if self._failing:
            raise Unavailable("writing failed")
        return 1

    def written(self, name: str, transfer: int) -> bool:
        self.now += GRANT / 8
        return False

    def drop(self, transfer: int) -> None:
        self.log.append("drop")

    def close(self) -> None:
        pass


@contextmanager
def _plane(network: Network) -> Iterator[NixlPlane]:
    plane = NixlPlane(network, 0, Grants("own", 8, GRANT), GRANT, lambda: network.now)
    try:
        yield plane
    finally:
        plane.close()


def _begin(plane: NixlPlane) -> NixlShipment:
    room = Room(BLOCK, 4, 8, 4, np.ones(4, np.bool_))
    peer = Endpoint(unit="peer", kind="nixl", where=msgspec.msgpack.encode(PEER))
    shipment = NixlShipment(plane.submit, peer, PEER, room, Ticket(0, 1), 0, 0, 4)
    plane.start(shipment)
    return shipment


def _send(network: Network, *parcels: Parcel) -> None:
    async def send() -> None:
        with _plane(network) as plane:
            shipment = _begin(plane)
            for parcel in parcels:
                shipment.put(parcel)
            await asyncio.wait_for(shipment.arrived(), 30)

    asyncio.run(send())


def _ints(*values: int) -> I32:
    return np.array(values, np.int32)


def _parcel() -> Parcel:
    return Parcel(_ints(0), _ints(1), _ints(0), _ints(4))


def _willing(message: FromSender) -> FromReceiver | None:
    return Delivered(message.number) if isinstance(message, Done) else Granted(message.number)


def _claims_only(message: FromSender) -> FromReceiver | None:
    return Granted(message.number) if isinstance(message, Claim) else None


def test_to_connect_may_take_longer_than_a_grant() -> None:
    network = Network(_willing, connecting=3 * GRANT)
    _send(network)
    assert network.log == ["meet", "Claim", "Done"]


def test_a_silent_peer_is_told_that_nothing_is_written_before_it_is_parted_from() -> None:
    network = Network(lambda message: None)
    with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
        _send(network)
    assert network.log == ["meet", "Claim", "Quit", "part"]


def test_while_a_transfer_is_under_way_a_silent_peer_is_told_nothing() -> None:
    """It may still be writing: the peer waits for the end of its grant."""
    network = Network(_claims_only)
    with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
        _send(network, _parcel())
    assert network.log == ["meet", "Claim", "write", "Renew", "drop", "part"]


def test_after_a_write_that_failed_the_peer_is_told_nothing() -> None:
    """Part of it may be on its way: the peer waits for the end of its grant."""
    network = Network(_willing, failing=True)
    with pytest.raises(Unavailable, match="peer is gone: writing failed"):
        _send(network, _parcel())
    assert network.log == ["meet", "Claim", "write", "part"]


def test_a_peer_that_answers_another_shipment_is_not_parted_from() -> None:
    """Until the second is lost, whose answers go astray, those to the first take a quarter of a grant."""

    def answer(message: FromSender) -> FromReceiver | None:
        if message.number == 2:
            return Granted(0)
        if "Quit" not in network.log:
            network.now += GRANT / 4
        return _willing(message)

    network = Network(answer)

    async def send() -> None:
        with _plane(network) as plane:
            well, lost = _begin(plane), _begin(plane)
            with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
                await asyncio.wait_for(lost.arrived(), 30)
            await asyncio.wait_for(well.arrived(), 30)

    asyncio.run(send())
    assert "Quit" in network.log
    assert "part" not in network.log

"""What the plane's thread tells a peer that connects slowly, or is silent, while the test plays the network.

And what NIXL itself is told of a unit's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from kvloom.kv.arena import Arena
from kvloom.transfer.grants import (
    ClaimRefused,
    Delivered,
    FromReceiver,
    FromSender,
    Granted,
    Grants,
    WriteClaim,
    WritesDone,
)
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import Agent, ArenaPlace, HostPlace, NixlEndpoint, Spans
from kvloom.transfer.nixl_plane import NixlPlane, NixlTransfer
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.transfer import BlockCopies, DeviceEvent
from tests.processes import DEADLINE
from tests.transfer.kinds import NIXL

GRANT = 2.0
HOST = HostPlace()
BLOCK = 64
FORM = KVForm(layers=1, kv_heads=1, head_dim=2, dtype="float32", block_bytes=BLOCK, tokens_per_block=4)
ADDRESS = KVAddress(model="m", form=FORM, begin=0, end=4, blocks=b"", ticket=Ticket(0, 1))
PEER = NixlEndpoint("peer-1", b"", 3, 0, 4, BLOCK)


class Network(Agent):
    """`now` is its clock. answer: what the peer says to each message. connecting: seconds. failing: no
    transfer begins well. ending: each ends at once, instead of never."""

    def __init__(
        self,
        answer: Callable[[FromSender], FromReceiver | None],
        *,
        connecting: float = 0.0,
        failing: bool = False,
        ending: bool = False,
    ) -> None:
        self.name, self.metadata = "own-1", b"own"
        self.now = 0.0
        self.log: list[str] = []
        self.written_to: list[tuple[Spans, Spans]] = []
        self._answer, self._connecting, self._failing, self.ending = answer, connecting, failing, ending
        self._heard: list[tuple[str, bytes]] = []

    def meet(self, name: str, metadata: bytes) -> None:
        self.log.append("meet")
        self.now += self._connecting

    def part(self, name: str) -> None:
        self.log.append("part")

    def tell(self, name: str, message: bytes) -> None:
        said = msgspec.msgpack.decode(message, type=FromSender)
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
        self.written_to += [(own, peer)]
        if self._failing:
            raise Unavailable("writing failed")
        return 1

    def written(self, name: str, transfer: int) -> bool:
        self.now += GRANT / 8
        return self.ending

    def drop(self, transfer: int) -> None:
        self.log.append("drop")

    def close(self) -> None:
        pass


@contextmanager
def _plane(network: Network) -> Iterator[NixlPlane]:
    plane = NixlPlane(network, HOST, 0, Grants("own", 8, GRANT), GRANT, lambda: network.now)
    try:
        yield plane
    finally:
        plane.close()


def _begin(plane: NixlPlane, place: ArenaPlace) -> NixlTransfer:
    target = WriteTarget(BLOCK, 4, 8, 4, np.ones(4, np.bool_))
    peer = Endpoint(unit="peer", kind="nixl", where=msgspec.msgpack.encode(PEER))
    transfer = NixlTransfer(plane.submit, place, peer, PEER, target, ADDRESS, 0, 0, 4)
    plane.order(transfer)
    return transfer


def _send(network: Network, *several: BlockCopies, place: ArenaPlace = HOST) -> None:
    async def send() -> None:
        with _plane(network) as plane:
            transfer = _begin(plane, place)
            for copies in several:
                transfer.put(copies)
            await asyncio.wait_for(transfer.arrived(), DEADLINE)

    asyncio.run(send())


def _ints(*values: int) -> I32:
    return np.array(values, np.int32)


def _copies() -> BlockCopies:
    return BlockCopies(_ints(0), _ints(1), _ints(0), _ints(4))


def _willing(message: FromSender) -> FromReceiver | None:
    return Delivered(message.number) if isinstance(message, WritesDone) else Granted(message.number)


def _refused(message: FromSender) -> FromReceiver:
    return ClaimRefused(message.number, "no reservation")


async def _until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not met():  # noqa: ASYNC110 - the other side is a thread that knows of no event
            await asyncio.sleep(0)


def _claims_only(message: FromSender) -> FromReceiver | None:
    return Granted(message.number) if isinstance(message, WriteClaim) else None


def test_a_peer_that_tells_of_an_arrival_before_all_is_written_is_not_believed() -> None:
    def answer(message: FromSender) -> FromReceiver:
        network.now += GRANT
        return Delivered(message.number)

    network = Network(answer)
    with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
        _send(network)


def test_to_connect_may_take_longer_than_a_grant() -> None:
    network = Network(_willing, connecting=3 * GRANT)
    _send(network)
    assert network.log == ["meet", "WriteClaim", "WritesDone"]


def test_a_silent_peer_is_told_that_nothing_is_written_before_it_is_parted_from() -> None:
    network = Network(lambda message: None)
    with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
        _send(network)
    assert network.log == ["meet", "WriteClaim", "Quit", "part"]


def test_while_a_transfer_is_under_way_a_silent_peer_is_told_nothing() -> None:
    """It may still be writing: the peer waits for the end of its grant."""
    network = Network(_claims_only)
    with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
        _send(network, _copies())
    assert network.log == ["meet", "WriteClaim", "write", "ClaimRenewal", "drop", "part"]


def test_a_write_that_nobody_wants_any_more_keeps_its_grant_until_it_ends() -> None:
    """The blocks are another's only after that."""
    network = Network(_willing)

    async def send() -> None:
        with _plane(network) as plane:
            transfer = _begin(plane, HOST)
            transfer.put(_copies())
            await _until(lambda: "write" in network.log)
            transfer.abandon()
            await _until(lambda: network.now > 5 * GRANT)
            assert "ClaimRenewal" in network.log
            assert transfer.deadline > network.now - GRANT
            network.ending = True
            with pytest.raises(BadRequest, match="given up"):
                await asyncio.wait_for(transfer.arrived(), DEADLINE)

    asyncio.run(send())
    assert network.log[-2:] == ["drop", "Quit"]
    assert "part" not in network.log


def test_a_write_that_is_refused_while_it_is_under_way_is_let_go_of_with_the_grant() -> None:
    network = Network(
        lambda message: _willing(message) if isinstance(message, WriteClaim) else _refused(message)
    )
    with pytest.raises(BadRequest, match="no reservation"):
        _send(network, _copies())
    assert network.log == ["meet", "WriteClaim", "write", "ClaimRenewal", "drop", "part"]
    assert network.now < 3 * GRANT


def test_after_a_write_that_failed_the_peer_is_told_nothing() -> None:
    """Part of it may be on its way: the peer waits for the end of its grant."""
    network = Network(_willing, failing=True)
    with pytest.raises(Unavailable, match="peer is gone: writing failed"):
        _send(network, _copies())
    assert network.log == ["meet", "WriteClaim", "write", "part"]


def test_a_peer_that_answers_another_transfer_is_not_parted_from() -> None:
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
            well, lost = _begin(plane, HOST), _begin(plane, HOST)
            with pytest.raises(Unavailable, match="peer is gone: no answer in 2 s"):
                await asyncio.wait_for(lost.arrived(), DEADLINE)
            await asyncio.wait_for(well.arrived(), DEADLINE)

    asyncio.run(send())
    assert "Quit" in network.log
    assert "part" not in network.log


class _Computing:
    """Not done until it was asked `times` times; then, with a problem, it has failed."""

    def __init__(self, times: int, asked: Callable[[], None], problem: str = "") -> None:
        self._left, self._asked, self._problem = times, asked, problem

    def wait(self) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        self._asked()
        self._left -= 1
        if self._left <= 0 and self._problem:
            raise RuntimeError(self._problem)
        return self._left <= 0


class _Gpu(HostPlace):
    """GPU 5, whose work takes half a grant each time that somebody asks whether it is done."""

    index = 5

    def __init__(self, network: Network, times: int, problem: str = "") -> None:
        super().__init__()
        self._network, self._times, self._problem = network, times, problem

    def mark(self) -> DeviceEvent:
        if self._times == 0:
            raise RuntimeError(self._problem)
        return _Computing(self._times, self._looked, self._problem)

    def _looked(self) -> None:
        self._network.log.append("look")
        self._network.now += GRANT / 2


def test_what_is_computed_still_is_written_later_and_the_grant_is_renewed_meanwhile() -> None:
    network = Network(_willing, ending=True)
    _send(network, _copies(), place=_Gpu(network, times=3))
    log = [entry for entry in network.log if entry != "ClaimRenewal"]
    assert log == ["meet", "WriteClaim", "look", "look", "look", "write", "drop", "WritesDone"]
    assert network.log.count("ClaimRenewal") >= 2
    [(own, peer)] = network.written_to
    assert (own[:, 2].tolist(), peer[:, 2].tolist()) == ([5], [3])  # each side's GPU


@pytest.mark.parametrize("times", [0, 2])
def test_what_could_not_be_computed_fails_the_transfer_and_no_other(times: int) -> None:
    """At the mark, and later."""
    network = Network(_willing, ending=True)
    with pytest.raises(Unavailable, match=r"what is to be sent was not computed: out of luck"):
        _send(network, _copies(), place=_Gpu(network, times, "out of luck"))
    assert "write" not in network.log
    assert "part" not in network.log
    assert network.log[-1] == "Quit"


with_nixl = pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")


class _Mistaken(HostPlace):
    """Says of the host's memory that it is a GPU's."""

    segment = "VRAM"
    progress = False


@with_nixl
def test_memory_that_nixl_cannot_use_is_refused_at_the_start_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot use this unit's VRAM, 32,768 bytes: .*BACKEND") as error:
        NixlTransport("unit", Arena(8, 4096), _Mistaken())
    assert "\n" not in error.value.message


@with_nixl
def test_a_gpus_memory_and_the_hosts_exchange_nothing() -> None:
    unit = NixlTransport("unit", Arena(8, 4096), HostPlace())
    try:
        peer = Endpoint(unit="gpu", kind="nixl-cuda", where=unit.endpoint.where)
        with pytest.raises(BadRequest, match="gpu moves K and V by nixl-cuda, this unit by nixl"):
            unit.claim(peer, ADDRESS, 5, 0, 4)
    finally:
        unit.close_all()

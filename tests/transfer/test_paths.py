"""Which way a unit takes to a peer, with real transports in one process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from kvloom.kv.arena import Arena
from kvloom.transfer.paths import Paths, PathsEndpoint, open_paths, this_host
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.tcp import TcpEndpoint, TcpTransport
from kvloom.transfer.tcp_link import MOST_PROBED, grow
from kvloom.types.address import Endpoint, EndpointKind, KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest, ConfigError, QueueFull, Unavailable
from kvloom.types.transfer import BlockCopies, Transfer, TransferMeter
from tests.processes import DEADLINE

BLOCKS, BLOCK_BYTES, TOKENS = 64, 4096, 32
FORM = KVForm(
    layers=1, kv_heads=1, head_dim=16, dtype="float32", block_bytes=BLOCK_BYTES, tokens_per_block=TOKENS
)
BYTES = BLOCK_BYTES  # of one block's tokens
DIGEST = 5


@dataclass(eq=False)
class Another:
    """A second way between hosts, which calls itself NIXL. It is TCP, and `rates` says what it measures: 0 is
    a peer that cannot be reached."""

    tcp: TcpTransport
    rates: list[float] = field(default_factory=lambda: [1e15])
    slots: int = 1000
    measured: int = 0

    @property
    def endpoint(self) -> Endpoint:
        return msgspec.structs.replace(self.tcp.endpoint, kind="nixl")

    @property
    def meter(self) -> TransferMeter:
        return self.tcp.meter

    def open(self, begin: int, digest: int, blocks: bytes = b"", ticket: Ticket | None = None) -> Ticket:
        if not self.slots:
            raise QueueFull("0 reservations are open already")
        return self.tcp.open(begin, digest, blocks, ticket)

    def received(self, ticket: Ticket) -> int:
        return self.tcp.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        return self.tcp.close(ticket)

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Transfer:
        return self.tcp.claim(msgspec.structs.replace(peer, kind="tcp"), address, digest, begin, end)

    def measure(self, peer: Endpoint) -> float:
        self.measured += 1
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        if not rate:
            raise Unavailable("there is no way")
        return rate

    def close_all(self) -> None:
        self.tcp.close_all()


@dataclass
class End:
    """A unit with its ways."""

    arena: Arena
    shm: ShmTransport
    tcp: TcpTransport
    other: Another
    paths: Paths

    def sent(self) -> dict[EndpointKind, int]:
        """Returns the blocks that went by each way."""
        ways = (self.shm, self.tcp, self.other)
        return {way.endpoint.kind: n for way in ways if (n := way.meter.bytes // BYTES)}


@contextmanager
def _ends(*hosts: str) -> Iterator[list[End]]:
    with ExitStack() as stack:
        made = []
        for number, host in enumerate(hosts):
            unit, arena = f"unit-{number}", Arena(BLOCKS, BLOCK_BYTES)
            arena.bytes.random_()
            shm = ShmTransport(unit, arena)
            tcp = TcpTransport(unit, arena, "s", links=2)
            other = Another(TcpTransport(unit, arena, "s", links=1))
            paths = Paths(unit, shm, [tcp, other], host)
            stack.callback(paths.close_all)
            made.append(End(arena, shm, tcp, other, paths))
        yield made


async def _send(sender: End, receiver: End, *, begin: int = 0, end: int | None = None, of: int = 64) -> None:
    """Reserves room for `of` tokens, and sends [begin, end) of them from the same blocks."""
    ids = np.arange(-(-of // TOKENS), dtype=np.int32)
    blocks = KVAddress.compress(ids)
    ticket = receiver.paths.open(0, DIGEST, blocks)
    address = KVAddress(model="m", form=FORM, begin=0, end=of, blocks=blocks, ticket=ticket)
    await _fill(sender, receiver, address, begin, of if end is None else end)
    assert receiver.paths.close(ticket)


async def _fill(sender: End, receiver: End, address: KVAddress, begin: int, end: int) -> None:
    transfer = sender.paths.claim(receiver.paths.endpoint, address, DIGEST, begin, end)
    ids = np.arange(begin // TOKENS, -(-end // TOKENS), dtype=np.int32)
    counts = np.full_like(ids, TOKENS)
    transfer.put(BlockCopies(ids, ids, np.zeros_like(ids), counts))
    async with asyncio.timeout(DEADLINE):
        await transfer.arrived()
    assert receiver.paths.received(address.ticket) == end
    some = slice(begin // TOKENS * BLOCK_BYTES, end // TOKENS * BLOCK_BYTES)
    assert receiver.arena.bytes[some].equal(sender.arena.bytes[some])


async def _until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not met():  # noqa: ASYNC110 - the other side is a thread that knows of no event
            await asyncio.sleep(0.001)


def test_units_of_one_host_share_its_memory() -> None:
    async def send() -> None:
        with _ends("a", "a") as (sender, receiver):
            await _send(sender, receiver)
            await _until(lambda: "unit-1" in sender.paths.meter.links)
            await _send(sender, receiver)
            assert sender.sent() == {"shm": 4}
            assert sender.paths.meter.links["unit-1"].path == "shm"
            assert sender.paths.meter.links["unit-1"].rate > 0
            assert not sender.other.measured
            assert sender.paths.meter.bytes == 4 * BYTES

    asyncio.run(send())


def test_between_hosts_the_way_that_measures_fastest_is_taken_once_that_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvloom.transfer.paths")

    async def send() -> None:
        with _ends("a", "b") as (sender, receiver):
            await _send(sender, receiver)
            assert sender.sent() == {"tcp": 2}
            await _until(lambda: "unit-1" in sender.paths.meter.links)
            for _ in range(3):
                await _send(sender, receiver)
            assert sender.sent() == {"tcp": 2, "nixl": 6}
            assert sender.other.measured == 1
            assert sender.paths.meter.links["unit-1"].path == "nixl"

    asyncio.run(send())
    assert caplog.messages == ["K and V go to unit-1 by nixl, at 1000000.00 GB/s"]


def test_a_way_that_is_slower_or_does_not_get_through_is_passed_over_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def send(rate: float) -> None:
        with _ends("a", "b") as (sender, receiver):
            sender.other.rates = [rate]
            await _send(sender, receiver)
            await _until(lambda: "unit-1" in sender.paths.meter.links)
            await _send(sender, receiver)
            assert sender.sent() == {"tcp": 4}

    for rate in (0.0, 1.0):
        caplog.clear()
        asyncio.run(send(rate))
        [line] = caplog.messages
        assert line.startswith("K and V go to unit-1 by tcp, at ")


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_parts_of_a_reservation_go_by_the_way_that_all_have(hosts: tuple[str, str]) -> None:
    """Two senders, of which one is elsewhere, fill one reservation."""

    async def send() -> None:
        with _ends(*hosts, "c") as (sender, receiver, third):
            blocks = KVAddress.compress(np.arange(3, dtype=np.int32))
            ticket = receiver.paths.open(0, DIGEST, blocks)
            address = KVAddress(model="m", form=FORM, begin=0, end=96, blocks=blocks, ticket=ticket)
            await _fill(sender, receiver, address, 0, 32)
            await _fill(third, receiver, address, 32, 96)
            with pytest.raises(BadRequest, match="up to 96 of this reservation"):
                await _fill(sender, receiver, address, 32, 64)
            assert (sender.sent(), third.sent()) == ({"tcp": 1}, {"tcp": 2})
            assert receiver.paths.close(ticket)
            with pytest.raises(BadRequest, match="over"):
                receiver.paths.received(ticket)
            with pytest.raises(BadRequest, match="over"):
                await _fill(sender, receiver, address, 0, 96)

    asyncio.run(send())


def test_another_process_of_the_same_name_is_measured_anew() -> None:
    async def restart() -> None:
        with _ends("a", "b") as (sender, receiver), _ends("c", "d") as (_, again):
            sender.other.rates = [1e15, 1.0]
            await _send(sender, receiver)
            await _until(lambda: "unit-1" in sender.paths.meter.links)
            await _send(sender, again)
            await _until(lambda: sender.paths.meter.links["unit-1"].path == "tcp")
            await _send(sender, again)
            assert sender.sent() == {"tcp": 6}
            assert sender.other.measured == 2

    asyncio.run(restart())


def test_a_peer_that_no_way_has_reached_is_measured_when_it_is_met_again() -> None:
    async def send() -> None:
        with _ends("a", "b") as (sender, receiver):
            sender.other.rates = [0.0, 1e15]
            gone = PathsEndpoint("b", (_closed(receiver.tcp.endpoint), receiver.other.endpoint))
            peer = Endpoint(unit="unit-1", kind="auto", where=msgspec.msgpack.encode(gone))
            ticket = receiver.paths.open(0, DIGEST, b"")
            address = KVAddress(model="m", form=FORM, begin=0, end=0, blocks=b"", ticket=ticket)
            for round_ in (1, 2):
                transfer = sender.paths.claim(peer, address, DIGEST, 0, 0)
                transfer.abandon()
                await _until(lambda round_=round_: sender.other.measured == round_)  # type: ignore[misc]
                if round_ == 1:
                    await _until(lambda: not sender.paths.knows("unit-1"))
            await _until(lambda: "unit-1" in sender.paths.meter.links)
            assert sender.paths.meter.links["unit-1"].path == "nixl"

    asyncio.run(send())


def _closed(endpoint: Endpoint) -> Endpoint:
    """Returns an endpoint like this one at a port where nobody listens."""
    where = msgspec.msgpack.decode(endpoint.where, type=TcpEndpoint)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return msgspec.structs.replace(
        endpoint, where=msgspec.msgpack.encode(msgspec.structs.replace(where, port=port))
    )


def test_a_reservation_that_one_way_does_not_take_is_open_at_none() -> None:
    with _ends("a") as [receiver]:
        receiver.other.slots = 0
        for _ in range(5000):  # more than a ledger has slots
            with pytest.raises(QueueFull):
                receiver.paths.open(0, DIGEST)


def test_units_without_a_way_in_common_say_so() -> None:
    with _ends("a") as [sender]:
        peer = Endpoint(unit="gpu", kind="nixl-cuda", where=b"")
        address = KVAddress(model="m", form=FORM, begin=0, end=0, blocks=b"", ticket=Ticket(0, 1))
        with pytest.raises(BadRequest, match="gpu moves K and V by nixl-cuda, this unit by shm, tcp, nixl; "):
            sender.paths.claim(peer, address, DIGEST, 0, 0)


def test_a_unit_of_one_way_is_reached_as_without_any_choice() -> None:
    paths = open_paths("u", "tcp", Arena(8, 4096), "s", "127.0.0.1")
    assert paths.endpoint.kind == "tcp"
    paths.close_all()
    with pytest.raises(ConfigError, match="transport_host"):
        open_paths("u", "auto", Arena(8, 4096), "s", "192.0.2.1")


def test_two_processes_of_one_kernel_and_one_set_of_ids_are_on_one_host() -> None:
    boot, _, ids = this_host().partition("/")
    assert len(boot) == 36
    assert int(ids) > 0


# how a rate is measured


def test_a_rate_is_that_of_the_first_run_that_takes_long_enough() -> None:
    runs: list[int] = []
    now = [0.0]

    def send(size: int) -> None:
        now[0] += 0.003 + size / 100e6
        runs.append(size)

    rate = grow(send, lambda: now[0])
    assert runs == [256 << 10, 512 << 10, 1 << 20, 2 << 20]
    assert rate == pytest.approx(runs[-1] / (0.003 + runs[-1] / 100e6))


def test_a_fast_link_carries_so_much_and_no_more() -> None:
    runs: list[int] = []
    assert grow(runs.append, lambda: 0.0) > 1e12
    assert runs[-1] == MOST_PROBED
    assert sum(runs) < 2 * MOST_PROBED


def test_tcp_measures_a_peer_and_names_what_it_does_not_reach() -> None:
    with _ends("a", "b") as (sender, receiver):
        assert sender.tcp.measure(receiver.tcp.endpoint) > 1e6
        with pytest.raises(Unavailable, match=r"the rate to 127\.0\.0\.1 cannot be measured: "):
            sender.tcp.measure(_closed(receiver.tcp.endpoint))
        stranger = TcpTransport("x", Arena(8, 4096), "another secret")
        with pytest.raises(Unavailable, match="another secret"):
            stranger.measure(receiver.tcp.endpoint)
        stranger.close_all()

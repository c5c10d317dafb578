"""What the plane over TCP promises beside the common laws: who may connect, and that whoever does can do no
more than a sender may."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from kvloom.kv.arena import Arena
from kvloom.transfer import tcp_link
from kvloom.transfer.grants import ClaimRefused, Delivered, Granted
from kvloom.transfer.tcp import TcpEndpoint, TcpTransport
from kvloom.transfer.tcp_link import Claim, Done, Gone, LinkError, Purpose, Quit, Verdict
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket, other_address
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.transfer import BlockCopies
from tests.transfer.context import Context
from tests.transfer.units import DEADLINE, Unit, units
from tests.transfer.wire import BLOCK_BYTES, SECRET

FORM = KVForm(layers=1, kv_heads=1, head_dim=16, dtype="float32", block_bytes=4096, tokens_per_block=32)
DIGEST = 5
MINE = struct.pack("<ii", 7, 2)  # blocks 7 and 8, of a reservation of 64 tokens
SESSION = 3  # connections
GREETING = struct.Struct("<9sH32s")


class Receiver:
    """A unit in this process with one reservation."""

    def __init__(self) -> None:
        self.arena = Arena(64, BLOCK_BYTES)
        self.transport = TcpTransport("receiver", self.arena, SECRET)
        self.where = msgspec.msgpack.decode(self.transport.endpoint.where, type=TcpEndpoint)
        self.ticket = self.transport.open(0, DIGEST, MINE)

    @property
    def address(self) -> KVAddress:
        return KVAddress(model="m", form=FORM, begin=0, end=64, blocks=MINE, ticket=self.ticket)

    def written(self) -> list[int]:
        """The blocks that are not as they were."""
        return np.flatnonzero(self.arena.bytes.numpy().reshape(64, -1).any(axis=1)).tolist()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.transport.close_all()


class RawSender:
    """A sender that knows the secret and says what it likes."""

    def __init__(self, where: TcpEndpoint) -> None:
        self._where, self._name = where, os.urandom(16)
        self.control = self._connect(Purpose.CONTROL)
        self.data = self._connect(Purpose.DATA)

    def _connect(self, purpose: Purpose) -> socket.socket:
        sock = socket.create_connection((self._where.host, self._where.port))
        tcp_link.prepare(sock)
        tcp_link.introduce(sock, SECRET, self._where.identity, self._name, purpose)
        return sock

    def ask(self, message: tcp_link.FromSender) -> tcp_link.FromReceiver:
        tcp_link.tell(self.control, message)
        return self.hear()

    def hear(self) -> tcp_link.FromReceiver:
        return tcp_link.receive_message(self.control, tcp_link.FROM_RECEIVER)

    def claim(self, ticket: Ticket, number: int = 1, begin: int = 0, end: int = 64) -> tcp_link.FromReceiver:
        return self.ask(Claim(number, ticket, DIGEST, begin, end))

    def announce(self, number: int, at: int, size: int, begun: bytes = b"") -> None:
        """A piece of one span; what its bytes do not begin with is yet to follow."""
        self.data.sendall(struct.pack("<QIqq", number, 1, at, size) + begun)

    def close(self) -> None:
        self.control.close()
        self.data.close()


@pytest.fixture
def raw(receiver: Receiver) -> Iterator[RawSender]:
    with closing(RawSender(receiver.where)) as sender:
        yield sender


def _send(receiver: Receiver, secret: str = SECRET, **where: object) -> str:
    """What becomes of a send of all to the receiver, or to one that says `where` of itself."""

    async def send() -> None:
        arena = Arena(64, BLOCK_BYTES)
        arena.bytes.fill_(1)
        sender = TcpTransport("sender", arena, secret)
        try:
            told = msgspec.msgpack.encode(structs.replace(receiver.where, **where))
            peer = Endpoint(unit="receiver", kind="tcp", where=told)
            transfer = sender.claim(peer, receiver.address, DIGEST, 0, 64)
            own, none, all_ = (np.array(pair, np.int32) for pair in ((3, 5), (0, 0), (32, 32)))
            transfer.put(BlockCopies(own, np.array([8, 7], np.int32), none, all_))
            await transfer.arrived()
        finally:
            sender.close_all()

    try:
        asyncio.run(asyncio.wait_for(send(), DEADLINE))
    except (Unavailable, BadRequest) as error:
        return error.message
    return "arrived"


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        os.sched_yield()


# who may connect


def test_who_has_another_secret_sends_nothing(receiver: Receiver) -> None:
    said = _send(receiver, "another")
    assert said == (
        f"receiver cannot be reached at {receiver.where}: it has another secret; units of one fleet have one "
        "secret"
    )
    assert not receiver.written()
    assert _send(receiver) == "arrived"
    assert receiver.written() == [7, 8]


def test_a_caller_without_the_secret_is_hung_up_on(receiver: Receiver) -> None:
    """Also one that does not care what the receiver proves."""
    with socket.create_connection((receiver.where.host, receiver.where.port)) as sock:
        sock.sendall(GREETING.pack(b"kvloom-kv", tcp_link.VERSION, bytes(32)))
        tcp_link.receive(sock, GREETING.size)
        sock.sendall(receiver.where.identity + bytes(16) + bytes([Purpose.CONTROL]) + bytes(32))
        assert tcp_link.receive(sock, 33) == bytes([Verdict.OTHER_SECRET]) + bytes(32)
        assert not sock.recv(1)


def test_whoever_answers_without_the_secret_is_sent_nothing(receiver: Receiver) -> None:
    """An impostor at the receiver's address says all that can be said without the secret."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(GREETING.pack(b"kvloom-kv", tcp_link.VERSION, bytes(32)))
                tcp_link.receive(sock, GREETING.size)
                tcp_link.receive(sock, 65)
                sock.sendall(bytes(33))  # welcome
                heard.append(sock.recv(1))

        thread = threading.Thread(target=answer)
        thread.start()
        assert "another secret" in _send(receiver, port=listener.getsockname()[1])
        thread.join(DEADLINE)
    assert heard == [b""]


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        ((b"kvloom-kv", 9), "it speaks version 9 of the KV plane, this unit version 2; one release"),
        ((b"HTTP/1.1 ", 0), "what answers there is no KV plane"),
    ],
)
def test_another_version_or_protocol_is_told_by_both_ends(
    receiver: Receiver, greeting: tuple[bytes, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: _greet(listener.accept()[0], greeting))
        thread.start()
        assert said in _send(receiver, port=listener.getsockname()[1])
        thread.join(DEADLINE)
    _greet(socket.create_connection((receiver.where.host, receiver.where.port)), greeting)
    _until(lambda: said in caplog.text)


def _greet(sock: socket.socket, greeting: tuple[bytes, int]) -> None:
    """Until the other end hangs up."""
    with sock:
        sock.sendall(GREETING.pack(*greeting, bytes(32)))
        while sock.recv(4096):
            pass


def test_another_process_at_the_same_port_is_another_peer(receiver: Receiver) -> None:
    assert "another process listens there now" in _send(receiver, identity=bytes(16))
    assert not receiver.written()


def test_a_peer_that_cannot_be_reached_is_named_by_its_address(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    assert _send(receiver, port=port) == (
        f"receiver cannot be reached at 127.0.0.1:{port}: Connection refused"
    )


def test_an_address_that_is_no_address_of_this_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport_host: 192\.0\.2\.1: .*address of this host is right"):
        TcpTransport("unit", Arena(8, BLOCK_BYTES), SECRET, "192.0.2.1")


def test_those_that_prove_nothing_keep_nobody_out(receiver: Receiver) -> None:
    """The oldest of them end."""
    where = (receiver.where.host, receiver.where.port)
    silent = [socket.create_connection(where) for _ in range(100)]
    try:
        assert _send(receiver) == "arrived"
    finally:
        for sock in silent:
            sock.close()


# what a sender may do


def _claiming(receiver: Receiver) -> RawSender:
    """Returns a sender that has claimed the reservation. What an ended session had claimed is free a moment
    after its sender hears of the end."""
    senders: list[RawSender] = []

    def granted() -> bool:
        senders.append(RawSender(receiver.where))
        if senders[-1].claim(receiver.ticket) == Granted(1):
            return True
        senders.pop().close()
        return False

    _until(granted)
    return senders[-1]


def test_a_piece_outside_the_address_ends_the_session_before_a_byte(receiver: Receiver) -> None:
    inside, block = 7 * BLOCK_BYTES, BLOCK_BYTES
    for at, size in (
        (inside - 1, block),
        (inside + block, block + 1),
        (inside, 0),
        (inside, -1),
        (-block, block),
        (64 * block, block),
        (-(2**63), 2**63 - 1),
        (2**63 - 1, 2**63 - 1),
    ):
        with closing(_claiming(receiver)) as raw:
            raw.announce(1, at, size)
            with suppress(OSError):  # it may have hung up already
                raw.data.sendall(b"x" * block)
            with pytest.raises((LinkError, OSError)):
                raw.hear()
        assert not receiver.written(), (at, size)
    assert receiver.transport.received(receiver.ticket) == 0
    _until(lambda: _send(receiver) == "arrived")  # what they had claimed is free again
    assert receiver.transport.close(receiver.ticket)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 4) + msgspec.msgpack.encode(["?", 1, 2]),
    ],
)
def test_nonsense_ends_its_own_session_and_no_other(receiver: Receiver, raw: RawSender, said: bytes) -> None:
    with closing(RawSender(receiver.where)) as other:
        assert raw.claim(receiver.ticket) == Granted(1)
        other.control.sendall(said)
        with pytest.raises((LinkError, OSError)):
            other.hear()
    with closing(RawSender(receiver.where)) as other, suppress(OSError):
        other.data.sendall(said * 64)  # too many spans, or a transfer that was never claimed
        with pytest.raises((LinkError, ConnectionError)):
            other.hear()
    raw.announce(1, 7 * BLOCK_BYTES, BLOCK_BYTES)
    raw.data.sendall(b"x" * BLOCK_BYTES)
    assert raw.ask(Done(1, 1)) == Delivered(1)
    assert receiver.transport.received(receiver.ticket) == 64


def test_what_comes_after_close_is_thrown_away(receiver: Receiver, raw: RawSender) -> None:
    """A sender that stands still in the middle of a piece keeps nobody from using the blocks."""
    assert raw.claim(receiver.ticket) == Granted(1)
    raw.announce(1, 7 * BLOCK_BYTES, BLOCK_BYTES)
    raw.data.sendall(b"x" * 100)
    memory = receiver.arena.bytes.numpy()
    _until(lambda: bool(memory[7 * BLOCK_BYTES + 99]))
    _until(lambda: receiver.transport.close(receiver.ticket))
    memory[:] = 0  # the blocks are used for something else
    assert raw.hear() == ClaimRefused(1, "the reservation at receiver is over")
    raw.data.sendall(b"x" * (BLOCK_BYTES - 100))
    assert raw.ask(Quit(1, 1)) == Gone(1)  # all of it has come
    assert not receiver.written()


def test_a_stalled_sender_loses_its_claim(
    receiver: Receiver, raw: RawSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_link, "PEER_TIMEOUT", 0.05)
    with closing(RawSender(receiver.where)) as stalled:
        assert stalled.claim(receiver.ticket) == Granted(1)
        stalled.announce(1, 7 * BLOCK_BYTES, BLOCK_BYTES, b"x" * 100)
        with pytest.raises((LinkError, OSError)):
            stalled.hear()
    _until(lambda: raw.claim(receiver.ticket) == Granted(1))


def test_a_ticket_is_good_once(receiver: Receiver, raw: RawSender) -> None:
    assert raw.claim(receiver.ticket) == Granted(1)
    assert "are claimed" in str(raw.claim(receiver.ticket, 2))
    assert raw.ask(Quit(1, 0)) == Gone(1)
    assert raw.claim(receiver.ticket, 3, 0, 10) == Granted(3)
    assert raw.ask(Done(3, 0)) == Delivered(3)
    assert "up to 10 of this reservation" in str(raw.claim(receiver.ticket, 4, 0, 10))
    assert receiver.transport.close(receiver.ticket)
    assert "over" in str(raw.claim(receiver.ticket, 5, 10, 20))
    again = receiver.transport.open(0, DIGEST, MINE)
    assert "over" in str(raw.claim(receiver.ticket, 6))
    other = Claim(7, again, DIGEST + 1, 0, 64)
    assert raw.ask(other) == ClaimRefused(7, other_address("receiver"))


def test_tokens_count_once_all_their_pieces_have_come(receiver: Receiver, raw: RawSender) -> None:
    """Messages overtake pieces: they go over another connection."""
    assert raw.claim(receiver.ticket) == Granted(1)
    tcp_link.tell(raw.control, Done(1, 2))
    for block in (7, 8):
        assert receiver.transport.received(receiver.ticket) == 0
        raw.announce(1, block * BLOCK_BYTES, BLOCK_BYTES)
        raw.data.sendall(b"x" * BLOCK_BYTES)
    assert raw.hear() == Delivered(1)
    assert receiver.transport.received(receiver.ticket) == 64


def test_tokens_count_after_those_before_them(receiver: Receiver, raw: RawSender) -> None:
    """The second claim is complete first."""
    assert raw.claim(receiver.ticket, 1, 0, 32) == Granted(1)
    assert raw.claim(receiver.ticket, 2, 32, 64) == Granted(2)
    tcp_link.tell(raw.control, Done(1, 1))
    tcp_link.tell(raw.control, Done(2, 0))
    assert raw.ask(Quit(3, 0)) == Gone(3)  # nothing was delivered before
    raw.announce(1, 7 * BLOCK_BYTES, BLOCK_BYTES)
    raw.data.sendall(b"x" * BLOCK_BYTES)
    assert [raw.hear(), raw.hear()] == [Delivered(1), Delivered(2)]
    assert receiver.transport.received(receiver.ticket) == 64


# processes


def test_a_killed_sender_and_a_loop_of_sends_leave_nothing() -> None:
    with units("tcp", "receiver") as (receiver,):
        nothing = _held(receiver)
        for seed in range(3):
            with units("tcp", "sender") as (sender,):
                context = Context.make(sender, receiver, 0, 100, seed=seed)
                context.stall("inside", skip=seed)
                sender.kill()
                assert receiver.call("close", ticket=context.ticket)
        with units("tcp", "sender") as (sender,):
            alone = _descriptors(sender)
            for seed in range(6):
                context = Context.make(sender, receiver, 0, 100, seed=seed)
                context.send(0, 100)
                context.check(0, 100)
                assert receiver.call("close", ticket=context.ticket)
            _until(lambda: _descriptors(sender) == alone + SESSION)
            _until(lambda: _held(receiver) == nothing + 2 * SESSION)  # a thread for each
        _until(lambda: _held(receiver) == nothing)


def _held(unit: Unit) -> int:
    """Descriptors and threads of the process."""
    return _descriptors(unit) + len(list(Path(f"/proc/{unit.process.pid}/task").iterdir()))


def _descriptors(unit: Unit) -> int:
    return len(list(Path(f"/proc/{unit.process.pid}/fd").iterdir()))

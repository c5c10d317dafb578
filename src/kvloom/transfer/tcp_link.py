"""One connection of the KV plane over TCP: how both ends prove that they know the fleet's secret, and the
messages that they then exchange.

Both ends begin with a greeting: a magic word, the version of the protocol and a nonce. The one that has
connected then names the process that it wants, its session and the connection's purpose, and proves by
HMAC-SHA256 (RFC 2104) over both nonces and all of these that it knows the secret; the other one proves the
same by another HMAC over the same bytes. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from enum import IntEnum
from itertools import repeat
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvloom.transfer.grants import ClaimRefused, Delivered, Granted
from kvloom.types.address import Digest, Position, Ticket
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import I64

VERSION: Final = 2
PEER_TIMEOUT: Final = (
    5.0  # seconds in which a peer has to connect, to answer, and to take or send a byte of a piece
)
MOST_SPANS: Final = 512  # of a piece; a call to the kernel takes 1,024 (IOV_MAX)
PIECE: Final = 1 << 20  # bytes of a piece
ENOUGH: Final = 0.02  # seconds that a measurement of the rate takes at least, unless it is of many bytes
MOST_PROBED: Final = 8 << 20  # bytes
_LEAST_PROBED: Final = 256 << 10

_MAGIC: Final = b"kvloom-kv"
_NONCE: Final = 32
_GREETING: Final = struct.Struct(f"<{len(_MAGIC)}sH{_NONCE}s")
IDENTITY: Final = 16  # bytes that name a process, or a session
_CLAIM_TO_KNOW: Final = struct.Struct(f"<{IDENTITY}s{IDENTITY}sB32s")
_ANSWER: Final = struct.Struct("<B32s")
_LENGTH: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<QI")
_LONGEST: Final = 4096  # bytes of a message
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Purpose(IntEnum):
    """Says what a connection of a session is for."""

    CONTROL = 0
    """Messages, both ways. It is the session's first connection."""
    DATA = 1
    """Pieces, from the sender to the receiver."""
    PROBE = 2
    """Bytes that are thrown away, so that the other end learns how fast they come. It is of no session."""


class Verdict(IntEnum):
    """The end that was connected to says so of the other one's claim to know the secret."""

    WELCOME = 0
    OTHER_SECRET = 1
    OTHER_PROCESS = 2
    NO_SESSION = 3


_REFUSED: Final = {
    Verdict.OTHER_SECRET: "it has another secret; units of one fleet have one secret",
    Verdict.OTHER_PROCESS: "another process listens there now",
    Verdict.NO_SESSION: "it does not know this session any more",
}


class Claim(Struct, frozen=True, array_like=True, tag=True):
    """Asks whether tokens [begin, end) may be written; it is answered by Granted or ClaimRefused."""

    number: Number
    ticket: Ticket
    digest: Digest
    begin: Position
    end: Position


class Done(Struct, frozen=True, array_like=True, tag=True):
    """Says that all is sent, in so many pieces; it is answered by Delivered or ClaimRefused."""

    number: Number
    pieces: Number


class Quit(Struct, frozen=True, array_like=True, tag=True):
    """Says that nothing counts, and nothing follows these pieces; it is answered by Gone."""

    number: Number
    pieces: Number


class Gone(Struct, frozen=True, array_like=True, tag=True):
    """Says that what was claimed is given back."""

    number: Number


FromSender = Claim | Done | Quit
FromReceiver = Granted | ClaimRefused | Delivered | Gone
Message = TypeVar("Message")
FROM_SENDER: Final[msgspec.msgpack.Decoder[FromSender]] = msgspec.msgpack.Decoder(FromSender)
FROM_RECEIVER: Final[msgspec.msgpack.Decoder[FromReceiver]] = msgspec.msgpack.Decoder(FromReceiver)


class LinkError(Exception):
    """A connection cannot be used. The message says why."""


class LinkEnded(LinkError):
    """The other end has hung up."""


def prepare(sock: socket.socket) -> None:
    """Sets what both ends want of a connection: it waits `PEER_TIMEOUT` for its peer at most, and a host that
    is gone is noticed."""
    patience = struct.pack("ll", int(PEER_TIMEOUT), 0)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for_ever(sock: socket.socket) -> None:
    """Lets a connection that has been welcomed be silent for as long as there is nothing to say."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def end(sock: socket.socket) -> None:
    """Ends a connection on any thread: whoever waits for it wakes, and closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# the greeting


def introduce(sock: socket.socket, secret: str, wanted: bytes, session: bytes, purpose: Purpose) -> None:
    """Proves to the process `wanted` that this end knows the secret, and has the other one prove it. Raises
    LinkError, OSError."""
    mine, theirs = _greet(sock)
    said = struct.pack(f"<{IDENTITY}s{IDENTITY}sB", wanted, session, purpose)
    sock.sendall(said + _proof(secret, b"connects", theirs + mine + said))
    verdict, proof = _ANSWER.unpack(receive(sock, _ANSWER.size))
    if verdict != Verdict.WELCOME:
        raise LinkError(_REFUSED.get(verdict, "it refuses this connection"))
    if not hmac.compare_digest(proof, _proof(secret, b"accepts", theirs + mine + said)):
        raise LinkError(_REFUSED[Verdict.OTHER_SECRET])


class Introduced:
    """A connection that has proved that it knows the secret, and waits for the verdict."""

    def __init__(self, sock: socket.socket, secret: str, identity: bytes) -> None:
        """identity: of this process. Raises LinkError, after it has told the other end, and OSError."""
        self._socket = sock
        mine, theirs = _greet(sock)
        wanted, self.session, purpose, proof = _CLAIM_TO_KNOW.unpack(receive(sock, _CLAIM_TO_KNOW.size))
        said = struct.pack(f"<{IDENTITY}s{IDENTITY}sB", wanted, self.session, purpose)
        self._answer = _proof(secret, b"accepts", mine + theirs + said)
        if wanted != identity:
            self.refuse(Verdict.OTHER_PROCESS)
            raise LinkError("it wants another process")
        if not hmac.compare_digest(proof, _proof(secret, b"connects", mine + theirs + said)):
            self.refuse(Verdict.OTHER_SECRET)
            raise LinkError("it has another secret")
        try:
            self.purpose = Purpose(purpose)
        except ValueError as error:
            raise LinkError(f"it speaks of a purpose {purpose}") from error

    def welcome(self) -> None:
        self._socket.sendall(_ANSWER.pack(Verdict.WELCOME, self._answer))

    def refuse(self, verdict: Verdict) -> None:
        self._socket.sendall(_ANSWER.pack(verdict, bytes(32)))


def _greet(sock: socket.socket) -> tuple[bytes, bytes]:
    """Returns both nonces, this end's first."""
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(_GREETING.pack(_MAGIC, VERSION, nonce))
    magic, version, theirs = _GREETING.unpack(receive(sock, _GREETING.size))
    if magic != _MAGIC:
        raise LinkError("what answers there is no KV plane")
    if version != VERSION:
        raise LinkError(
            f"it speaks version {version} of the KV plane, this unit version {VERSION}; one release of "
            "kvloom on all hosts is right"
        )
    return nonce, theirs


def _proof(secret: str, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), _MAGIC + struct.pack("<H", VERSION) + role + said, "sha256")


# how fast a peer can be reached


def grow(send: Callable[[int], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the rate of `send`, which sends so many bytes, in bytes a second: of the first run that takes
    `ENOUGH`, or of the largest one. Each run sends twice as much as the one before. So a slow network carries
    little, and what only the first run takes does not count. Raises what `send` does."""
    size = _LEAST_PROBED
    while True:
        began = clock()
        send(size)
        seconds = clock() - began
        if seconds >= ENOUGH or size >= MOST_PROBED:
            return size / max(seconds, 1e-9)
        size *= 2


def measure_rate(address: tuple[str, int], identity: bytes, secret: str, links: int) -> float:
    """Returns the bytes a second that so many connections carry together to the process `identity`. Raises
    Unavailable."""
    session = secrets.token_bytes(IDENTITY)
    with ExitStack() as sockets, ThreadPoolExecutor(links, "kv-tcp-probe") as threads:
        try:
            made = []
            for _ in range(links):
                sock = sockets.enter_context(socket.create_connection(address, timeout=PEER_TIMEOUT))
                prepare(sock)
                introduce(sock, secret, identity, session, Purpose.PROBE)
                made.append(sock)
            return grow(lambda size: deque(threads.map(_probe, made, repeat(size // links)), maxlen=0))
        except (LinkError, OSError) as error:
            raise Unavailable(f"the rate to {address[0]} cannot be measured: {reason_of(error)}") from error


def _probe(sock: socket.socket, size: int) -> None:
    sock.sendall(_LENGTH.pack(size) + bytes(size))
    receive(sock, 1)


def throw_away(sock: socket.socket) -> None:
    """Takes runs of bytes, each behind its length, and answers each with one byte, until the connection ends.
    Raises LinkEnded then, LinkError for a run that is too long, OSError."""
    scratch = memoryview(bytearray(PIECE))
    while True:
        (left,) = _LENGTH.unpack(receive(sock, _LENGTH.size))
        if left > MOST_PROBED:
            raise LinkError(f"{left} bytes to measure by")
        while left:
            some = scratch[: min(left, PIECE)]
            receive_into(sock, some)
            left -= len(some)
        sock.sendall(b".")


# messages


def receive(sock: socket.socket, size: int) -> bytes:
    """Returns so many bytes. Raises LinkError if the connection ends before, OSError if it fails."""
    body = bytearray(size)
    receive_into(sock, memoryview(body))
    return bytes(body)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        try:
            count = sock.recv_into(view)
        except BlockingIOError as error:
            raise LinkError(f"it has said nothing for {PEER_TIMEOUT:g} s") from error
        if not count:
            raise LinkEnded("it has closed the connection")
        view = view[count:]


def receive_message(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """Returns the next message of a control connection. Raises LinkError for what is none, OSError."""
    (size,) = _LENGTH.unpack(receive(sock, _LENGTH.size))
    if size > _LONGEST:
        raise LinkError(f"a message of {size} bytes")
    try:
        return decoder.decode(receive(sock, size))
    except msgspec.MsgspecError as error:
        raise LinkError(f"a message that cannot be read: {error}") from error


def tell(sock: socket.socket, message: FromSender | FromReceiver) -> None:
    """Sends a message without waiting; one thread at a time. Raises LinkError if the other end does not read,
    OSError."""
    body = msgspec.msgpack.encode(message)
    try:
        count = sock.send(_LENGTH.pack(len(body)) + body, socket.MSG_DONTWAIT)
    except BlockingIOError:
        count = 0
    if count < _LENGTH.size + len(body):
        raise LinkError("it reads no messages any more")


# pieces


def send_piece(
    sock: socket.socket, number: int, source: memoryview, own: I64, there: I64, sizes: I64
) -> None:
    """Sends sizes[i] bytes from own[i] of `source`, for byte there[i] of the receiver's arena; all [n]. The
    kernel takes them from `source` itself. Raises LinkError, OSError.

    Not by MSG_ZEROCOPY: its pages are the kernel's until the peer has acknowledged them, so a transfer that
    is given up, or whose peer stalls, could not give its blocks back within a piece; and if the receiver is
    on the same host, the kernel copies all the same (Linux, Documentation/networking/msg_zerocopy.rst).
    """
    spans = np.stack((there, sizes), axis=1).astype("<i8")
    views: list[memoryview] = [memoryview(_HEADER.pack(number, len(sizes)) + spans.tobytes())]
    views += [source[at : at + size] for at, size in zip(own.tolist(), sizes.tolist(), strict=True)]
    while views:
        try:
            count = sock.sendmsg(views)
        except BlockingIOError as error:
            raise LinkError(f"it has taken nothing for {PEER_TIMEOUT:g} s") from error
        views = behind(views, count)


def receive_header(sock: socket.socket) -> tuple[int, I64, I64]:
    """Returns the number of the transfer that the next piece is of, the bytes [n] of the arena at which its
    spans begin, and their sizes [n]. Raises LinkError, OSError."""
    number, count = _HEADER.unpack(receive(sock, _HEADER.size))
    if not 0 < count <= MOST_SPANS:
        raise LinkError(f"a piece of {count} spans")
    spans = np.frombuffer(receive(sock, count * 16), "<i8").astype(np.int64).reshape(count, 2)
    return number, spans[:, 0], spans[:, 1]


def receive_piece(
    sock: socket.socket,
    ready: select.poll,
    views: list[memoryview],
    fence: Callable[[], AbstractContextManager[bool]],
    scratch: memoryview,
) -> None:
    """Fills the views of a piece as it comes. ready: the poll of the connection. fence: the views are written
    inside of it only, and what comes while it says no is thrown away, through `scratch`. Raises LinkError,
    OSError."""
    while views:
        if not ready.poll(1000 * PEER_TIMEOUT):
            raise LinkError(f"it has stalled in the middle of a piece for {PEER_TIMEOUT:g} s")
        with fence() as open_, suppress(BlockingIOError):  # or nothing had come after all
            if open_:
                count = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
            else:
                left = sum(map(len, views))
                count = sock.recv_into(scratch[:left], 0, socket.MSG_DONTWAIT)
            if not count:
                raise LinkEnded("it has closed the connection in the middle of a piece")
            views = behind(views, count)


def behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns what is left of these views behind their first `count` bytes."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def reason_of(error: Exception) -> str:
    """Returns what to say of a LinkError or an OSError."""
    if isinstance(error, OSError):
        if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
            return f"no answer in {PEER_TIMEOUT:g} s"
        return error.strerror or str(error)
    return str(error)

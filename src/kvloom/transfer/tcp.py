"""The KV plane between hosts over TCP, for arenas in the hosts' memory: the sender's connections take pieces
straight out of its arena, and the receiver's threads write them straight into the other one."""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvloom.kv.arena import Arena
from kvloom.transfer.grants import ClaimRefused, Delivered, Granted
from kvloom.transfer.plane import PlaneTransfer, Submit, TransferWorker, address_of
from kvloom.transfer.target import WriteTarget
from kvloom.transfer.tcp_link import (
    FROM_RECEIVER,
    IDENTITY,
    MOST_SPANS,
    PEER_TIMEOUT,
    PIECE,
    Claim,
    Done,
    FromReceiver,
    FromSender,
    Gone,
    LinkError,
    Purpose,
    Quit,
    end,
    introduce,
    measure_rate,
    prepare,
    reason_of,
    receive_message,
    send_piece,
    tell,
    wait_for_ever,
)
from kvloom.transfer.tcp_receiver import Reservations, TcpReceiver
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.geometry import I64
from kvloom.types.transfer import BlockCopies, TransferMeter, TransferState

LINKS = 4  # connections for pieces to one peer: one core fills none of today's networks


class TcpEndpoint(Struct, frozen=True, array_like=True):
    """The address of an endpoint of kind `tcp`. `identity` names the process: a restarted unit has
    another."""

    host: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    identity: Annotated[bytes, Meta(min_length=IDENTITY, max_length=IDENTITY)]
    blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=64, lt=1 << 31)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Piece(NamedTuple):
    """Spans of one transfer, sizes[i] bytes from own[i] of this arena to there[i] of the peer's; all [n]."""

    transfer: TcpTransfer
    own: I64
    there: I64
    sizes: I64


class TcpTransfer(PlaneTransfer):
    """A transfer over the connections of one session."""

    def __init__(
        self,
        submit: Submit,
        peer: Endpoint,
        where: TcpEndpoint,
        target: WriteTarget,
        address: KVAddress,
        digest: int,
        begin: int,
        end: int,
    ) -> None:
        """where: the endpoint that `peer` tells of."""
        super().__init__(submit, peer, address, begin, end)
        self.where, self.target, self.digest = where, target, digest
        self.number = -1
        """Its name in the messages about it."""
        self.session: SenderSession | None = None
        self.pieces: deque[Piece] = deque()
        """Those that wait for the receiver's grant."""
        self.handed = 0
        """Pieces that the session has, and has not sent."""
        self.sent_pieces = 0
        self.ended = False
        """Whether all that was put has been taken."""
        self.announced: type[Done] | type[Quit] | None = None
        """The last message about the end that was sent to the receiver."""

    def abandon(self) -> None:
        super().abandon()
        self._submit(self, None)  # also if `arrived` waits already

    # on the transport's thread

    def take(self, copies: BlockCopies) -> None:
        try:
            self.target.check(copies)
        except BadRequest as error:
            self.fail(error)
            return
        self.pieces.extend(Piece(self, *spans) for spans in self.target.pieces(copies, PIECE, MOST_SPANS))


class SenderSession:
    """The connections to one peer process. The end of one is the end of all."""

    def __init__(self, where: TcpEndpoint) -> None:
        self.where = where
        self.name = secrets.token_bytes(IDENTITY)
        self.transfers: dict[int, TcpTransfer] = {}
        self.work: SimpleQueue[Piece | None] = SimpleQueue()
        """The pieces that its threads send; None ends one of them."""
        self.welcome = False
        """Whether the peer has welcomed it."""
        self.lost = False
        self._control: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()  # nobody uses a socket that its thread has closed

    def add(self, sock: socket.socket, purpose: Purpose) -> None:
        """Raises LinkError if the session has ended."""
        with self._lock:
            if self.lost:
                raise LinkError("the session has ended")
            self._sockets.add(sock)
            if purpose is Purpose.CONTROL:
                self._control = sock

    def close(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)
            if self._control is sock:
                self._control = None
            sock.close()

    def tell(self, message: FromSender) -> None:
        """Raises LinkError, OSError."""
        with self._lock:
            if self._control is not None:
                tell(self._control, message)

    def end(self) -> None:
        """Wakes the threads that wait for the peer."""
        with self._lock:
            self.lost = True
            for sock in self._sockets:
                end(sock)


class _Welcome(NamedTuple):
    session: SenderSession


class _Heard(NamedTuple):
    session: SenderSession
    message: FromReceiver


class _Lost(NamedTuple):
    session: SenderSession
    reason: str


class _Handled(NamedTuple):
    """A thread of the session holds this piece no more."""

    piece: Piece
    sent: bool


Order = TcpTransfer | _Welcome | _Heard | _Lost | _Handled


class TcpPlane(TransferWorker[Order]):
    """Decides what is sent. Its thread waits for its queue only: those of the sessions wait for peers, and
    tell it."""

    def __init__(self, source: memoryview, secret: str, links: int) -> None:
        """source: all bytes of this unit's arena. links: connections for pieces to each peer."""
        super().__init__("kv-tcp")
        self._source, self._secret, self._links = source, secret, links
        self._sessions: dict[TcpEndpoint, SenderSession] = {}
        self._numbers = 0
        self._start()

    def _step(self) -> None:
        match self._queue.get():
            case TcpTransfer() as transfer:
                self._begin_transfer(transfer)
            case TcpTransfer() as transfer, None:
                transfer.ended = True
                self._advance(transfer)
            case TcpTransfer() as transfer, BlockCopies() as copies:
                transfer.take(copies)
                self._advance(transfer)
            case _Handled(piece, sent):
                self._note(piece.transfer, sent)
            case _Welcome(session):
                self._open_links(session)
            case _Heard(session, message):
                self._hear(session, message)
            case _Lost(session, reason):
                self._lose(session, reason)

    def _left(self) -> list[PlaneTransfer]:
        left: list[PlaneTransfer] = []
        for session in list(self._sessions.values()):
            left += session.transfers.values()
            self._end(session)
        return left

    # transfers

    def _begin_transfer(self, transfer: TcpTransfer) -> None:
        self._numbers += 1
        transfer.number = self._numbers
        session = self._sessions.get(transfer.where)
        if session is None:
            session = self._sessions[transfer.where] = SenderSession(transfer.where)
            self._start_link(Purpose.CONTROL, session)
        transfer.session = session
        session.transfers[transfer.number] = transfer
        if session.welcome:
            self._claim(session, transfer)

    def _claim(self, session: SenderSession, transfer: TcpTransfer) -> None:
        ticket, digest = transfer.address.ticket, transfer.digest
        self._tell(session, Claim(transfer.number, ticket, digest, transfer.begin, transfer.end))

    def _advance(self, transfer: TcpTransfer) -> None:
        """Does for a transfer what can be done now."""
        session = transfer.session
        if session is None or transfer.over:
            return
        if transfer.failure is not None:
            self._give_up(session, transfer)
        elif transfer.state is not TransferState.PLANNED:
            while transfer.pieces:
                if transfer.state is TransferState.CLAIMED:
                    transfer.become(TransferState.COPYING)
                transfer.handed += 1
                session.work.put(transfer.pieces.popleft())
            if transfer.ended and not transfer.handed and transfer.announced is None:
                self._announce(session, transfer, Done)

    def _give_up(self, session: SenderSession, transfer: TcpTransfer) -> None:
        """Ends a transfer that has failed, once no thread reads its blocks and the receiver has taken its
        claim back; without its connection, it does that by itself."""
        transfer.pieces.clear()
        if transfer.handed:
            return
        if session.lost or not session.welcome:
            self._settle(transfer, transfer.failure)
        elif transfer.announced is not Quit:
            self._announce(session, transfer, Quit)

    def _announce(self, session: SenderSession, transfer: TcpTransfer, kind: type[Done] | type[Quit]) -> None:
        transfer.announced = kind
        self._tell(session, kind(transfer.number, transfer.sent_pieces))

    def _note(self, transfer: TcpTransfer, sent: bool) -> None:
        transfer.handed -= 1
        transfer.sent_pieces += sent
        self._advance(transfer)

    def _settle(self, transfer: TcpTransfer, failure: KvloomError | None) -> None:
        if transfer.session is not None:
            transfer.session.transfers.pop(transfer.number, None)
        transfer.settle(failure)

    # sessions

    def _open_links(self, session: SenderSession) -> None:
        if session.lost:
            return
        session.welcome = True
        for _ in range(self._links):
            self._start_link(Purpose.DATA, session)
        for transfer in list(session.transfers.values()):
            self._claim(session, transfer)

    def _hear(self, session: SenderSession, message: FromReceiver) -> None:
        transfer = session.transfers.get(message.number)
        if transfer is None:
            return
        match message:
            case Granted():
                if transfer.state is TransferState.PLANNED:
                    transfer.become(TransferState.CLAIMED)
                self._advance(transfer)
            case ClaimRefused(_, reason):
                transfer.fail(BadRequest(reason))
                self._advance(transfer)
            case Delivered() if transfer.announced is Done:
                self._settle(transfer, None)
            case Gone() if transfer.announced is Quit:
                self._settle(transfer, transfer.failure)

    def _lose(self, session: SenderSession, reason: str) -> None:
        if session.lost:
            return
        self._end(session)
        for transfer in list(session.transfers.values()):
            transfer.fail(Unavailable(f"{transfer.peer.unit} cannot be reached at {session.where}: {reason}"))
            self._advance(transfer)

    def _end(self, session: SenderSession) -> None:
        """Ends a session's connections and threads. What they have not begun to send counts as handled."""
        session.end()
        if self._sessions.get(session.where) is session:
            del self._sessions[session.where]
        with suppress(Empty):
            while (piece := session.work.get_nowait()) is not None:
                piece.transfer.handed -= 1
        for _ in range(self._links):
            session.work.put(None)

    def _tell(self, session: SenderSession, message: FromSender) -> None:
        try:
            session.tell(message)
        except (LinkError, OSError) as error:
            self.order(_Lost(session, reason_of(error)))

    # on the session's threads

    def _start_link(self, purpose: Purpose, session: SenderSession) -> None:
        arguments = purpose, session
        threading.Thread(target=self._serve, args=arguments, name="kv-tcp-send", daemon=True).start()

    def _serve(self, purpose: Purpose, session: SenderSession) -> None:
        where = session.where
        try:
            sock = socket.create_connection((where.host, where.port), timeout=PEER_TIMEOUT)
        except OSError as error:
            self.order(_Lost(session, reason_of(error)))
            return
        try:
            session.add(sock, purpose)
            prepare(sock)
            introduce(sock, self._secret, where.identity, session.name, purpose)
            wait_for_ever(sock)
            if purpose is Purpose.CONTROL:
                self._listen(sock, session)
            else:
                self._send(sock, session)
        except (LinkError, OSError) as error:
            self.order(_Lost(session, reason_of(error)))
        finally:
            session.close(sock)

    def _listen(self, sock: socket.socket, session: SenderSession) -> None:
        self.order(_Welcome(session))
        while True:
            self.order(_Heard(session, receive_message(sock, FROM_RECEIVER)))

    def _send(self, sock: socket.socket, session: SenderSession) -> None:
        while (piece := session.work.get()) is not None:
            sent = piece.transfer.failure is None
            try:
                if sent:
                    with self.meter.copying(int(piece.sizes.sum())):
                        self._send_piece(sock, piece)
            except (LinkError, OSError) as error:
                self.order(_Lost(session, reason_of(error)))  # before the piece counts as handled
                sent = False
            self.order(_Handled(piece, sent))

    def _send_piece(self, sock: socket.socket, piece: Piece) -> None:
        send_piece(sock, piece.transfer.number, self._source, piece.own, piece.there, piece.sizes)


class TcpTransport:
    """Implements `Transport`. If a reservation is over, its tokens are claimed, or the peer cannot be
    reached, a transfer's `arrived` raises that, not `claim`."""

    def __init__(
        self,
        unit: str,
        arena: Arena,
        secret: str,
        host: str = "127.0.0.1",
        *,
        slots: int = 4096,
        links: int = LINKS,
    ) -> None:
        """secret: what all units of the fleet know. host: the address of this host at which peers reach it.
        links: connections for pieces to each peer. Raises ConfigError if `host` is no address of this
        host."""
        self._arena, self._secret, self._links = arena, secret, links
        memory = arena.bytes.numpy().data
        self._reservations = Reservations(unit, slots, arena.block_bytes)
        self._receiver = TcpReceiver(unit, memory, self._reservations, secret, host)
        where = TcpEndpoint(*self._receiver.address, self._receiver.identity, arena.blocks, arena.block_bytes)
        self.endpoint = Endpoint(unit=unit, kind="tcp", where=msgspec.msgpack.encode(where))
        self._plane = TcpPlane(memory, secret, links)

    @property
    def meter(self) -> TransferMeter:
        return self._plane.meter

    def open(self, begin: int, digest: int, blocks: bytes = b"", ticket: Ticket | None = None) -> Ticket:
        return self._reservations.open(begin, digest, blocks, ticket)

    def measure(self, peer: Endpoint) -> float:
        where = address_of(peer, "tcp", TcpEndpoint)
        return measure_rate((where.host, where.port), where.identity, self._secret, self._links)

    def received(self, ticket: Ticket) -> int:
        return self._reservations.received(ticket)

    def close(self, ticket: Ticket) -> bool:
        return self._reservations.close(ticket)

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> TcpTransfer:
        self._plane.refuse_over()
        where = address_of(peer, "tcp", TcpEndpoint)
        target = WriteTarget.of(address, begin, end, own=self._arena, peer=where)
        transfer = TcpTransfer(self._plane.submit, peer, where, target, address, digest, begin, end)
        self._plane.order(transfer)  # the peer is asked at once, before there is anything to write
        return transfer

    def close_all(self) -> None:
        """Fails what has not arrived, and ends all connections and their threads."""
        self._plane.close()
        self._receiver.close()

"""Receives K and V over TCP: a unit's reservations, and the threads that write into its arena.

The receiver alone decides. A thread for each connection reads pieces, and it writes only inside a fence,
which it enters for one call to the kernel that copies what has come and does not wait. So a sender that
stalls in the middle of a piece stands outside, and holds nobody up.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from kvloom.transfer.grants import ClaimRefused, Delivered, Granted
from kvloom.transfer.target import WritableBytes
from kvloom.transfer.tcp_link import (
    FROM_SENDER,
    IDENTITY,
    Claim,
    Done,
    FromReceiver,
    FromSender,
    Gone,
    Introduced,
    LinkEnded,
    LinkError,
    Purpose,
    Quit,
    Verdict,
    end,
    prepare,
    reason_of,
    receive_header,
    receive_message,
    receive_piece,
    tell,
    throw_away,
    wait_for_ever,
)
from kvloom.types.address import Ticket, other_address
from kvloom.types.errors import BadRequest, ConfigError, QueueFull
from kvloom.types.geometry import I64

_log = logging.getLogger(__name__)
_MOST_GREETING = 64  # connections that have yet to prove themselves, or only measure; beyond, the oldest ends
_BACKLOG = 128
_SCRATCH = 1 << 16  # bytes that are thrown away at once


class Session:
    """One sender's connections. The end of one is the end of all."""

    def __init__(self, control: socket.socket) -> None:
        self.claims: dict[int, _Claimed] = {}
        self._control = control
        self._sockets = {control}
        self._over = False
        self._telling = threading.Lock()

    def join(self, data: socket.socket) -> bool:
        """Returns whether the session still is."""
        with self._telling:
            if not self._over:
                self._sockets.add(data)
            return not self._over

    def tell(self, message: FromReceiver) -> None:
        """Tells the sender; one that does not listen loses its session."""
        try:
            with self._telling:
                if not self._over:
                    tell(self._control, message)
        except (LinkError, OSError):
            self.end()

    def end(self) -> None:
        """Wakes all threads of the session, each of which calls this before it closes its connection."""
        with self._telling:
            if not self._over:
                self._over = True
                for sock in self._sockets:
                    end(sock)


@dataclass(slots=True, eq=False)
class _Claimed:
    """The tokens that a sender has claimed of a reservation."""

    session: Session
    number: int
    reservation: _Reservation
    begin: int
    end: int
    live: bool = True
    """Whether its bytes may still be written."""
    writing: int = 0
    """Threads that are inside the fence."""
    seen: int = 0
    """Pieces that have come."""
    total: int | None = None
    """Pieces that there are, once the sender has said it."""
    given_up: bool = False
    """Whether the sender has said that nothing counts."""

    @property
    def complete(self) -> bool:
        """Returns whether it is all there, with all tokens before it."""
        return self.live and self.total == self.seen and self.begin <= self.reservation.received

    def forget(self) -> None:
        """Undoes the claim, unless another has followed."""
        claims = self.reservation.claims
        if self in claims:
            claims.remove(self)
            if self.reservation.claimed == self.end:
                self.reservation.claimed = self.begin


@dataclass(slots=True, eq=False)
class _Reservation:
    digest: int
    writable: WritableBytes
    claimed: int
    received: int
    claims: list[_Claimed] = field(default_factory=list)


class Reservations:
    """The receiver's ledger, on any thread."""

    def __init__(self, unit: str, most: int, block_bytes: int) -> None:
        self._unit = unit
        self._most = most
        self._block_bytes = block_bytes
        self._generation = 0
        self._open: dict[Ticket, _Reservation] = {}
        self._lock = threading.Lock()

    def open(self, begin: int, digest: int, blocks: bytes, ticket: Ticket | None = None) -> Ticket:
        """ticket: one that another ledger has given out; None: a new one."""
        writable = WritableBytes(blocks, self._block_bytes)
        with self._lock:
            if len(self._open) >= self._most:
                raise QueueFull(f"{self._most} reservations are open already", retry_after=1)
            self._generation += 1
            ticket = ticket or Ticket(0, self._generation)
            self._open[ticket] = _Reservation(digest, writable, begin, begin)
            return ticket

    def received(self, ticket: Ticket) -> int:
        with self._lock:
            if ticket not in self._open:
                raise BadRequest("this reservation is over")
            return self._open[ticket].received

    def close(self, ticket: Ticket) -> bool:
        with self._lock:
            reservation = self._open.get(ticket)
            if reservation is None:
                return True
            ended = [claimed for claimed in reservation.claims if claimed.live]
            for claimed in ended:
                claimed.live = False
            closed = not any(claimed.writing for claimed in reservation.claims)
            if closed:
                del self._open[ticket]
            reservation.claimed = -1  # nobody claims any more
        for claimed in ended:
            claimed.session.tell(ClaimRefused(claimed.number, self._over()))
        return closed

    # for the threads that receive

    def hear(self, session: Session, message: FromSender) -> list[tuple[Session, FromReceiver]]:
        """Returns what to answer, to whom. Raises LinkError for what no sender says."""
        with self._lock:
            if isinstance(message, Claim):
                return [(session, self._claim(session, message))]
            claimed = session.claims.get(message.number)
            if claimed is None:
                if isinstance(message, Quit):  # what it claimed was refused
                    return [(session, Gone(message.number))]
                raise LinkError(f"transfer {message.number} is done, but never was")
            if claimed.total is not None and isinstance(message, Done):
                raise LinkError(f"transfer {message.number} is done twice")
            claimed.total = message.pieces
            if isinstance(message, Quit):
                claimed.live, claimed.given_up = False, True
            return self._settle(claimed)

    def find(self, session: Session, number: int, starts: I64, sizes: I64) -> _Claimed:
        """Returns the claim that a piece is of. Raises LinkError if it leaves the claim's blocks, or nothing
        is claimed."""
        with self._lock:
            claimed = session.claims.get(number)
        if claimed is None:
            raise LinkError(f"a piece of transfer {number}, which has claimed nothing")
        if not claimed.reservation.writable.hold(starts, sizes):
            raise LinkError(f"a piece of transfer {number} that is not in its blocks")
        return claimed

    @contextmanager
    def fence(self, claimed: _Claimed) -> Iterator[bool]:
        """Says whether the caller may write what has come, until the end of the block."""
        with self._lock:
            live = claimed.live
            claimed.writing += live
        try:
            yield live
        finally:
            with self._lock:
                claimed.writing -= live
                if not claimed.writing and claimed.number not in claimed.session.claims:
                    claimed.forget()  # its session has ended meanwhile

    def count(self, claimed: _Claimed) -> list[tuple[Session, FromReceiver]]:
        """Notes that a piece has come, and returns what to say to whom."""
        with self._lock:
            claimed.seen += 1
            return self._settle(claimed) if claimed.number in claimed.session.claims else []

    def end(self, session: Session) -> None:
        """Forgets what a session has claimed; what a thread of it still writes, when that has ended."""
        with self._lock:
            for claimed in session.claims.values():
                claimed.live = False
                if not claimed.writing:
                    claimed.forget()
            session.claims.clear()

    # private, under the lock

    def _claim(self, session: Session, claim: Claim) -> FromReceiver:
        reservation = self._open.get(claim.ticket)
        if reservation is None or reservation.claimed < 0:
            return ClaimRefused(claim.number, self._over())
        if reservation.digest != claim.digest:
            return ClaimRefused(claim.number, other_address(self._unit))
        if reservation.claimed != claim.begin or claim.end < claim.begin:
            return ClaimRefused(
                claim.number,
                f"begin: tokens up to {reservation.claimed} of this reservation at {self._unit} are claimed; "
                f"the next send begins there, not at {claim.begin}",
            )
        if claim.number in session.claims:
            raise LinkError(f"a second claim by the number {claim.number}")
        reservation.claimed = claim.end
        claimed = _Claimed(session, claim.number, reservation, claim.begin, claim.end)
        reservation.claims.append(claimed)
        session.claims[claim.number] = claimed
        return Granted(claim.number)

    def _settle(self, claimed: _Claimed) -> list[tuple[Session, FromReceiver]]:
        """Ends what has wholly come."""
        if claimed.total is not None and claimed.seen > claimed.total:
            raise LinkError(f"transfer {claimed.number} has more pieces than it said")
        if claimed.total != claimed.seen:
            return []
        if claimed.given_up:
            return self._give_back(claimed)
        return self._deliver(claimed.reservation)

    def _give_back(self, claimed: _Claimed) -> list[tuple[Session, FromReceiver]]:
        claimed.forget()
        del claimed.session.claims[claimed.number]
        return [(claimed.session, Gone(claimed.number))]

    def _deliver(self, reservation: _Reservation) -> list[tuple[Session, FromReceiver]]:
        """Moves `received` over what is there."""
        letters: list[tuple[Session, FromReceiver]] = []
        while claimed := next((one for one in reservation.claims if one.complete), None):
            reservation.received = max(reservation.received, claimed.end)
            reservation.claims.remove(claimed)
            del claimed.session.claims[claimed.number]
            letters.append((claimed.session, Delivered(claimed.number)))
        return letters

    def _over(self) -> str:
        return f"the reservation at {self._unit} is over"


class TcpReceiver:
    """Listens, and has a thread for each connection."""

    def __init__(
        self, unit: str, arena: memoryview, reservations: Reservations, secret: str, host: str
    ) -> None:
        """host: the address at which peers reach this host. Raises ConfigError if it is none of this
        host's."""
        self.identity = secrets.token_bytes(IDENTITY)
        """Names this process: another one that listens at the same port is another."""
        self._arena = arena
        self._reservations = reservations
        self._secret = secret
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"transport_host: {host}: {reason_of(error)}; an address of this host is right"
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._greeting: deque[socket.socket] = deque()
        self._sessions: dict[bytes, Session] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._refused: tuple[str, str] | None = None  # what was logged last
        self._thread = threading.Thread(target=self._accept, name=f"kv-tcp-accept-{unit}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and threads; nothing is written any more."""
        with self._lock:
            self._closing = True
            greeting, sessions = list(self._greeting), list(self._sessions.values())
        end(self._listener)
        for sock in greeting:
            end(sock)
        for session in sessions:
            session.end()
        self._thread.join()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    # on the thread that accepts

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    _log.error("the KV plane takes no more connections: %s", reason_of(error))
                return
            thread = threading.Thread(
                target=self._serve, args=(sock, address[0]), name="kv-tcp-receive", daemon=True
            )
            with self._lock:
                self._greeting.append(sock)
                if len(self._greeting) > _MOST_GREETING:
                    end(self._greeting[0])
                self._threads.add(thread)
            thread.start()

    # on a connection's thread

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            with sock:
                try:
                    prepare(sock)
                    introduced = Introduced(sock, self._secret, self.identity)
                    if introduced.purpose is Purpose.PROBE:
                        introduced.welcome()
                        throw_away(sock)
                finally:
                    with self._lock:
                        self._greeting.remove(sock)
                if introduced.purpose is Purpose.CONTROL:
                    self._control(sock, introduced)
                else:
                    self._data(sock, introduced)
        except (LinkEnded, OSError) as error:
            _log.debug("a connection of %s has ended: %s", address, reason_of(error))
        except LinkError as error:
            self._tell_refused(address, str(error))
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _tell_refused(self, address: str, reason: str) -> None:
        """Logs why this end has ended a connection, once while the reason stays the same."""
        if self._closing or self._refused == (address, reason):
            return
        self._refused = address, reason
        _log.warning("the KV plane has ended a connection of %s: %s", address, reason)

    def _control(self, sock: socket.socket, introduced: Introduced) -> None:
        session = Session(sock)
        with self._lock:
            if self._closing or introduced.session in self._sessions:
                raise LinkError("a session begins twice")
            self._sessions[introduced.session] = session
        try:
            introduced.welcome()
            wait_for_ever(sock)
            while True:
                message = receive_message(sock, FROM_SENDER)
                self._answer(self._reservations.hear(session, message))
        finally:
            session.end()
            with self._lock:
                del self._sessions[introduced.session]
            self._reservations.end(session)

    def _data(self, sock: socket.socket, introduced: Introduced) -> None:
        with self._lock:
            session = self._sessions.get(introduced.session)
        if session is None or not session.join(sock):
            introduced.refuse(Verdict.NO_SESSION)
            return
        try:
            introduced.welcome()
            ready = select.poll()
            ready.register(sock, select.POLLIN)
            scratch = memoryview(bytearray(_SCRATCH))
            wait_for_ever(sock)
            while True:
                number, starts, sizes = receive_header(sock)
                claimed = self._reservations.find(session, number, starts, sizes)
                places = zip(starts.tolist(), sizes.tolist(), strict=True)
                views = [self._arena[start : start + size] for start, size in places]
                receive_piece(sock, ready, views, partial(self._reservations.fence, claimed), scratch)
                self._answer(self._reservations.count(claimed))
        finally:
            session.end()

    def _answer(self, letters: list[tuple[Session, FromReceiver]]) -> None:
        for session, message in letters:
            session.tell(message)

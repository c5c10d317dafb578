"""The ways by which a unit's K and V reach other units, and the choice between them for each peer.

A receiver offers all its ways with each reservation, under one ticket. The sender takes shared memory if both
are on one host. Otherwise it measures, when it first meets the peer, how fast each way that both have carries
some MB, and takes the faster one from then on; until it knows, it takes the way that all units of the fleet
have.

Each way keeps a ledger of its own of what has been claimed and has arrived. So what is sent into one
reservation in several parts, perhaps by several units, always takes the way that all have, also between units
of one host.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvloom.kv.arena import Arena, ArenaMemory
from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import place_of
from kvloom.transfer.plane import address_of
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.tcp import TcpTransport
from kvloom.types.address import Endpoint, EndpointKind, KVAddress, Ticket
from kvloom.types.errors import BadRequest, ConfigError, KvloomError
from kvloom.types.load import LinkLoad
from kvloom.types.spec import TransportName
from kvloom.types.transfer import Transfer, TransferMeter, Transport

_COPIED: Final = 8 << 20  # bytes by which the rate of this host's memory is measured
_END_SECONDS: Final = 2.0  # for the thread that measures, once the ways are closed

_log = logging.getLogger(__name__)


class RemoteTransport(Transport, Protocol):
    """A transport that reaches other hosts."""

    def open(self, begin: int, digest: int, blocks: bytes = b"", ticket: Ticket | None = None) -> Ticket:
        """Does as `Transport.open`. ticket: the one that another way has given out for the reservation."""

    def measure(self, peer: Endpoint) -> float:
        """Returns the bytes a second that this way carries to a peer, on a thread that may wait. Raises
        KvloomError."""


class PathsEndpoint(Struct, frozen=True, array_like=True):
    """The address of an endpoint of kind `auto`: the ways of a unit, and what names its host to those that
    share it."""

    host: Annotated[str, Meta(max_length=128)]
    ways: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=4)]


@dataclass(frozen=True, slots=True)
class _Known:
    """A peer process, as this unit has met it."""

    endpoint: Endpoint
    way: Transport
    """The way by which whole reservations are filled."""


class PathsMeter(TransferMeter):
    """Sums what a unit has sent by all its ways."""

    def __init__(self, ways: Sequence[Transport]) -> None:
        super().__init__()
        self._ways = ways

    def refresh(self) -> None:
        """Adds up what the ways have sent so far."""
        self.bytes = sum(way.meter.bytes for way in self._ways)
        self.seconds = sum(way.meter.seconds for way in self._ways)


class Paths:
    """Implements `Transport` over several others, on one event loop, with a thread that measures."""

    def __init__(
        self, unit: str, near: Transport | None, far: Sequence[RemoteTransport], host: str = ""
    ) -> None:
        """near: the way within a host. far: those to other hosts, the one that all units have first. host:
        names this unit's host; empty: as the system says. There is one way at least."""
        self._near, self._far = near, far
        self._ways: list[Transport] = [*([near] if near is not None else []), *far]
        self._host = host or this_host()
        where = PathsEndpoint(self._host, tuple(way.endpoint for way in self._ways))
        self.endpoint = Endpoint(unit=unit, kind="auto", where=msgspec.msgpack.encode(where))
        if len(self._ways) == 1:  # there is nothing to choose, and peers need not know of this
            self.endpoint = self._ways[0].endpoint
        self._meter = PathsMeter(self._ways)
        self._closing: dict[Ticket, int] = {}  # what had arrived when somebody began to close it
        self._known: dict[str, _Known] = {}  # by unit
        self._lock = threading.Lock()  # of `_known`
        self._to_measure: SimpleQueue[_Met | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._measure_all, name="kv-paths", daemon=True)
        self._thread.start()

    @property
    def meter(self) -> TransferMeter:
        self._meter.refresh()
        return self._meter

    def knows(self, unit: str) -> bool:
        """Returns whether a unit has been met that could be reached, or is being measured."""
        with self._lock:
            return unit in self._known

    # receiving

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        ticket = None if self._near is None else self._near.open(begin, digest, blocks)
        opened = [] if self._near is None else [self._near]
        try:
            for way in self._far:
                ticket = way.open(begin, digest, blocks, ticket)
                opened.append(way)
        except KvloomError:
            for one in opened:
                assert ticket is not None
                one.close(ticket)
            raise
        assert ticket is not None
        return ticket

    def received(self, ticket: Ticket) -> int:
        if ticket in self._closing:
            return self._closing[ticket]
        return max(way.received(ticket) for way in self._ways)

    def close(self, ticket: Ticket) -> bool:
        if ticket not in self._closing:
            with suppress(BadRequest):  # it is closed already
                self._closing[ticket] = self.received(ticket)
        closed = [way.close(ticket) for way in self._ways]
        if all(closed):
            self._closing.pop(ticket, None)
        return all(closed)

    # sending

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Transfer:
        where = self._decode(peer)
        offered = {way.kind: way for way in where.ways}
        shared = [way for way in self._far if way.endpoint.kind in offered]
        near = self._near
        if near is not None and (where.host != self._host or near.endpoint.kind not in offered):
            near = None
        if near is None and not shared:
            here, there = (", ".join(kinds) for kinds in ([way.endpoint.kind for way in self._ways], offered))
            raise BadRequest(
                f"peer: {peer.unit} moves K and V by {there}, this unit by {here}; units that have one kind "
                "in common are right"
            )
        way = self._chosen(peer, near, shared, offered)
        if shared and (begin, end) != (address.begin, address.end):
            way = shared[0]
        return way.claim(offered[way.endpoint.kind], address, digest, begin, end)

    def _decode(self, peer: Endpoint) -> PathsEndpoint:
        if peer.kind == "auto":
            return address_of(peer, "auto", PathsEndpoint)
        return PathsEndpoint("", (peer,))

    def _chosen(
        self,
        peer: Endpoint,
        near: Transport | None,
        shared: Sequence[RemoteTransport],
        offered: Mapping[EndpointKind, Endpoint],
    ) -> Transport:
        """Returns the way by which a reservation of this peer is filled. One that is met for the first time,
        or as another process, is measured from here on."""
        with self._lock:
            known = self._known.get(peer.unit)
            if known is not None and known.endpoint == peer:
                return known.way
            way = near or shared[0]
            self._known[peer.unit] = _Known(peer, way)
        self._to_measure.put(_Met(peer, near, tuple(shared), offered))
        return way

    # on the thread that measures

    def _measure_all(self) -> None:
        while (met := self._to_measure.get()) is not None:
            if met.near is not None:
                self._settle(met, met.near, memory_rate())
                continue
            rates: dict[RemoteTransport, float] = {}
            for way in met.shared:
                try:
                    rates[way] = way.measure(met.offered[way.endpoint.kind])
                except KvloomError as error:
                    _log.debug("%s by %s: %s", met.peer.unit, way.endpoint.kind, error.message)
            if rates:
                best = max(rates, key=lambda way: rates[way])
                self._settle(met, best, rates[best])
            else:
                self._forget(met)

    def _settle(self, met: _Met, way: Transport, rate: float) -> None:
        unit, kind = met.peer.unit, way.endpoint.kind
        with self._lock:
            if self._known[unit].endpoint != met.peer:  # it is another process by now
                return
            self._known[unit] = _Known(met.peer, way)
            self._meter.links = {**self._meter.links, unit: LinkLoad(kind, rate)}
        _log.info("K and V go to %s by %s, at %.2f GB/s", unit, kind, rate / 1e9)

    def _forget(self, met: _Met) -> None:
        """Lets a peer that no way has reached be measured when it is met again."""
        with self._lock:
            if self._known[met.peer.unit].endpoint == met.peer:
                del self._known[met.peer.unit]

    def close_all(self) -> None:
        self._to_measure.put(None)
        for way in self._ways:
            way.close_all()
        self._thread.join(_END_SECONDS)  # what it measures fails, because the ways are closed


@dataclass(frozen=True, slots=True)
class _Met:
    """A peer that is to be measured, with the ways that lead there."""

    peer: Endpoint
    near: Transport | None
    shared: tuple[RemoteTransport, ...]
    offered: Mapping[EndpointKind, Endpoint]


@cache
def this_host() -> str:
    """Returns what two processes have in common that can map each other's memory: the boot of one kernel, and
    the ids of its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


@cache
def memory_rate() -> float:
    """Returns the bytes a second that are copied within this host's memory, which is what shared memory
    carries."""
    source, target = np.zeros(_COPIED, np.uint8), np.ones(_COPIED, np.uint8)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return _COPIED / min(seconds)


def open_paths(unit: str, transport: TransportName, arena: ArenaMemory, secret: str, host: str) -> Paths:
    """Returns the transport of a unit that is named `auto`, `nixl` or `tcp`. secret, host: as of
    `TcpTransport`. NIXL is passed over under `auto` if it is not there. Raises ConfigError."""
    near: Transport | None = None
    far: list[RemoteTransport] = []
    try:
        if transport == "auto":
            near = (
                ShmTransport(unit, arena)
                if isinstance(arena, Arena)
                else CudaIpcTransport(unit, arena, CudaMemory(arena.bytes.device))
            )
        if transport == "tcp" or (transport == "auto" and isinstance(arena, Arena)):
            if not isinstance(arena, Arena):
                raise ConfigError("transport: tcp carries K and V of CPU units; a GPU's cross hosts by nixl")
            far.append(TcpTransport(unit, arena, secret, host))
        if transport == "nixl":
            far.append(NixlTransport(unit, arena, place_of(arena), host))
        elif transport == "auto":
            try:
                far.append(NixlTransport(unit, arena, place_of(arena), host))
            except ConfigError as error:
                _log.debug("K and V do not go by NIXL: %s", error.message)
    except ConfigError:
        for way in (*([near] if near is not None else []), *far):
            way.close_all()
        raise
    return Paths(unit, near, far)

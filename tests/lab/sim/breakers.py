"""Parts of a simulation that break a law, and a router program that pins what it asks for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvloom.lab.faults.faulty_wire import FaultyWire
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.invariants import InvariantChecker
from kvloom.lab.sim.content import Content
from kvloom.lab.sim.links import Entry
from kvloom.lab.sim.offload import SimulatedOffloadBackend
from kvloom.lab.sim.processes import EngineProcess
from kvloom.router import Call, Fleet, Frames
from kvloom.types.address import Ticket
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.job import Job, JobResult
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent
from kvloom.types.verbs import RemoteSend, Standing


class ShortWire(FaultyWire):
    """Streams end without a word about the first choice's end."""

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        async with aclosing(super().start_generate(body)) as frames:
            async for frame in frames:
                yield [one for one in frame if not (isinstance(one, EndEvent) and one.choice == 0)]


class StutteringWire(FaultyWire):
    """Some tokens come twice."""

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        async with aclosing(super().start_generate(body)) as frames:
            async for frame in frames:
                yield [again for one in frame for again in [one] * (1 + isinstance(one, TokenEvent))]


class DeafWire(FaultyWire):
    """Nobody hears that a request is over."""

    async def abort(self, request: str, choice: int | None = None) -> None:
        pass


class LyingWire(FaultyWire):
    """Of a request that stands still it is told another last token than it has."""

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        told = await super().hold(request, sends)
        made = [replace(one, tokens=[*one.tokens[:-1], one.tokens[-1] ^ 1]) for one in told.made]
        return replace(told, made=made)


class RestlessWire(FaultyWire):
    """What is to stand still goes on."""

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        told = await super().hold(request, sends)
        await self.resume(request)
        return told


class Smeared:
    """An arena of which other numbers are read than are written."""

    def __init__(self, arena: AnyArray) -> None:
        self._arena = arena

    def __getitem__(self, at: Any) -> AnyArray:
        read: AnyArray = self._arena[at] + 1
        return read

    def __setitem__(self, at: Any, numbers: AnyArray) -> None:
        self._arena[at] = numbers


def broken_at_start(spoil: Callable[[EngineProcess], None]) -> type[FaultyHost]:
    """Returns hosts whose processes are spoilt once they have started."""

    class BrokenHost(FaultyHost):
        def start(self) -> None:
            super().start()
            spoil(self.reached)

    return BrokenHost


@broken_at_start
def SmearingHost(process: EngineProcess) -> None:
    """What it sends is not what it has."""
    process.transport.arena = Smeared(process.transport.arena)  # type: ignore[assignment, arg-type]


@broken_at_start
def PinningHost(process: EngineProcess) -> None:
    """Who ends a request leaves what is pinned for it."""
    process.engine._pins.unpin = lambda request: 0  # type: ignore[method-assign]


@broken_at_start
def LosingHost(process: EngineProcess) -> None:
    """Its pool has a page that nobody holds."""
    next(iter(process.engine.pool.caches.values())).pages.allocate(1)


@broken_at_start
def KeepingHost(process: EngineProcess) -> None:
    """Its pool keeps a sequence that no request has."""
    cache = next(iter(process.engine.pool.caches.values()))
    cache.add_sequence(10**9)
    cache.prepare_receive(10**9, 1)


@broken_at_start
def UnfencedHost(process: EngineProcess) -> None:
    """Who sends to it may write for ever, and its blocks are used again meanwhile."""
    transport = process.transport
    entry, close = transport.entry, transport.close
    known: dict[Ticket, Entry] = {}

    def open_for_ever(ticket: Ticket) -> Entry:
        if ticket not in known:
            known[ticket] = entry(ticket)
        return known[ticket]

    def close_at_once(ticket: Ticket) -> bool:
        transport.ledger[ticket.slot].copying = 0
        return close(ticket)

    transport.entry, transport.close = open_for_ever, close_at_once  # type: ignore[method-assign]


@broken_at_start
def IdleHost(process: EngineProcess) -> None:
    """No job ever ends."""

    def launch(job: Job) -> asyncio.Future[JobResult]:
        return asyncio.get_running_loop().create_future()

    process.executor.launch = launch  # type: ignore[method-assign]


@broken_at_start
def FaintingHost(process: EngineProcess) -> None:
    """Its engine's loop ends at the first job, of something that is no error of ours."""

    def launch(job: Job) -> asyncio.Future[JobResult]:
        raise ZeroDivisionError("no device")

    process.executor.launch = launch  # type: ignore[method-assign]


@broken_at_start
def ShiftingLoanHost(process: EngineProcess) -> None:
    """Its lender's blocks are read one further than they were written."""
    if process.backend is None:
        return
    lent, turns = process.backend.lent_blocks, itertools.cycle((1, 0))

    def shifted(model: str) -> tuple[SimulatedOffloadBackend, I32] | None:
        found = lent(model)
        return found and (found[0], np.roll(found[1], next(turns)))

    process.backend.lent_blocks = shifted  # type: ignore[method-assign]


class LyingDevice:
    """Satisfies `Content`: says another token than it should, but writes what it says."""

    def __init__(self, real: Content, vocab: int) -> None:
        self._real = real
        self._vocab = vocab
        self.begin = real.begin
        self.write = real.write

    def draw(self, job: Job, step: int) -> list[int]:
        return [(token + 1) % self._vocab for token in self._real.draw(job, step)]


class LyingHost(FaultyHost):
    def device(self, checker: InvariantChecker) -> Content:
        return LyingDevice(super().device(checker), checker.vocab)


async def pinning(call: Call, fleet: Fleet) -> Frames:
    """A router program that pins what it asks for."""
    replica = fleet.turn()
    async for frame in call.start_generate(replica):
        if frame:
            await call.pin(replica)
        yield frame

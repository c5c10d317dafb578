"""Each fault alone: what the caller is told, and what the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvloom.lab.faults.faults import NOTHING, CallFault, FaultSource, Rates
from kvloom.lab.faults.faulty_wire import FaultyWire
from kvloom.lab.faults.host import LATENCY, FaultyHost
from kvloom.lab.faults.invariants import lone_answer
from kvloom.lab.faults.journal import Journal
from kvloom.lab.sim.links import TimedLink
from kvloom.lab.sim.offload import OffloadingUnits
from kvloom.lab.sim.processes import Surroundings
from kvloom.lab.sim.virtual_time import LoopClock
from kvloom.types.errors import Unavailable
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend
from tests.lab.sim.fleets import check_whole, now, unit, virtually

DELAY = 0.01


class Listed(FaultSource):
    """These, one after the other, and then none."""

    def __init__(self, *faults: CallFault) -> None:
        super().__init__("", Rates())
        self.faults = list(faults)

    def next(self) -> CallFault:
        return self.faults.pop(0) if self.faults else NOTHING


@dataclass
class Line:
    """An engine and a wire to it; others is a second engine that it can send to."""

    host: FaultyHost
    wire: FaultyWire
    faults: Listed
    other: FaultyHost
    journal: Journal

    def said(self, what: str) -> list[float]:
        """When."""
        return [float(line.split()[0]) for line in self.journal.lines if what in line]


@asynccontextmanager
async def line(*faults: CallFault) -> AsyncIterator[Line]:
    clock, failures = LoopClock(asyncio.get_running_loop()), list[BaseException]()
    journal, listed = Journal(clock, kept=True), Listed(*faults)
    around = Surroundings(
        clock, OffloadingUnits(()), failures.append, LATENCY, lambda _: TimedLink(1e6, LATENCY)
    )
    units = [replace(unit(name, ["small"], blocks=100), max_steps=1) for name in ("unit-0", "unit-1")]
    hosts = [FaultyHost(one, around, Listed(), journal) for one in units]
    for host in hosts:
        host.start()
    wire = FaultyWire(hosts[0], clock, DELAY, listed, journal, failures.append)
    yield Line(hosts[0], wire, listed, hosts[1], journal)
    await clock.sleep(100)
    for host in hosts:
        if host.process is not None:
            check_whole([host.process.engine])
        assert not any(checker.wrong for checker in host.checkers)
        await host.stop()
    assert not failures


def body(request: str = "r", *, tokens: int = 6, prompt: int = 20) -> StartGenerate:
    return StartGenerate(
        model="small",
        request=request,
        prompt=list(range(prompt)),
        sampling=SamplingParams(max_tokens=tokens, seed=1),
    )


def room(request: str = "r") -> PrepRecv:
    return PrepRecv(model="small", request=request, prompt=list(range(20)))


def send(spot: Prepared) -> RemoteSend:
    return RemoteSend(model="small", request="r", prompt=room().prompt, address=spot.address, peer=spot.peer)


async def used(host: FaultyHost) -> int:
    return (await host.reached.engine.load()).models["small"].used_blocks


async def answer(wire: FaultyWire, order: StartGenerate) -> list[int]:
    """The tokens, where its stream ends as it should."""
    tokens, ends = list[int](), list[str]()
    async with aclosing(wire.start_generate(order)) as frames:
        async for frame in frames:
            tokens += [event.token for event in frame if isinstance(event, TokenEvent)]
            ends += [event.reason for event in frame if isinstance(event, EndEvent)]
    assert ends == ["length"]
    return tokens


@virtually
async def test_a_call_takes_both_ways() -> None:
    async with line() as it:
        await it.wire.prep_recv(room())
        assert now() == pytest.approx(2 * DELAY)
        assert await answer(it.wire, body()) == lone_answer(body(), 0, context=256, vocab=500)


@virtually
async def test_a_lost_call_never_arrives() -> None:
    async with line(CallFault(lost=True, noticed=3.0)) as it:
        with pytest.raises(Unavailable, match="on the way there"):
            await it.wire.prep_recv(room())
        assert now() == pytest.approx(DELAY + 3.0)
        assert not await used(it.host)


@virtually
async def test_a_call_whose_answer_is_lost_was_done() -> None:
    async with line(CallFault(unanswered=True, noticed=1.0)) as it:
        with pytest.raises(Unavailable, match="before the answer"):
            await it.wire.prep_recv(room())
        assert await used(it.host)


@virtually
async def test_a_late_call_arrives_though_its_caller_has_gone() -> None:
    async with line(CallFault(late=2.0)) as it:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await it.wire.prep_recv(room())
        assert not await used(it.host)
        await asyncio.sleep(1.5)
        assert await used(it.host)


@virtually
async def test_a_call_that_arrives_again_after_it_was_undone() -> None:
    """It reserves anew, until its lease runs out."""
    async with line(CallFault(again=1.0)) as it:
        await it.wire.prep_recv(room())
        await it.wire.abort("r")
        assert not await used(it.host)
        await asyncio.sleep(1.0)
        assert await used(it.host)
        assert it.said("prep_recv r arrives again") == pytest.approx([DELAY + 1.0])


@virtually
async def test_a_second_copy_of_a_stream_does_the_first_no_harm() -> None:
    for again in (0.0005, 0.02, 2.0):
        async with line(CallFault(again=again)) as it:
            assert await answer(it.wire, body()) == lone_answer(body(), 0, context=256, vocab=500)


@virtually
async def test_a_stream_that_breaks_ends_at_the_engine_once_that_is_noticed() -> None:
    async with line(CallFault(cut=3, noticed=0.05)) as it:
        with pytest.raises(Unavailable, match="broke"):
            await answer(it.wire, body(tokens=200))
        broken = now()
        assert await used(it.host)
        await asyncio.sleep(0.06)
        assert not await used(it.host)
        assert max(it.said("decode")) < broken + 0.06


@virtually
async def test_a_client_that_closes_its_stream_ends_the_request() -> None:
    async with line() as it:
        frames = it.wire.start_generate(body(tokens=200))
        async for frame in frames:
            if frame:
                break
        await frames.aclose()
        await asyncio.sleep(0.01)
        assert not await used(it.host)


@virtually
async def test_a_send_ends_with_its_caller_and_other_verbs_do_not() -> None:
    async with line() as it:
        spot = await it.other.reached.engine.prep_recv(room())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DELAY + 0.001):
                await it.wire.remote_send(send(spot))
        await asyncio.sleep(1.0)
        assert not it.said("remote_send r is answered")
        assert it.other.reached.transport.ledger[spot.address.ticket.slot].received == 0


@virtually
async def test_who_calls_a_dead_engine_or_one_that_dies_is_told() -> None:
    async with line() as it:
        streaming = asyncio.create_task(answer(it.wire, body(tokens=200)))
        await asyncio.sleep(0.1)
        it.host.kill()
        with pytest.raises(Unavailable, match="the engine is gone"):
            await streaming
        with pytest.raises(Unavailable, match="nobody answers there"):
            await it.wire.load()
        it.host.start()
        assert await answer(it.wire, body())


@virtually
async def test_what_a_dead_engine_was_about_to_write_is_never_written() -> None:
    async with line() as it:
        spot = await it.other.reached.engine.prep_recv(room())
        before = it.other.checkers[0].arena.copy()
        sending = asyncio.create_task(it.wire.remote_send(send(spot)))
        await asyncio.sleep(DELAY + 0.003)  # its first layer has been computed, and is being copied
        assert it.other.reached.transport.ledger[spot.address.ticket.slot].copying
        it.host.kill()
        with pytest.raises(Unavailable):
            await sending
        await asyncio.sleep(1.0)
        assert (it.other.checkers[0].arena == before).all()


@virtually
async def test_a_wire_whose_caller_is_gone_carries_nothing() -> None:
    async with line() as it:
        it.wire.cut()
        with pytest.raises(Unavailable, match="the gateway is gone"):
            await it.wire.prep_recv(room())
        assert not it.said("prep_recv")

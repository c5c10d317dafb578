"""Reservations and sends that are told apart, and those that are too many."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.engine import transfers
from kvloom.engine.engine import MAX_RESERVED
from kvloom.engine.reservations import MOST_RESERVATIONS
from kvloom.types.errors import BadRequest, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.verbs import PrepRecv
from tests import plane
from tests.modelled import ask, expected, turns
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units


def test_reservations_leave_rows_for_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "_SLOTS", 4096)
    assert MOST_RESERVATIONS < MAX_RESERVED

    async def test() -> None:
        async with units(1) as (d,):
            for i in range(MOST_RESERVATIONS):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request=f"r{i}", prompt=[i], end=0))
            with pytest.raises(QueueFull, match="are open already"):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="more", prompt=[1], end=0))
            await d.engine.prep_recv(PrepRecv(model=MODEL, request="r0", prompt=[0], end=0))
            body = generate(prompt(5), request="runs")
            assert (await ask(d.engine, body)).tokens == expected(d.executor, body)
            await d.pass_time(31)
            await d.engine.prep_recv(PrepRecv(model=MODEL, request="more", prompt=[1], end=0))

    run(test)


def test_room_and_ticket_come_together_or_not_at_all() -> None:
    async def reserve(d: Unit, count: int, length: int) -> None:
        for i in range(count):
            tokens, end = prompt(max(1, length), first=i), length
            await d.engine.prep_recv(PrepRecv(model=MODEL, request=f"r{i}", prompt=tokens, end=end))

    async def test() -> None:
        async with units(1, blocks=100) as (d,):
            with pytest.raises(OutOfBlocks):
                await reserve(d, 9, 20)
            assert 0 < len(d.transport.ledger) < 9
            for i in range(9):
                await d.engine.abort(f"r{i}")
            assert not d.transport.ledger
            with pytest.raises(QueueFull, match="too many reservations"):
                await reserve(d, 99, 0)
            with pytest.raises(QueueFull, match="too many reservations"):
                await d.engine.prep_recv(PrepRecv(model=MODEL, request="more", prompt=prompt(20)))
            assert d.engine.pool.available == d.engine.pool.total

    run(test)


def test_two_receivers_with_equal_tickets_are_two_sends() -> None:
    async def test() -> None:
        async with units(3) as (p, *receivers):
            tokens = prompt(14)
            ask_for = PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1)
            spots = [await d.engine.prep_recv(ask_for) for d in receivers]
            assert spots[0].address.ticket == spots[1].address.ticket
            for d, spot in zip(receivers, spots, strict=True):
                await p.engine.remote_send(sending(tokens, spot, 0, -1))
                answer = await ask(d.engine, generate(tokens, begin=-1))
                assert answer.tokens == expected(d.executor, generate(tokens))

    run(test)


def test_a_send_of_another_prompt_is_not_the_same_send() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(14)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens))
            await p.engine.remote_send(sending(tokens, spot))
            with pytest.raises(BadRequest, match="or another model, prompt or endpoint"):
                await p.engine.remote_send(sending(prompt(14, first=7), spot))

    run(test)


@pytest.mark.parametrize("cut", [1, 5, 10, 20, 40])
def test_a_send_goes_on_for_whoever_still_waits(cut: int) -> None:
    async def test() -> None:
        async with units(2, seed=cut) as (p, d):
            tokens = prompt(40)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1))
            calls = [asyncio.create_task(p.engine.remote_send(sending(tokens, spot, 0, -1))) for _ in "abc"]
            await turns(cut)
            calls[0].cancel()
            await asyncio.gather(calls[0], return_exceptions=True)
            assert await calls[1] == await calls[2]
            answer = await ask(d.engine, generate(tokens, begin=-1))
            assert answer.tokens == expected(d.executor, generate(tokens))

    run(test)


def test_an_engine_that_stops_sends_no_more() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=prompt(20)))
            p.engine.stop()
            with pytest.raises(Unavailable, match="stopping"):
                await p.engine.remote_send(sending(prompt(20), spot))

    run(test)


def test_an_engine_that_stops_says_so_to_who_sends() -> None:
    """Not that it has failed: the same may be asked of another."""

    async def test() -> None:
        async with units(2) as (p, d):
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=prompt(40), end=-1))
            sends = asyncio.create_task(p.engine.remote_send(sending(prompt(40), spot, 0, -1)))
            await turns(2)
            p.engine.stop()
            with pytest.raises(Unavailable, match="stopping"):
                await sends
            await d.engine.abort("r")

    run(test)


def test_answers_are_forgotten_behind_a_send_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_REMEMBERED", 4)

    async def test() -> None:
        async with units(2) as (p, d):
            known = p.engine._transfers._known
            hangs = asyncio.get_running_loop().create_future()
            known["hangs", *[None] * 5] = hangs  # type: ignore[index]
            for i in range(12):
                tokens = prompt(8, first=i)
                spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request=f"r{i}", prompt=tokens))
                await p.engine.remote_send(sending(tokens, spot))
                await d.engine.abort(f"r{i}")
            assert len(known) == 4
            assert hangs in known.values()
            hangs.cancel()

    run(test)

"""Addresses, endpoints and prompts that no prep_recv answered or was asked for: later requests read nothing
of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.types.address import KVAddress
from kvloom.types.errors import BadRequest
from kvloom.types.verbs import Prepared, PrepRecv
from tests.modelled import ask, expected
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units

FORGED = "address: the reservation at unit-1 is for other blocks"


async def _reserve(d: Unit, tokens: list[int], request: str = "r") -> Prepared:
    return await d.engine.prep_recv(PrepRecv(model=MODEL, request=request, prompt=tokens, end=-1))


async def _check(d: Unit, tokens: list[int], request: str, *, begin: int = 0) -> None:
    body = generate(tokens, begin=begin, request=request)
    assert (await ask(d.engine, body)).tokens == expected(d.executor, body)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(length=st.integers(3, 40), at=st.integers(0, 39), warm=st.integers(0, 40), longer=st.booleans())
def test_another_prompt_than_the_receivers_is_refused(length: int, at: int, warm: int, longer: bool) -> None:
    """It differs in one token, or lacks the last that the address takes; what comes after that may differ."""
    at %= length - 1

    async def test() -> None:
        async with units(2, seed=length) as (p, d):
            tokens = prompt(length)
            if 0 < warm <= length:
                await _check(d, tokens[:warm], "w")
            spot = await _reserve(d, tokens)
            before = d.executor.arena.copy()
            other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
            with pytest.raises(BadRequest, match=FORGED):
                await p.engine.remote_send(sending(other, spot, spot.matched, length - 1))
            np.testing.assert_array_equal(d.executor.arena, before)
            if spot.end > spot.matched:
                text = [*tokens[:-1], 7, 7] if longer else tokens[:-1]
                await p.engine.remote_send(sending(text, spot, spot.matched, length - 1))
            await _check(d, tokens, "r", begin=length - 1)
            await _check(d, other, "o")

    run(test)


def _aside(spot: Prepared, blocks: int) -> Iterator[KVAddress]:
    """Its address, but for the blocks: over all of an arena of `blocks`, and in another order."""
    own = spot.address.block_map
    for first in range(0, blocks - own.size + 1, own.size // 2):
        there = np.arange(first, first + own.size, dtype=np.int32).reshape(own.shape)
        yield structs.replace(spot.address, blocks=KVAddress.compress(there))
    yield structs.replace(spot.address, blocks=KVAddress.compress(own[::-1].copy()))


def test_a_forged_address_never_changes_what_a_later_request_reads() -> None:
    """What is cached, what is reserved by others and what nobody holds is all out of its reach."""

    async def test() -> None:
        async with units(2) as (p, d):
            cached, reserved, tokens = (prompt(17, first=i) for i in (1, 2, 3))
            await _check(d, cached, "c")
            theirs, spot = await _reserve(d, reserved, "theirs"), await _reserve(d, tokens)
            before = d.executor.arena.copy()
            forged = [*_aside(spot, d.executor.blocks), structs.replace(spot.address, begin=4, end=20)]
            forged.append(structs.replace(spot.address, blocks=theirs.address.blocks))
            forged.append(structs.replace(theirs.address, ticket=spot.address.ticket))
            for number, address in enumerate(forged):
                body = sending(tokens, spot, 0, 16, request=f"f{number}")
                body = structs.replace(body, address=address, begin=address.begin, end=min(16, address.end))
                with pytest.raises(BadRequest, match=f"{FORGED}|not within the address"):
                    await p.engine.remote_send(body)
            np.testing.assert_array_equal(d.executor.arena, before)
            await p.engine.remote_send(sending(reserved, theirs, 0, 16, request="theirs"))
            await p.engine.remote_send(sending(tokens, spot, 0, 16))
            for text, request, begin in ((reserved, "theirs", 16), (tokens, "r", 16), (cached, "again", 0)):
                await _check(d, text, request, begin=begin)

    run(test)


def test_a_forged_address_does_not_join_an_honest_send() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(14)
            spot = await _reserve(d, tokens)
            honest = sending(tokens, spot, 0, 13)
            assert await p.engine.remote_send(honest) == await p.engine.remote_send(honest)
            blocks = KVAddress.compress(spot.address.block_map[::-1].copy())
            forged = structs.replace(honest, address=structs.replace(spot.address, blocks=blocks))
            with pytest.raises(BadRequest, match=FORGED):
                await p.engine.remote_send(forged)
            await _check(d, tokens, "r", begin=13)

    run(test)


def test_another_endpoint_of_the_same_unit_is_refused() -> None:
    """The digest that prep_recv keeps is of its own endpoint, that of remote_send of the one it was given."""

    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(14)
            spot = await _reserve(d, tokens)
            before = d.executor.arena.copy()
            d.transport.plane.members[b"elsewhere"] = d.transport
            peer = structs.replace(spot.peer, where=b"elsewhere")
            with pytest.raises(BadRequest, match=FORGED):
                await p.engine.remote_send(sending(tokens, structs.replace(spot, peer=peer), 0, 13))
            np.testing.assert_array_equal(d.executor.arena, before)
            await p.engine.remote_send(sending(tokens, spot, 0, 13))
            await _check(d, tokens, "r", begin=13)

    run(test)

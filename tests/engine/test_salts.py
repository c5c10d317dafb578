"""Salts at an engine's verbs: nobody learns from the cache what others have asked."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvloom.types.errors import BadRequest
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import Pin, Prefix, PrepRecv
from tests.modelled import ask, expected
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units

SECRET = [71, 5, 833, 402, 18, 655, 290]
KNOWN = prompt(17)
ALPHABET = [*SECRET, 1, 2, 3]


def salted(tokens: list[int], salt: str, request: str = "r") -> StartGenerate:
    return structs.replace(generate(tokens, request=request, max_tokens=1), salt=salt)


async def cost(unit: Unit, body: StartGenerate) -> tuple[int, int, int]:
    """What a client can see of the cache: the tokens that it is told, and what its answer takes, in tokens
    computed and in jobs."""
    computed, jobs = unit.computed, len(unit.executor.jobs)
    answer = await ask(unit.engine, body)
    assert answer.tokens == expected(unit.executor, body)
    return answer.ends[0].cached_tokens, unit.computed - computed, len(unit.executor.jobs) - jobs


async def guess(unit: Unit, salt: str) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Guesses what follows KNOWN, token by token, each time going on with the guess that was cached furthest.
    Guesses are repeated, and end in a token of their own. Returns the guess and all that was seen."""
    found: list[int] = []
    seen: list[tuple[int, int, int]] = []
    for _ in SECRET:
        costs = {}
        for token in ALPHABET:
            tried = salted([*KNOWN, *found, token, 999], salt, f"guess-{len(seen)}")
            costs[token] = await cost(unit, tried)
            seen.append(costs[token])
            await unit.engine.evict(Prefix(model=MODEL, prompt=tried.prompt, salt=salt))
        best = max(costs, key=lambda token: costs[token][0])
        found.append(best)
    return found, seen


@pytest.mark.parametrize(("victim", "guesser"), [("alice", "bob"), ("alice", ""), ("", "bob")])
def test_guessing_across_salts_shows_nothing(victim: str, guesser: str) -> None:
    """All that a guesser sees is the same whether the victim's request was ever there or not."""

    async def test() -> None:
        async with units(2) as (asked, empty):
            await ask(asked.engine, salted([*KNOWN, *SECRET], victim))
            assert await guess(asked, guesser) == await guess(empty, guesser)

    run(test)


def test_guessing_with_the_same_salt_would_show_all() -> None:
    """The oracle is one: where prefixes are shared, it gives the suffix away."""

    async def test() -> None:
        async with units(1) as (unit,):
            await ask(unit.engine, salted([*KNOWN, *SECRET], "alice"))
            assert (await guess(unit, "alice"))[0] == SECRET

    run(test)


def test_a_room_is_for_its_own_salt() -> None:
    """Neither a sender nor a request of another salt may use it."""

    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(21)
            spot = await d.engine.prep_recv(
                PrepRecv(model=MODEL, request="r", prompt=tokens, end=-1, salt="alice")
            )
            order = sending(tokens, spot, 0, 20)
            with pytest.raises(BadRequest, match="the reservation at unit-1 is for other"):
                await p.engine.remote_send(order)
            sent = await p.engine.remote_send(structs.replace(order, salt="alice"))
            assert sent.computed == 20
            with pytest.raises(BadRequest, match="another prompt"):
                await ask(d.engine, structs.replace(generate(tokens, begin=-1), salt="bob"))
            body = structs.replace(generate(tokens, begin=-1), salt="alice")
            before = d.computed
            assert (await ask(d.engine, body)).tokens == expected(d.executor, body)
            assert d.computed - before == 6
            at_source = [
                p.engine.pool.caches[MODEL].prefixes.match(tokens, 20, salt)[1] for salt in ("alice", "")
            ]
            assert at_source == [20, 0]

    run(test)


def test_pins_and_evictions_name_a_salt() -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            tokens = prompt(20)
            for salt in ("", "alice"):
                await ask(unit.engine, salted(tokens, salt, f"warm-{salt}"))
            pin = Pin(model=MODEL, request="p", prompt=tokens, salt="alice")
            assert (await unit.engine.pin(pin)).tokens == 20
            assert (await unit.engine.pin(structs.replace(pin, salt="bob"))).tokens == 0
            assert (await unit.engine.evict(Prefix(model=MODEL, prompt=tokens))).tokens == 20
            assert (await unit.engine.evict(Prefix(model=MODEL, prompt=[], salt="bob"))).tokens == 0
            await ask(unit.engine, salted(tokens, "", "again"))
            assert (await unit.engine.evict(Prefix(model=MODEL, prompt=[]))).tokens == 40

    run(test)

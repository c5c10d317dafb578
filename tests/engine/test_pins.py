"""Pins: whose they are, how long they last, and what they leave to others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvloom.engine import leases
from kvloom.types.errors import BadRequest, OutOfBlocks, PromptTooLong, QueueFull, Unavailable, UnknownModel
from kvloom.types.verbs import Pin, Prefix, PrepRecv
from tests.modelled import ask, expected
from tests.modelled_units import MODEL, Unit, generate, prompt, run, units

LEASE = 30.0  # an engine's own


def pin(tokens: list[int], request: str = "owner", lease: int | None = None) -> Pin:
    return Pin(model=MODEL, request=request, prompt=tokens, lease=lease)


async def cached(unit: Unit, *prompts: list[int]) -> None:
    for tokens in prompts:
        await ask(unit.engine, generate(tokens, request="warm", max_tokens=1))


async def spared(unit: Unit, tokens: list[int]) -> int:
    """How many tokens a request with this prompt need not compute."""
    answer = await ask(unit.engine, generate(tokens, request="probe", max_tokens=1))
    return answer.ends[0].cached_tokens


async def crowd(unit: Unit) -> None:
    """Others fill the pool."""
    for first in range(20, 26):
        await ask(unit.engine, generate(prompt(40, first=first), request="crowd"))


def pinned(unit: Unit) -> int:
    return unit.engine.pool.caches[MODEL].prefixes.pinned_blocks


def test_what_is_pinned_stays_until_it_is_undone() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(17)
            await cached(d, tokens)
            assert (await d.engine.pin(pin(tokens))).tokens == 17
            assert (await d.engine.load()).models[MODEL].pinned_blocks == 5 * 4
            await crowd(d)
            assert await spared(d, tokens) == 16
            assert (await d.engine.unpin("owner")).tokens == 17
            assert (await d.engine.unpin("owner")).tokens == 0
            assert (await d.engine.load()).models[MODEL].pinned_blocks == 0
            assert (await d.engine.evict(Prefix(model=MODEL, prompt=tokens))).tokens >= 17
            assert await spared(d, tokens) == 0

    run(test)


def test_asked_again_it_answers_the_same_and_begins_its_lease_anew() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(20)
            await cached(d, tokens[:9])
            first = await d.engine.pin(pin(tokens))
            assert (first.tokens, first.lease) == (9, LEASE)
            await cached(d, tokens)
            await d.pass_time(LEASE - 1)
            assert await d.engine.pin(pin(tokens)) == first
            assert pinned(d) == 3 * 4
            await d.pass_time(LEASE - 1)
            assert pinned(d) == 3 * 4
            longer = await d.engine.pin(pin(tokens, lease=100))
            assert (longer.tokens, longer.lease) == (9, 100.0)
            await d.pass_time(99)
            assert (await d.engine.renew("owner")).lease == 100.0
            await d.pass_time(99)
            assert pinned(d) == 3 * 4
            await d.pass_time(2)
            assert d.engine.pool.available == d.engine.pool.total
            with pytest.raises(BadRequest, match="nothing is reserved or pinned for request owner"):
                await d.engine.renew("owner")

    run(test)


def test_another_prompt_takes_the_first_ones_place() -> None:
    """Unless it is refused: then the first one stays."""

    async def test() -> None:
        async with units(1) as (d,):
            short, other, long = prompt(12), prompt(20, first=3), prompt(61, first=7)
            await cached(d, short, other, long)
            await d.engine.pin(pin(short))
            assert (await d.engine.pin(pin(other))).tokens == 20
            assert pinned(d) == 5 * 4
            with pytest.raises(OutOfBlocks, match=r"64 of 160 blocks would be promised .* needs 100"):
                await d.engine.pin(pin(long))
            assert pinned(d) == 5 * 4
            assert (await d.engine.pin(pin(prompt(9, first=9)))).tokens == 0  # nothing cached, nothing kept
            assert pinned(d) == 0
            with pytest.raises(BadRequest, match="nothing is reserved or pinned"):
                await d.engine.renew("owner")

    run(test)


def test_a_prompt_that_takes_anothers_place_needs_no_room_beside_it() -> None:
    """Each fits the budget, both do not; one that is refused leaves what the first keeps as it was."""

    async def test() -> None:
        async with units(1) as (d,):
            first, second, long = prompt(40), prompt(44, first=3), prompt(61, first=7)
            await cached(d, first, second)
            await d.engine.pin(pin(first))
            assert (await d.engine.pin(pin(second))).tokens == 44
            assert pinned(d) == d.engine.pool.caches[MODEL].pages.promised_blocks == 11 * 4
            await cached(d, long)
            with pytest.raises(OutOfBlocks):
                await d.engine.pin(pin(long))
            assert pinned(d) == d.engine.pool.caches[MODEL].pages.promised_blocks == 11 * 4
            await crowd(d)
            assert await spared(d, second) == 43
            assert (await d.engine.unpin("owner")).tokens == 44
            assert d.engine.pool.available == d.engine.pool.total

    run(test)


def test_two_owners_of_one_prefix() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(16)
            await cached(d, tokens)
            await d.engine.pin(pin(tokens, "a"))
            await d.engine.pin(pin(tokens, "b", lease=60))
            assert pinned(d) == 4 * 4  # counted once
            await d.engine.abort("nobody")
            await d.engine.abort("b", choice=0)  # a choice has no pin
            await d.engine.abort("a")
            assert pinned(d) == 4 * 4
            await d.pass_time(61)
            assert d.engine.pool.available == d.engine.pool.total

    run(test)


def test_a_renewal_is_for_all_that_a_request_has() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(16)
            await cached(d, tokens[:8])
            await d.engine.pin(pin(tokens, lease=10))
            await d.engine.prep_recv(PrepRecv(model=MODEL, request="owner", prompt=tokens))
            for _ in range(5):
                await d.pass_time(9)
                assert (await d.engine.renew("owner")).lease == 10.0
            assert d.engine.pool.caches[MODEL].pages.promised_blocks == 4 * 4  # two pages are of both
            await d.pass_time(20)
            assert (await d.engine.renew("owner")).lease == LEASE  # the reservation's
            await d.engine.pin(pin(tokens))
            await d.engine.abort("owner")
            assert d.engine.pool.available == d.engine.pool.total

    run(test)


def test_the_longest_request_finds_its_room_beside_pins() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            contexts = [prompt(30, first=i) for i in range(3)]
            await cached(d, *contexts)
            await d.engine.pin(pin(contexts[0], "a"))
            for owner in "bc":
                with pytest.raises(OutOfBlocks, match="pin: 64 of 160"):
                    await d.engine.pin(pin(contexts["abc".index(owner)], owner))
            assert pinned(d) == 8 * 4
            bodies = [generate(prompt(90, first=i), request=f"r{i}", max_tokens=6) for i in range(3)]
            answers = await asyncio.gather(*(ask(d.engine, body) for body in bodies))
            for body, answer in zip(bodies, answers, strict=True):
                assert answer.tokens == expected(d.executor, body)
            assert await spared(d, contexts[0]) == 29

    run(test)


def test_wrong_pins_are_refused() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            with pytest.raises(UnknownModel):
                await d.engine.pin(Pin(model="none", request="r", prompt=[1]))
            with pytest.raises(PromptTooLong):
                await d.engine.pin(pin(prompt(97)))
            d.engine.stop()
            with pytest.raises(Unavailable):
                await d.engine.pin(pin(prompt(9)))

    run(test)
    body = {"model": MODEL, "request": "r", "prompt": [1], "lease": 3600}
    assert msgspec.convert(body, Pin).lease == 3600
    for wrong in ({"lease": 0}, {"lease": 3601}, {"lease": float("nan")}, {"request": ""}, {"prompt": [-1]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(body | wrong), type=Pin)


def test_pins_that_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_PINS", 2)

    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(16)
            await cached(d, tokens)
            for owner in "abab":
                await d.engine.pin(pin(tokens, owner))
            with pytest.raises(QueueFull, match="2 prefixes are pinned"):
                await d.engine.pin(pin(tokens, "c"))
            assert (await d.engine.pin(pin(tokens[:5], "a"))).tokens == 5

    run(test)


def test_an_eviction_tells_what_pins_keep_and_drops_partial_tails() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(19)
            await cached(d, tokens)
            everything = Prefix(model=MODEL, prompt=tokens)
            await d.engine.pin(pin(tokens[:9]))
            answer = await d.engine.evict(everything)
            assert (answer.tokens, answer.pinned) == (19 - 12, 9 + 3)  # the pin keeps whole pages
            await d.engine.unpin("owner")
            answer = await d.engine.evict(everything)
            assert (answer.tokens, answer.pinned) == (12, 0)
            assert d.engine.pool.free == d.engine.pool.total

    run(test)


@pytest.mark.parametrize("length", [77, 78, 79, 80, 81, 82])
def test_nothing_of_an_evicted_prompt_stays(length: int) -> None:
    """However much of its last page was cached."""

    async def test() -> None:
        async with units(1) as (d,):
            tokens = prompt(82)
            await cached(d, tokens[:length])
            before = d.engine.pool.cached
            assert before
            assert (await d.engine.evict(Prefix(model=MODEL, prompt=tokens[:80]))).tokens >= length
            assert (d.engine.pool.cached, d.engine.pool.free) == (0, d.engine.pool.total)

    run(test)


def test_the_pins_of_one_tenant_keep_half_of_what_may_be_promised() -> None:
    async def test() -> None:
        async with units(1) as (d,):
            total = d.engine.pool.total
            longest = d.engine.pool.caches[MODEL].geometry.blocks((await d.engine.models())[0].context_length)
            most = (total - longest) // 2
            page = d.engine.pool.caches[MODEL].geometry.blocks_per_page
            bodies = [
                msgspec.structs.replace(
                    pin(prompt(12, first=100 + number), f"lasting {number}", 3600), tenant="alice"
                )
                for number in range(most // (3 * page) + 1)
            ]
            await cached(d, *(body.prompt for body in bodies))
            *taken, last = bodies
            for body in taken:
                assert (await d.engine.pin(body)).tokens == 12
            with pytest.raises(OutOfBlocks, match="alice"):
                await d.engine.pin(last)
            kept = len(taken) * 3 * page
            assert pinned(d) == kept
            other = msgspec.structs.replace(last, tenant="bob")
            assert (await d.engine.pin(other)).tokens == 12
            assert pinned(d) == kept + 3 * page
            await d.pass_time(3600)
            assert pinned(d) == 0

    run(test)

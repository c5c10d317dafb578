"""What counts as a hit of a unit's cache: what it need not compute, but for what a peer has just sent it."""

from __future__ import annotations

import pytest

from kvloom.types.load import ModelLoad
from kvloom.types.verbs import PrepRecv
from tests.modelled import ask
from tests.modelled_units import MODEL, Unit, generate, move, prompt, run, sending, units

LENGTH = 40
WIDTH = 4  # tokens a page


async def counts(unit: Unit) -> tuple[int, int, int]:
    """Prompt tokens computed, found in the cache, and received."""
    load: ModelLoad = (await unit.engine.load()).models[MODEL]
    return load.prompt_tokens_total, load.cached_tokens_total, load.received_tokens_total


@pytest.mark.parametrize("receiver", [0, 8, 22, LENGTH])
@pytest.mark.parametrize("sender", [0, 8, 22, LENGTH])
def test_every_prompt_token_is_computed_or_found_once(sender: int, receiver: int) -> None:
    """By the two units together, where the sender need not compute what the receiver has. The last token is
    always computed."""

    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(LENGTH)
            for unit, length in ((p, sender), (d, receiver)):
                if length:
                    await ask(unit.engine, generate(tokens[:length], request="warm", max_tokens=1))
            before = [await counts(unit) for unit in (p, d)]
            spot, sent = await move(p, d, tokens, -1)
            await ask(d.engine, generate(tokens, begin=-1))
            after = [await counts(unit) for unit in (p, d)]
            (p_computed, p_found, p_received), (d_computed, d_found, d_received) = (
                tuple(x - y for x, y in zip(late, early, strict=True))
                for late, early in zip(after, before, strict=True)
            )
            whole = sender - sender % WIDTH  # a send takes no part of a page
            again = max(0, spot.matched - whole) if sent else 0  # the sender lacks what the receiver has
            assert p_received == 0
            assert d_received == spot.end - spot.matched
            assert d_computed == 1
            assert d_found >= spot.matched
            assert p_computed + p_found + d_computed + d_found == LENGTH + again
            if sent:
                assert (p_found, p_computed - again) == (sent.cached, sent.computed)

    run(test)


def test_what_was_received_is_a_hit_for_those_who_come_later() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(LENGTH)
            await move(p, d, tokens, None)
            await d.pass_time(31)  # nobody came for it
            assert await counts(d) == (0, 0, LENGTH)
            await ask(d.engine, generate([*tokens, 1, 2], request="later"))
            assert await counts(d) == (2, LENGTH, LENGTH)

    run(test)


def test_what_did_not_arrive_is_not_received() -> None:
    async def test() -> None:
        async with units(2) as (p, d):
            tokens = prompt(LENGTH)
            spot = await d.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens))
            await p.engine.remote_send(sending(tokens, spot, 0, 16))
            await d.engine.abort("r")
            assert await counts(d) == (0, 0, 16)

    run(test)

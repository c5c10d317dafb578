"""Requests of unlike salts share no prefix, whichever program routes them and wherever they move."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvloom.router.programs import PROGRAMS
from kvloom.types.request import StartGenerate
from tests.modelled_units import generate, prompt
from tests.router.worlds import World, world

LENGTH = 64  # tokens: four chunks of the router's index
OUTPUT = 6


def salted(salt: str, request: str) -> StartGenerate:
    return replace(generate(prompt(LENGTH), request=request, max_tokens=OUTPUT), salt=salt)


async def computed(w: World, body: StartGenerate) -> int:
    """The tokens that all units together compute for a request, whose answer is right."""
    before = w.computed
    await w.ask(body)
    w.check(body)
    return w.computed - before


@pytest.mark.parametrize("program", sorted(PROGRAMS))
async def test_no_program_finds_what_another_salt_left(program: str) -> None:
    """What a request costs is what it costs in a fleet that has never seen the prompt."""
    async with world(2, program=program) as w:
        cold = await computed(w, salted("alice", "r1"))
        assert cold >= LENGTH + OUTPUT - 1
        for _ in range(2):  # so that both units have it
            warm = await computed(w, salted("alice", "r2"))
        assert warm < LENGTH
        assert await computed(w, salted("bob", "r3")) == cold
        assert await computed(w, salted("", "r4")) == cold


async def test_a_context_draws_requests_of_its_own_salt_only() -> None:
    async with world(2, program="cache_aware") as w:
        for i in range(3):
            await w.ask(salted("alice", f"a{i}"))
        first, second = (unit.computed for unit in w.units)
        assert second == 0
        await w.ask(salted("bob", "b"))
        assert (w.units[0].computed, w.units[1].computed) == (first, LENGTH + OUTPUT - 1)


async def test_a_request_that_moves_keeps_its_salt() -> None:
    """The target computes nothing of it again, and what is cached there is for its own salt."""
    async with world(2) as w:
        body = replace(generate(prompt(37), temperature=1.0, max_tokens=55), salt="alice")
        task = w.ask(body)
        await w.until("r", 1)
        await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert w.computed == 37 + 54
        tree = w.units[1].engine.pool.caches[body.model].prefixes
        assert tree.match(body.prompt, 37, "alice")[1] == 37
        assert tree.match(body.prompt, 37)[1] == tree.match(body.prompt, 37, "bob")[1] == 0

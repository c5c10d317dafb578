"""What each shipped program asks of which engine, in which order and with which positions."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from kvloom.router.programs import PROGRAMS
from kvloom.types.client import Frames
from kvloom.types.request import StartGenerate
from tests.router.fleets import Fleets, ask_well, body, routed
from tests.router.ledger import Called

SPLIT = ("disaggregate", "cache_aware_disaggregate", "balanced")


def prep(unit: str, end: int) -> Called:
    return Called(unit, "prep_recv", None, end)


def send(unit: str, begin: int, end: int) -> Called:
    return Called(unit, "remote_send", begin, end)


def generate(unit: str, begin: int = 0) -> Called:
    return Called(unit, "start_generate", begin)


async def asked(fleets: Fleets, request: StartGenerate) -> list[Called]:
    """What the request made of the engines, after it was answered well."""
    fleets.journal.clear()
    await ask_well(fleets.router, request)
    return list(fleets.journal)


async def begun(fleets: Fleets, request: StartGenerate) -> Frames:
    """The request's stream, from its first token on."""
    stream = fleets.router.start_generate(request)
    async for frame in stream:
        if frame:
            return stream
    raise AssertionError("no token came")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("units", [1, 2, 3])
async def test_every_program_answers_like_a_lone_engine(program: str, units: int) -> None:
    async with routed(units, program) as fleets:
        for length in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 33, 50):
            await ask_well(fleets.router, body(length, n=2))
        async with asyncio.TaskGroup() as group:
            for length in range(1, 40):
                group.create_task(ask_well(fleets.router, body(length)))
        assert not [abort for engine in fleets.engines for abort in engine.aborts]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_one_replica_is_asked_for_nothing_else(program: str, caplog: pytest.LogCaptureFixture) -> None:
    async with routed(1, program) as fleets:
        for length in (1, 2, 40, 40):
            assert await asked(fleets, body(length)) == [generate("a")]
        assert not caplog.messages  # no error led there


async def test_data_parallel_takes_turns() -> None:
    async with routed(3) as fleets:
        seen = [(await asked(fleets, body(5)))[0].unit for _ in range(6)]
        assert seen == ["a", "b", "c", "a", "b", "c"]


async def test_least_loaded_avoids_who_has_much_to_do() -> None:
    async with routed(2, "least_loaded") as fleets:
        fleets.engines[0].gate.clear()
        stream = await begun(fleets, body(5))
        async with aclosing(stream):
            assert [await asked(fleets, body(5)) for _ in range(3)] == [[generate("b")]] * 3
        fleets.engines[0].gate.set()
        assert {(await asked(fleets, body(5)))[0].unit for _ in range(2)} == {"a", "b"}


@pytest.mark.parametrize("program", SPLIT[:2])
async def test_disaggregate_is_the_papers(program: str) -> None:
    async with routed(2, program) as fleets:
        assert await asked(fleets, body(10)) == [prep("b", -1), send("a", 0, 9), generate("b", -1)]
        assert [engine.computed for engine in fleets.engines] == [9, 1]


@pytest.mark.parametrize("program", SPLIT[:2])
@pytest.mark.parametrize(
    ("before", "length", "sent"),
    [
        (0, 1, None),
        (0, 2, (0, 1)),
        (3, 9, (0, 8)),  # less than a page is no match
        (4, 9, (4, 8)),
        (5, 9, (4, 8)),
        (8, 9, None),  # all there
        (9, 9, None),
        (20, 9, None),
        (8, 10, (8, 9)),
    ],
)
async def test_what_the_decoder_has_is_not_sent(
    program: str, before: int, length: int, sent: tuple[int, int] | None
) -> None:
    async with routed(2, program) as fleets:
        fleets.engines[1].cached = [body(before).prompt]
        middle = [send("a", *sent)] if sent else []
        assert await asked(fleets, body(length)) == [prep("b", -1), *middle, generate("b", -1)]


@pytest.mark.parametrize(
    ("prefill", "pairs"),
    [
        (1, [("a", "b"), ("a", "c"), ("a", "b"), ("a", "c")]),
        (2, [("a", "c"), ("b", "c"), ("a", "c"), ("b", "c")]),
        (3, []),
        (9, []),
    ],
)
async def test_disaggregate_has_any_shape(prefill: int, pairs: list[tuple[str, str]]) -> None:
    async with routed(3, "disaggregate", prefill=prefill) as fleets:
        for first in range(4):
            seen = await asked(fleets, body([first, *range(2, 12)]))
            if pairs:
                source, target = pairs[first]
                assert [call.unit for call in seen] == [target, source, target]
            else:
                assert seen == [generate("abca"[first])]


async def test_cache_aware_disaggregate_takes_who_has_most_of_the_prompt() -> None:
    async with routed(4, "cache_aware_disaggregate", prefill=2) as fleets:
        context, other = body(64).prompt, [7, *range(2, 65)]
        first = await asked(fleets, body([*context, 1]))
        second = await asked(fleets, body([*other, 1]))
        assert {call.unit for call in (*first, *second)} == {"a", "b", "c", "d"}
        one, two = (context, first), (other, second)
        for suffix, (known, seen) in enumerate((one, one, two, two, one, one), start=100):
            target, source, _ = (call.unit for call in seen)
            matched = len(known)
            assert await asked(fleets, body([*known, *[suffix] * 7])) == [
                prep(target, -1),
                send(source, matched, matched + 6),
                generate(target, -1),
            ]


@pytest.mark.parametrize(
    ("ratio", "length", "begin"),
    [(0.2, 100, 80), (0.0, 100, 99), (1.0, 100, 0), (0.5, 1, 0), (0.5, 2, 1), (0.9, 2, 0), (0.1, 10, 9)],
)
async def test_balanced_leaves_the_decoder_its_ratio(ratio: float, length: int, begin: int) -> None:
    async with routed(2, "balanced", ratio=ratio) as fleets:
        sent = [prep("b", begin), send("a", 0, begin)] if begin else []
        assert await asked(fleets, body(length)) == [*sent, generate("b", begin)]


async def test_balanced_adapts_to_the_queues() -> None:
    async with routed(2, "balanced", most=0.4) as fleets:
        for waiting, begin in ((0, 99), (20, 90), (60, 70), (80, 60), (1000, 60)):
            fleets.world.engines["b"].cached.clear()
            with fleets.waiting("a", waiting):
                assert await asked(fleets, body(100)) == [
                    prep("b", begin),
                    send("a", 0, begin),
                    generate("b", begin),
                ]
        fleets.world.engines["b"].cached.clear()
        with fleets.waiting("a", 60), fleets.waiting("b", 40):
            assert (await asked(fleets, body(100)))[0] == prep("b", 90)


async def test_cache_aware_follows_the_prefix() -> None:
    async with routed(3, "cache_aware") as fleets:
        homes = {}
        for context in (10, 11, 12):
            homes[context] = (await asked(fleets, body([context] * 40)))[0].unit
        assert sorted(homes.values()) == ["a", "b", "c"]
        for context in (12, 10, 11, 11, 10, 12):
            seen = await asked(fleets, body([*[context] * 40, *range(20)]))
            assert seen == [generate(homes[context])]


async def test_cache_aware_leaves_who_has_too_much_to_do() -> None:
    async with routed(2, "cache_aware", slack=300) as fleets:
        [(home,)] = [{call.unit for call in await asked(fleets, body(40))}]
        with fleets.waiting(home, 300):
            assert await asked(fleets, body(40)) == [generate(home)]
        with fleets.waiting(home, 301):
            [elsewhere] = await asked(fleets, body(40))
            assert elsewhere.unit != home


async def test_a_shared_prefix_is_computed_once_and_not_everywhere() -> None:
    computed = {}
    for program in ("data_parallel", "cache_aware"):
        async with routed(2, program) as fleets:
            for question in range(12):
                for context in (10, 11, 12):
                    await ask_well(fleets.router, body([*[context] * 200, *[question] * 8]))
            computed[program] = sum(engine.computed for engine in fleets.engines)
    assert computed["cache_aware"] == 3 * 200 + 36 * 8
    assert computed["data_parallel"] > computed["cache_aware"] + 500


async def test_migrate_context_moves_it_to_who_has_room() -> None:
    async with routed(2, "migrate_context", slack=100) as fleets:
        assert await asked(fleets, body(40)) == [generate("a")]
        assert await asked(fleets, body(44)) == [generate("a")]  # no need to move
        with fleets.waiting("a", 101):
            moved = [prep("b", 43), send("a", 0, 43), generate("b", 43)]
            assert await asked(fleets, body(44)) == moved
            assert await asked(fleets, body(44)) == [generate("b")]  # there already
        assert fleets.engines[1].computed == 1 + 4


async def test_migrate_context_leaves_a_token_to_compute() -> None:
    async with routed(2, "migrate_context", slack=0) as fleets:
        await ask_well(fleets.router, body(48))
        with fleets.waiting("a", 1):
            moved = [prep("b", 47), send("a", 0, 47), generate("b", 47)]
            assert await asked(fleets, body(48)) == moved


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_prompts_logprobs_are_computed_in_one_place(program: str) -> None:
    async with routed(2, program) as fleets:
        for length in (1, 2, 20, 20, 20):
            request = body(length, prompt_logprobs=0)
            [seen] = await asked(fleets, request)
            assert seen in (generate("a"), generate("b"))


async def test_a_send_has_its_requests_priority() -> None:
    async with routed(2, "disaggregate") as fleets:
        await ask_well(fleets.router, replace(body(20), priority=-3))
        assert fleets.engines[0].priorities == [-3]


def test_the_programs_are_short() -> None:
    for name, program in PROGRAMS.items():
        assert program.__name__ == name
        assert len(inspect.getsource(program).splitlines()) <= (5 if name == "data_parallel" else 20)
        assert inspect.getdoc(program)

"""Grammars of all kinds, small and hostile, through the sandbox into an engine's own process: each one works,
or is a bad request, and what all of them take together is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom.engine.guide import MOST_BYTES, Guides, GuideState
from kvloom.serve.processes.sandbox import Limits, Sandbox, grammar_trial
from kvloom.types.errors import BadRequest
from kvloom.types.request import Guide, ModelCard, SamplingParams, StartGenerate
from tests.api.scripted import card as small

LIMITS = Limits(seconds=0.5, memory=64 << 20)
EXAMPLES = 25  # of each kind
STEPS = 24  # tokens that are drawn from a grammar that works
MEMORY = 400 << 20  # bytes by which this process may grow meanwhile
CPU_SECONDS = 90.0  # of this process

Tried = Callable[[Guide], GuideState | None]


@pytest.fixture(scope="module")
def tried() -> Iterator[Tried]:
    """Returns the state at a grammar's beginning, or None if it is a bad request."""
    with asyncio.Runner() as runner:
        sandbox = runner.run(opened())
        guides = Guides({"tiny": small()}, grammar_trial(sandbox))

        def tried(guide: Guide) -> GuideState | None:
            body = StartGenerate(
                model="tiny",
                request="r",
                prompt=[1],
                sampling=SamplingParams(max_tokens=9, seed=1, guide=guide),
            )
            try:
                [state] = runner.run(guides.compiled(body, wanted=lambda: True))
            except BadRequest:
                return None
            assert state is not None
            return state

        before, cpu = resident(), time.process_time()
        yield tried
        assert resident() - before < MEMORY
        assert time.process_time() - cpu < CPU_SECONDS
        runner.run(closed(sandbox))


async def opened() -> Sandbox:
    return await Sandbox("grammars", 1, LIMITS).__aenter__()


async def closed(sandbox: Sandbox) -> None:
    await sandbox.__aexit__(None, None, None)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def walk(state: GuideState, seed: int) -> None:
    """Draws tokens until the grammar ends or gives up; it never does anything else."""
    draw = random.Random(seed)
    for _ in range(STEPS):
        if state.done:
            return
        bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        allowed = [int(one) for one in np.flatnonzero(bits)]
        if not allowed:
            assert state.problem
            return
        if not state.accepts(draw.choice(allowed)):
            assert state.problem
            return


def check(tried: Tried, guide: Guide, seed: int) -> None:
    state = tried(guide)
    if state is not None:
        walk(state, seed)


# -- what is tried ------------------------------------------------------------------------------------------

counts = st.sampled_from([0, 1, 2, 7, 99, 1000, 5000, 10_000, 10_001, 2**40])
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def _larger_regex(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({}){{{}}}".format, parts, counts),
        st.builds("({}){{{},{}}}".format, parts, counts, counts),
        st.builds("({}){}".format, parts, st.sampled_from(["?", "*", "+"])),
        st.builds("({}|{})".format, parts, parts),
        st.builds("{}{}".format, parts, parts),
        st.builds(lambda part, times: part * min(times, 300), parts, counts),
        st.builds(lambda part, times: "(" * min(times, 300) + part + ")" * min(times, 300), parts, counts),
    )


REGEXES = st.recursive(
    st.sampled_from(["a", "b?", ".", "[^a]", r"\d", r"\p{L}", "", "(", "[", "\\", "é", "(?=a)"]),
    _larger_regex,
    max_leaves=6,
)


def _larger_schema(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c"])
    return st.one_of(
        st.builds(lambda part, n: {"type": "array", "items": part, "minItems": n}, parts, counts),
        st.builds(
            lambda properties, needed: {"type": "object", "properties": properties, "required": needed},
            st.dictionaries(names, parts, max_size=3),
            st.lists(names, max_size=3),
        ),
        st.builds(
            lambda kind, some: {kind: some}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(parts)
        ),
        st.builds(
            lambda part: {"$defs": {"a": part, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"}, parts
        ),
        st.builds(_nested, parts, counts),
        st.builds(_chained, parts, counts),
    )


def _nested(part: Any, times: int) -> Any:
    for _ in range(min(times, 150)):
        part = {"type": "array", "items": part}
    return part


def _chained(part: Any, times: int) -> Any:
    length = min(times, 5000)
    chain: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{length}": part}}


SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from(
            [
                True,
                False,
                {},
                {"$ref": "#"},
                {"$ref": "#/nowhere"},
                {"type": "objec"},
                {"const": "é"},
                7,
                None,
            ]
        ),
        st.builds(lambda n, m: {"type": "string", "minLength": n, "maxLength": m}, counts, counts),
        st.builds(lambda n, m: {"type": "integer", "minimum": n, "maximum": m}, counts, counts),
        st.builds(
            lambda n: {"properties": {f"p{at}": {"type": "string"} for at in range(min(n, 6000))}}, counts
        ),
        st.builds(lambda n: {"enum": [f"{at}" for at in range(min(n, 6000))]}, counts),
        st.builds(lambda text: {"type": "string", "pattern": text}, REGEXES),
    ),
    _larger_schema,
    max_leaves=5,
)


@st.composite
def larks(draw: st.DrawFn) -> str:
    """Draws rules that name each other: in chains, in circles, of many alternatives, deep and repeated."""
    count = min(draw(counts), 2500)
    ends = draw(st.sampled_from(['"a"', "/[a-z]+/", '""', "start", "nowhere", "%json {}", "<[0]>"]))
    shapes = ["NEXT", "NEXT NEXT", '"x" | NEXT', "NEXT? NEXT*", "(NEXT){3,900}", "NEXT | NEXT"]
    shape = draw(st.sampled_from(shapes))
    rules = [f"r{at}: {shape.replace('NEXT', f'r{at + 1}')}" for at in range(count)]
    start = "start: " + draw(st.sampled_from(["r0", "r0*", "(" * 120 + "r0" + ")" * 120, "r0 | start r0"]))
    return "\n".join([start, *rules, f"r{count}: {ends}"])


@fuzz
@given(text=REGEXES, seed=st.integers(0, 9))
def test_regexes(tried: Tried, text: str, seed: int) -> None:
    check(tried, Guide("regex", text, "guided_regex"), seed)


@fuzz
@given(schema=SCHEMAS, seed=st.integers(0, 9))
def test_schemas(tried: Tried, schema: Any, seed: int) -> None:
    check(tried, Guide("json_schema", json.dumps(schema), "response_format"), seed)


@fuzz
@given(text=larks(), seed=st.integers(0, 9))
def test_larks(tried: Tried, text: str, seed: int) -> None:
    check(tried, Guide("lark", text, "guided_grammar"), seed)


# -- what has ended engines before --------------------------------------------------------------------------

REFUSED = {
    "a chain of 5,000 references": Guide("json_schema", json.dumps(_chained({"type": "string"}, 5000))),
    "a chain of 5,000 rules": Guide(
        "lark", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(5000)) + '\nr5000: "a"'
    ),
    "a chain of 1,900 rules": Guide(
        "lark", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(1900)) + "\nr1900: start"
    ),
    "60,000 optional characters": Guide("regex", "a?" * 60_000),
    "as many optional characters as are read": Guide("regex", "a?" * (MOST_BYTES["regex"] // 2)),
    "a reference to itself": Guide("json_schema", '{"$ref": "#"}'),
    "10,000 optional properties": Guide(
        "json_schema", json.dumps({"properties": {f"p{at}": {"type": "string"} for at in range(10_000)}})
    ),
}


@pytest.mark.parametrize("guide", REFUSED.values(), ids=list(REFUSED))
def test_what_has_ended_engines_is_a_bad_request(tried: Tried, guide: Guide) -> None:
    assert tried(guide) is None
    state = tried(Guide("regex", "[ab]{2}"))
    assert state is not None
    walk(state, 0)


def test_a_large_part_that_is_repeated_works_or_gives_up(tried: Tried) -> None:
    check(tried, Guide("regex", "(x?){5000}x{5000}"), 0)


def test_bombs_of_one_model_hold_up_no_other() -> None:
    """Of many whose clients are gone, one is under way; and a grammar that is known waits for none."""
    begun: list[str] = []
    started, over = asyncio.Event(), asyncio.Event()

    async def slow(card: ModelCard, guide: Guide) -> None:
        begun.append(guide.text)
        if guide.text.startswith("bomb"):
            started.set()
            await over.wait()

    async def whole() -> None:
        guides = Guides({name: small(name) for name in ("tiny", "other")}, slow)

        def asks(model: str, text: str) -> Awaitable[list[GuideState | None]]:
            sampling = SamplingParams(max_tokens=9, seed=1, guide=Guide("regex", text))
            body = StartGenerate(model=model, request=text, prompt=[1], sampling=sampling)
            return asyncio.ensure_future(guides.compiled(body, wanted=lambda: text not in gone))

        gone: set[str] = set()
        await asks("tiny", "known")
        bombs = [asyncio.ensure_future(asks("tiny", f"bomb{at}")) for at in range(24)]
        await started.wait()
        assert (await asks("other", "innocent"))[0] is not None
        assert (await asks("tiny", "known"))[0] is not None
        for at, bomb in enumerate(bombs):
            gone.add(f"bomb{at}")
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)
        over.set()
        assert (await asks("tiny", "another"))[0] is not None
        assert [re.sub(r"\d+", "", text) for text in begun] == ["known", "bomb", "innocent", "another"]

    asyncio.run(whole())

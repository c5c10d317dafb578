"""A request that began elsewhere goes on here: law 2 from any token on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.types.errors import BadRequest
from kvloom.types.request import Guide, Made, StartGenerate
from tests.engine.plays import order, serve
from tests.engine.real_fleet import Fleet, spec
from tests.engines import Answer, body, running
from tests.modelled import ModelledExecutor, engine_over, expected

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


async def go_on(engine: Engine, request: StartGenerate, made: list[Made]) -> Answer:
    """The answer from where `made` ends, as one who has seen all of it holds it."""
    answer = Answer(tokens={one.choice: list(one.tokens) for one in made})
    async for frame in engine.start_generate(
        replace(request, request=f"{request.request}-goes-on", made=made)
    ):
        answer.take(frame)
    assert sorted(answer.ends) == sorted(one.choice for one in made)
    return answer


@settings(max_examples=60)
@given(data=st.data())
def test_from_wherever_each_choice_stands(data: st.DataObject) -> None:
    """Some have all their tokens but not the word that they have ended, some none; others are left out."""
    stops = data.draw(st.sampled_from([(), tuple(range(0, 1000, 20))]))
    executor = ModelledExecutor(data.draw(st.integers(60, 110)), compute=2, seed=3)
    request = order(
        "r", data.draw(st.sampled_from(["wide", "tall"])), data.draw(st.integers(1, 30)),
        n=data.draw(st.sampled_from([1, 2, 4])), max_tokens=12, temperature=1.0, stop_token_ids=stops,
    )  # fmt: skip
    whole = expected(executor, request)
    going = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    made = [Made(c, whole[c][: data.draw(st.integers(0, len(whole[c])))]) for c in sorted(going)]
    engine = engine_over(executor, chunk_tokens=8)

    async def play() -> None:
        answer = await go_on(engine, request, made)
        assert answer.tokens == {choice: whole[choice] for choice in going}
        for choice, end in answer.ends.items():
            assert end.reason == ("stop" if whole[choice][-1] in stops else "length")

    serve(play(), engine, executor)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 0.7, "guide": Guide("json_schema", SCHEMA), "max_tokens": 48},
        {"logprobs": 2, "min_tokens": 10, "stop_token_ids": tuple(range(0, 256, 9))},
    ],
    ids=["drawn", "penalised", "guided", "logprobs"],
)
def test_real_models_go_on_at_another_engine(fleet: Fleet, sampling: dict[str, Any]) -> None:
    asked = body("wide", [9, 8, 7, 6, 5, 4, 3, 2, 1] * 5, n=2, **sampling)

    async def play() -> None:
        async with running(spec(fleet)) as one, running(spec(fleet)) as other:
            whole = Answer()
            async for frame in one.start_generate(asked):
                whole.take(frame)
            lengths = {choice: len(tokens) for choice, tokens in whole.tokens.items()}
            for part in (0, 1, 3, 7, 15):
                made = [Made(c, whole.tokens[c][: min(part, length)]) for c, length in lengths.items()]
                told = {"made": made, "request": f"at-{part}"}
                answer = await go_on(other, replace(asked, **told), made)
                assert answer.tokens == whole.tokens
                assert {c: end.reason for c, end in answer.ends.items()} == {
                    c: end.reason for c, end in whole.ends.items()
                }
                for c, reports in answer.logprobs.items():
                    for new, old in zip(reports, whole.logprobs[c][min(part, lengths[c]) :], strict=True):
                        assert (new is None) == (old is None)
                        if new and old:
                            assert new.logprob == pytest.approx(old.logprob, abs=1e-4)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("made", "sampling", "said"),
    [
        ([Made(2, [1])], {}, "choices"),
        ([Made(0, [1]), Made(0, [1])], {}, "each once"),
        ([Made(0, [1] * 9)], {}, "max_tokens"),
        ([Made(0, [1] * 92)], {"max_tokens": 96}, "holds 96"),
        ([Made(0, [1000])], {}, "vocabulary"),
        ([Made(0, [1])], {"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_cannot_have_been_is_refused(made: list[Made], sampling: dict[str, Any], said: str) -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        with pytest.raises(BadRequest, match=said):
            await go_on(engine, order("r", "wide", 9, n=2, **sampling), made)

    serve(play(), engine, executor)


def test_tokens_that_break_the_guide_end_their_choice_alone(fleet: Fleet) -> None:
    guide = Guide("regex", "[0-9]+")
    asked = body("wide", [5, 6, 7], n=2, guide=guide, max_tokens=6)

    async def play() -> None:
        async with running(spec(fleet)) as engine:
            whole = Answer()
            async for frame in engine.start_generate(asked):
                whole.take(frame)
            wrong = next(token for token in range(60, 200) if token not in whole.tokens[0])
            made = [Made(0, [wrong]), Made(1, whole.tokens[1][:2])]
            answer = await go_on(engine, asked, made)
            assert answer.ends[0].reason == "error"
            assert "breaks the guide" in answer.ends[0].message
            assert answer.tokens[1] == whole.tokens[1]

    asyncio.run(play())

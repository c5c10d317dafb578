"""The official client against a real server on loopback: the main paths of both endpoints."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from kvloom.api.schemas.closing import closed
from kvloom.engine.guide import GuideCompiler
from kvloom.types.errors import PromptTooLong, QueueFull
from kvloom.types.request import EndEvent, Guide, SamplingDefaults
from tests.api.scripted import EOS, ScriptedEngine, card, says, token, tokens
from tests.processes import DEADLINE

TEXT = "hello world, naïve 🦊 fox"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(TEXT))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvloom"


def test_chat_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens(TEXT)) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    (body,) = engine.bodies
    assert body.prompt == tokens("<s><|user|>hi\n<|assistant|>")
    assert body.sampling.max_tokens == 512 - len(body.prompt)
    assert body.sampling.temperature == 1.0
    assert body.sampling.stop_token_ids == (token(EOS),)
    assert body.interval == 32


def test_chat_stream(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert all("\ufffd" not in (delta.content or "") for delta in deltas)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens(TEXT)) + 1
    assert engine.bodies[0].interval == 1


def completed(client: openai.OpenAI, *, stream: bool, **asked: Any) -> dict[int, tuple[str, str | None]]:
    """Returns each choice's text and why it ended, of a stream or of a whole answer."""
    answer: Any = client.completions.create(model="tiny", stream=stream, **asked)
    found: dict[int, tuple[str, str | None]] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text, _ = found.get(choice.index, ("", None))
            found[choice.index] = text + choice.text, choice.finish_reason
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_completion(client: openai.OpenAI, *, stream: bool) -> None:
    assert completed(client, stream=stream, prompt="hello", max_tokens=60) == {0: (TEXT, "stop")}


def test_completion_default_length(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="hello")
    assert answer.choices[0].finish_reason == "length"
    assert engine.bodies[0].sampling.max_tokens == 16
    assert engine.bodies[0].prompt[0] == token("<s>")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(client: openai.OpenAI, engine: ScriptedEngine, *, stream: bool) -> None:
    engine.script = lambda body, choice: tokens(f"{body.prompt[-1]} {choice}")
    found = completed(client, stream=stream, prompt=[[7, 8], [9], [10, 11]], n=2)
    assert [found[at][0] for at in range(6)] == ["8 0", "8 1", "9 0", "9 1", "11 0", "11 1"]
    assert len({body.request for body in engine.bodies}) == 3


def test_the_usage_of_several_prompts_is_their_sum(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="tiny", prompt=[[7, 8], [9], [10, 11]]).usage
    assert usage is not None
    assert usage.prompt_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: openai.OpenAI, engine: ScriptedEngine, *, stream: bool) -> None:
    for stop in ("ld, n", ["ld, n", "zz"]):
        found = completed(client, stream=stream, prompt="x", max_tokens=99, stop=stop)
        assert found == {0: ("hello wor", "stop")}
    assert engine.gone.wait(DEADLINE)


def test_stop_string_in_one_choice_of_two(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = says("hello world" * 9, "the quick brown fox" * 2)
    answer = client.completions.create(model="tiny", prompt="x", n=2, max_tokens=99, stop="llo")
    assert [choice.text for choice in answer.choices] == ["he", "the quick brown fox" * 2]
    assert engine.aborted == [(engine.bodies[0].request, 0)]  # the engine need not go on with it


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(one.bytes or []) for one in logprobs.content).decode() == TEXT
    assert [len(one.top_logprobs) for one in logprobs.content] == [2] * len(tokens(TEXT))


def test_completion_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "hello" + "hello world"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[:2] == [-0.5, -0.5]  # after the <s> that is not shown
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert len(choice.logprobs.tokens) == len(tokens("hello")) + 2
    assert_offsets_fit(choice)


def test_echo_of_tokens_shows_all_of_them(client: openai.OpenAI) -> None:
    prompt = [token("<s>"), *tokens("hello")]
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "<s>hello" + "hello world"
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs or [])[:2] == [None, -0.5]
    assert_offsets_fit(choice)


def assert_offsets_fit(choice: Any) -> None:
    known = choice.logprobs
    assert "".join(known.tokens) == choice.text
    for offset, one in zip(known.text_offset, known.tokens, strict=True):
        assert choice.text[offset:].startswith(one)


def test_scoring_makes_no_token(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert "".join(answer.choices[0].logprobs.tokens) == "hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert engine.bodies[0].sampling.max_tokens == 1


def test_json_modes_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            response_format=form,  # type: ignore[call-overload]
        )
    assert [body.sampling.guide for body in engine.bodies] == [
        Guide("json", param="response_format"),
        Guide("json_schema", json.dumps(closed(schema), separators=(",", ":")), "response_format"),
    ]


CHOICES = ["yes", 'no "never"', "naïve"]
GUIDES: list[tuple[str, Any, Guide]] = [
    ("regex", "a+b", Guide("regex", "a+b")),
    ("json", {"type": "integer", "minimum": 1}, Guide("json_schema", '{"type":"integer","minimum":1}')),
    ("json", '{"properties": {}}', Guide("json_schema", '{"properties":{},"additionalProperties":false}')),
    ("json", '{"type": ', Guide("json_schema", '{"type": ')),
    ("grammar", 'start: "x"', Guide("lark", 'start: "x"')),
    ("choice", CHOICES, Guide("lark", 'start: "yes" | "no \\"never\\"" | "naïve"')),
]


@pytest.mark.parametrize(("kind", "value", "guide"), GUIDES)
def test_guides_as_vllm_names_them(
    client: openai.OpenAI, engine: ScriptedEngine, kind: str, value: Any, guide: Guide
) -> None:
    for extra in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
        client.completions.create(model="tiny", prompt="x", extra_body=extra)
    names = f"guided_{kind}", f"structured_outputs.{kind}"
    assert [body.sampling.guide for body in engine.bodies] == [replace(guide, param=name) for name in names]


def test_a_choice_is_written_whole() -> None:
    for one in CHOICES:
        state = GuideCompiler(card()).start(GUIDES[-1][2])
        assert all(state.accepts(made) for made in tokens(one))
        assert state.done


def test_a_request_is_sampled_as_its_model_wants_to_be(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    wish = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    engine.cards = [card(), card("wishful", sampling=wish)]
    theirs = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    client.completions.create(model="wishful", prompt="x")
    client.completions.create(model="wishful", prompt="x", temperature=1, top_p=1, extra_body=theirs)
    client.completions.create(model="tiny", prompt="x")
    wished, said, plain = (body.sampling for body in engine.bodies)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert [getattr(wished, name) for name in names] == [0.6, 0.9, 20, 0.1, 1.1]
    assert [getattr(said, name) for name in names] == [1.0, 1.0, 0, 0.0, 1.0]
    assert [getattr(plain, name) for name in names] == [1.0, 1.0, 0, 0.0, 1.0]


def test_errors(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist or you do not have access"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"This model's maximum context length is 512") as caught:
        client.completions.create(model="tiny", prompt=[9] * 600)
    assert caught.value.code == PromptTooLong.code
    with pytest.raises(openai.BadRequestError, match=r"10 in the prompt, 510 in the completion"):
        client.completions.create(model="tiny", prompt=[9] * 10, max_tokens=510)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    engine.error = QueueFull("the queue is full", retry_after=7)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model="tiny", prompt="x", stream=stream)
        assert limited.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("end", "said", "status"),
    [
        (EndEvent(0, "error", message="the device is gone"), "the device is gone", 500),
        (None, "before the answer was complete", 503),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(
    client: openai.OpenAI, engine: ScriptedEngine, end: EndEvent | None, said: str, status: int
) -> None:
    engine.break_after, engine.break_with = 3, end
    with pytest.raises(openai.InternalServerError, match=said) as caught:
        client.completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == status
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match=said):
        list(stream)


def test_hanging_up_ends_the_request(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.hold = 2
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    assert engine.held.wait(DEADLINE)
    stream.close()
    assert engine.gone.wait(DEADLINE)


def test_hanging_up_on_a_whole_answer_ends_the_request(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.hold = 2
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model="tiny", prompt="x")
    assert engine.gone.wait(DEADLINE)

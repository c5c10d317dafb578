"""/tokenize, /detokenize and /tokenizer_info: what they tell is what completions and chats are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.schemas.chat import DetokenizeAnswer, TokenizeAnswer
from tests.api.scripted import EOS, ScriptedEngine, byte_level, card, says, token, tokens

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello <s> world"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says("hi"))


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine)) as http:
        yield http


def tokenized(http: TestClient, **body: Any) -> TokenizeAnswer:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return TokenizeAnswer.model_validate(answer.json())


@pytest.mark.parametrize("text", ["hello world", "  the\nfox <s>", "é中", ""])
def test_a_text_s_tokens_are_those_of_a_completion(
    http: TestClient, engine: ScriptedEngine, text: str
) -> None:
    told = tokenized(http, prompt=text)
    http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1}).raise_for_status()
    assert told.tokens == engine.bodies[-1].prompt
    assert (told.count, told.max_model_len, told.token_strs) == (len(told.tokens), 512, None)
    plain = tokenized(http, prompt=text, add_special_tokens=False, return_token_strs=True)
    assert plain.tokens == tokens(text)
    assert plain.token_strs == [byte_level().id_to_token(one) for one in plain.tokens]


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}])
def test_a_conversation_s_tokens_are_those_of_a_chat(
    http: TestClient, engine: ScriptedEngine, more: dict[str, Any]
) -> None:
    asked = {"model": "tiny", "messages": MESSAGES} | more
    told = tokenized(http, **asked)
    http.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).raise_for_status()
    assert told.tokens == engine.bodies[-1].prompt
    bare = tokenized(http, **asked, add_generation_prompt=False)
    assert [*bare.tokens, token("<|assistant|>")] == told.tokens


def test_a_text_may_be_longer_than_the_context(http: TestClient) -> None:
    long = "quick brown fox " * 2000
    told = tokenized(http, prompt=long, add_special_tokens=False)
    assert told.tokens == tokens(long)
    assert told.count > told.max_model_len
    back = http.post("/detokenize", json={"model": "tiny", "tokens": told.tokens}).json()
    assert DetokenizeAnswer.model_validate(back).prompt == long


def test_special_tokens_are_written_out(http: TestClient) -> None:
    asked = [token("<s>"), *tokens("hello"), token(EOS)]
    assert http.post("/detokenize", json={"tokens": asked}).json() == {"prompt": f"<s>hello{EOS}"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_who_makes_prompts_of_his_own_is_told_how(http: TestClient) -> None:
    told = http.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"]) == ("<s>", EOS)
    assert told["chat_template"] == card().chat_template
    assert told == http.get("/tokenizer_info", params={"model": "tiny"}).json()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": ""}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": "hello"}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(http: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_one_of_several_models_has_to_be_named(engine: ScriptedEngine) -> None:
    engine.cards = [card("one"), card("two")]
    with TestClient(create_app(engine)) as http:
        for answer in (http.post("/tokenize", json={"prompt": "a"}), http.get("/tokenizer_info")):
            assert answer.status_code == 400
            assert "one, two" in answer.json()["error"]["message"]
        assert tokenized(http, prompt="a", model="two").count == 2
        assert http.post("/tokenize", json={"prompt": "a", "model": "three"}).status_code == 404

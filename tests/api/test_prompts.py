"""Prompts are bounded before they are read, whatever clients and the makers of checkpoints wrote."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from kvloom.api import bodies
from kvloom.api.app import create_app
from kvloom.api.openapi import Documents
from kvloom.api.texts.prompts import UNRENDERED, InlineTexts, Prompt, TextModel
from kvloom.api.tokenizer import KNOWN_REGEXES, Tokenizer
from kvloom.types.errors import ConfigError
from tests.api.scripted import UNTIMED, ScriptedEngine, byte_level, card, says, serving
from tests.processes import DEADLINE

Change = Callable[[HFTokenizer], object]


def changed(change: Change) -> str:
    tokenizer = HFTokenizer.from_str(byte_level().to_str())
    change(tokenizer)
    text: str = tokenizer.to_str()
    return text


def with_(**parts: Any) -> Change:
    def change(tokenizer: HFTokenizer) -> None:
        for name, part in parts.items():
            setattr(tokenizer, name, part)

    return change


def with_added(**options: bool) -> Change:
    return lambda tokenizer: tokenizer.add_tokens([AddedToken("<x>", **options)])


def behind(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def bomb(regex: str = r"(a+)+$") -> Change:
    return with_(pre_tokenizer=behind(pre_tokenizers.Split(Regex(regex), "isolated")))


NFKC = changed(with_(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])))
SHRINKING = changed(with_(normalizer=normalizers.Replace("aaaa", "b")))
LONGEST = len("<|assistant|>")

UNBOUNDED: dict[str, Change] = {
    "a normaliser that strips": with_(normalizer=normalizers.Strip()),
    "a normaliser that collapses": with_(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "a normaliser that drops": with_(normalizer=normalizers.Replace("a", "")),
    "a pre-tokenizer that drops spaces": with_(pre_tokenizer=behind(pre_tokenizers.WhitespaceSplit())),
    "a pre-tokenizer that drops a pattern": with_(pre_tokenizer=behind(pre_tokenizers.Split("a", "removed"))),
    "a token that takes the spaces around it": with_added(lstrip=True),
    "a vocabulary in which bytes are unknown": with_(model=models.BPE({"a": 0}, [])),
    "whole words": with_(model=models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("change", UNBOUNDED.values(), ids=list(UNBOUNDED))
def test_what_may_drop_text_bounds_no_bytes(change: Change) -> None:
    assert Tokenizer(changed(change)).most_bytes is None


@UNTIMED
@given(st.text(max_size=60))
@pytest.mark.parametrize("text", [byte_level().to_str(), NFKC, SHRINKING], ids=["plain", "NFKC", "replaced"])
def test_no_token_stands_for_more_bytes_than_said(text: str, said: str) -> None:
    tokenizer = Tokenizer(text)
    assert tokenizer.most_bytes is not None
    count = len(tokenizer.encode(said, special=False))
    assert len(said.encode()) <= count * tokenizer.most_bytes


def test_the_bound_is_the_longest_token() -> None:
    assert Tokenizer(byte_level().to_str()).most_bytes == LONGEST
    assert Tokenizer(SHRINKING).most_bytes == 4 * LONGEST


NOT_PLAIN: dict[str, Change] = {
    "an unknown regex": bomb(),
    "a regex in the normaliser": with_(normalizer=normalizers.Replace(Regex("(a|a)*b"), "")),
    "a long text for a short one": with_(normalizer=normalizers.Replace("a", "b" * 100)),
    "a long text before each": with_(normalizer=normalizers.Prepend("b" * 100)),
    "a huge normaliser": with_(normalizer=normalizers.Sequence([normalizers.Replace("a", "b")] * 2000)),
    "whole words": with_(model=models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "a token that looks for spaces": with_added(rstrip=True),
}


@pytest.mark.parametrize("change", NOT_PLAIN.values(), ids=list(NOT_PLAIN))
def test_what_may_take_long_is_not_plain(change: Change) -> None:
    assert not Tokenizer(changed(change)).plain


@pytest.mark.parametrize("regex", sorted(KNOWN_REGEXES))
def test_known_regexes_are_plain(regex: str) -> None:
    assert Tokenizer(changed(bomb(regex))).plain
    assert Tokenizer(NFKC).plain


DECODERS: dict[str, Change] = {
    "a regex": with_(decoder=decoders.Replace(Regex("(a+)+$"), "")),
    "a long text": with_(decoder=decoders.Sequence([decoders.Replace("a", "b" * 1000)])),
}


@pytest.mark.parametrize("change", DECODERS.values(), ids=list(DECODERS))
def test_decoders_only_spell(change: Change) -> None:
    with pytest.raises(ConfigError, match="its decoder has a Replace that is not served"):
        Tokenizer(changed(change))


class Counting(InlineTexts):
    """Counts the prompts that are rendered and encoded."""

    def __init__(self) -> None:
        self.count = 0

    async def encode(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], tenant: str
    ) -> list[list[int]]:
        self.count += len(prompts)
        return await super().encode(key, model, prompts, tenant)


def asked(model: str, said: object, **more: object) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": said}], **more}


MOST = 512 * LONGEST
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a prompt": ("/v1/completions", {"prompt": "a" * (MOST + 1)}, "prompt"),
    "one of many": ("/v1/completions", {"prompt": ["a", "a", "a" * (MOST + 1)]}, "prompt"),
    "messages": (*asked("tiny", "a" * (UNRENDERED * MOST + 1)), "messages"),
    "parts": (*asked("tiny", [{"type": "text", "text": "a" * MOST}] * 5), "messages"),
}


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG.values(), ids=list(TOO_LONG))
def test_a_prompt_whose_bytes_cannot_fit_is_not_read(path: str, body: dict[str, Any], param: str) -> None:
    texts = Counting()
    with TestClient(create_app(ScriptedEngine(says("hi")), texts=texts)) as http:
        error = http.post(path, json={"model": "tiny"} | body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "at most 13 bytes each" in error["message"]
    assert texts.count == 0


def test_a_rendered_text_whose_bytes_cannot_fit_is_not_encoded() -> None:
    path, body = asked("tiny", "a" * (MOST + 1))
    with TestClient(create_app(ScriptedEngine(says("hi")))) as http:
        error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "bytes or more" in error["message"]


TEMPLATES = {
    "nested loops": "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(19) }}",
    "endless macros": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_templates_have_a_budget_of_steps(template: str) -> None:
    cards = [card("bomb", template), card("tiny")]
    with TestClient(create_app(ScriptedEngine(says("hi"), cards=cards))) as http:
        answer = http.post(*asked("bomb", "hi")[:1], json=asked("bomb", "hi")[1])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        assert http.post(asked("tiny", "hi")[0], json=asked("tiny", "hi")[1]).status_code == 200


def test_loops_still_know_their_place() -> None:
    text = (
        "{% for m in messages if true %}{{ loop.index }}{% if loop.last %}!{% endif %}{% else %}-{% endfor %}"
    )
    texts = TextModel.of(card(template="{% macro m(x) %}[{{ x }}]{% endmacro %}" + text + "{{ m(1) }}"))
    messages = [{"role": "user", "content": "a"}] * 2
    assert texts.template.render(messages, None, {}) == "12![1]"


def test_a_regex_bomb_is_a_400() -> None:
    cards = [card("bomb", tokenizer=changed(bomb()))]
    with TestClient(create_app(ScriptedEngine(says("hi"), cards=cards))) as http:
        for path, body in (
            ("/v1/completions", {"model": "bomb", "prompt": "a" * 40 + "b"}),
            asked("bomb", "a" * 40 + "b"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "the tokenizer cannot encode this text" in answer.json()["error"]["message"]


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


SHOWN = "{{ messages | tojson }}{{ tools | tojson }}{{ given }}"
ODD: dict[str, dict[str, Any]] = {
    "half a pair in arguments": {"messages": [called('"\\ud800"')]},
    "huge numbers in arguments": {"messages": [called("9" * 400)]},
    "infinite numbers in arguments": {"messages": [called("[1e999, NaN]")]},
    "huge numbers in a schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": 10**300}}}]
    },
    "huge numbers for the template": {"chat_template_kwargs": {"given": 2**80}},
    "nothing but zeros": {"messages": [{"role": "user", "content": "\0" * 50}]},
    "names of the template's own": {"chat_template_kwargs": {"messages": 1, "tools": 2, "bos_token": 3}},
}


@pytest.mark.parametrize("change", ODD.values(), ids=list(ODD))
def test_odd_values_break_nothing(change: dict[str, Any]) -> None:
    cards = [card(template=SHOWN, context_length=4096)]
    path, body = asked("tiny", "hi", max_tokens=4)
    with TestClient(create_app(ScriptedEngine(says("hi"), cards=cards))) as http:
        assert http.post(path, content=json.dumps(body | change)).status_code in (200, 400)


@pytest.mark.parametrize("field", ["prompt", "user", "stop", "model"])
def test_half_a_pair_is_a_400(field: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a"} | {field: "\ud800"})
    with TestClient(create_app(ScriptedEngine(says("hi")))) as http:
        assert http.post("/v1/completions", content=body).status_code == 400


def test_documents_are_made_once_for_each_change_of_the_units() -> None:
    units = ["a"]
    documents = Documents(lambda: units)
    first = documents.made()
    assert documents.made() is first
    units.append("b")
    second = documents.made()
    assert second is documents.made()
    assert b'"a","b"' in second.description.replace(b" ", b"")
    assert b"<h1>" in second.page


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets all requests hold no more than four that do nothing."""
    monkeypatch.setattr(bodies, "MAX_HELD", most := 4 * bodies.OPEN_BYTES)
    return most


@pytest.mark.usefixtures("small")
def test_an_answer_that_grows_beyond_what_may_be_held_ends() -> None:
    text = "a b c " * 20
    with TestClient(create_app(ScriptedEngine(says(text)))) as http:
        body = {"model": "tiny", "prompt": "a", "logprobs": 20, "max_tokens": 60}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert http.post("/v1/completions", json=body | {"logprobs": 0}).status_code == 200


@pytest.mark.usefixtures("small")
def test_a_body_that_would_take_too_much_is_not_parsed() -> None:
    with TestClient(create_app(ScriptedEngine(says("hi")))) as http:
        large = {"model": "tiny", "prompt": "a", "user": "x" * 40_000}
        assert http.post("/v1/completions", json=large).status_code == 503
        for _ in range(9):  # nothing stays held
            assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 200


def test_large_requests_leave_room_for_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD", 2 * bodies.SMALL)
    sent = 2 * bodies.SMALL - 1000
    with serving(create_app(ScriptedEngine(says("hi")))) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % (sent + 1) + b" " * sent)
            assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        answer = httpx.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert answer.status_code == 200


class Waiting(InlineTexts):
    """Encodes nothing, ever, and tells when it is left."""

    def __init__(self) -> None:
        self.begun, self.left = threading.Event(), threading.Event()

    async def encode(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], tenant: str
    ) -> list[list[int]]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
            return []
        finally:
            self.left.set()


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_cancels_what_is_done_for_its_prompt(stream: bool) -> None:
    texts = Waiting()
    with serving(create_app(ScriptedEngine(says("hi")), texts=texts)) as address:
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps(asked("tiny", "hi", stream=stream)[1]).encode()
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            assert texts.begun.wait(DEADLINE)
        assert texts.left.wait(DEADLINE)
        counted = httpx.get(f"{address}/metrics").text
        assert 'kvloom_requests_total{model="tiny",status="499"} 1.0' in counted

"""The demo fleet as a whole under the official client, and under everything one should not send. Afterwards
it answers as before, and its pool is whole (laws 1 and 4)."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvloom.config.config import DEMO
from tests.processes import DEADLINE, fleet
from tests.serve.streaming import metric, sum_of

MODELS = ("guide", "stories", "sums")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet("--kv-memory", "16MiB") as running:
        yield running.wait_until_ready()
        assert running.end(signal.SIGTERM) == 0


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)


@pytest.fixture(autouse=True)
def whole(url: str) -> Iterator[None]:
    """After each test: sums is right, and soon every block is free."""
    yield
    assert sum_of(url, 17, 25) == "17 + 25 = 42."
    deadline = time.monotonic() + DEADLINE
    while (held := metric(url, "kvloom_kv_blocks_used")) > 0:
        assert time.monotonic() < deadline, f"{held} blocks are held"
    free, cached = (metric(url, f"kvloom_kv_blocks_{what}") for what in ("free", "cached"))
    assert free + cached == metric(url, "kvloom_kv_blocks")


def post(url: str, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def connect(url: str) -> socket.socket:
    host = urllib.parse.urlsplit(url)
    return socket.create_connection((str(host.hostname), int(host.port or 0)))


def test_sums_are_right(url: str) -> None:
    rng = random.Random(0)
    pairs = [(rng.randrange(99), rng.randrange(90)) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pair: sum_of(url, *pair), pairs))
    assert answers == [f"{a} + {b} = {a + b}." for a, b in pairs]


def test_choices_seeds_and_logprobs(client: openai.OpenAI) -> None:
    def ask(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model="stories", prompt="Once upon a time", n=n, seed=seed, temperature=1.0, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    three = ask(3, 5)
    assert len(set(three)) > 1
    assert ask(2, 5) == three[:2]
    assert ask(1, 6) != three[:1]
    told = client.chat.completions.create(
        model="sums", messages=[{"role": "user", "content": "1+2"}], logprobs=True, top_logprobs=3
    )
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert max(top.logprob for top in one.top_logprobs) == pytest.approx(one.logprob, abs=1e-6)


def test_a_stream_is_the_whole_answer_with_usage(client: openai.OpenAI) -> None:
    ask: Any = {"model": "guide", "messages": [{"role": "user", "content": "What is a block?"}]}
    whole = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_json_and_tools(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="sums",
        messages=[{"role": "user", "content": "3+4"}],
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
        max_tokens=64,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or "")["sum"], int)
    parameters: Any = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}},
        "required": ["city"],
    }
    called = client.chat.completions.create(
        model="guide",
        messages=[{"role": "user", "content": "What time is it in Oslo?"}],
        tools=[{"type": "function", "function": {"name": "get_time", "parameters": parameters}}],
        tool_choice="required",
        max_tokens=64,
    )
    assert called.choices[0].finish_reason == "tool_calls"
    tool = (called.choices[0].message.tool_calls or [])[0]
    assert tool.type == "function"
    assert tool.function.name == "get_time"
    assert json.loads(tool.function.arguments)["city"] in ("Bern", "Oslo")


@pytest.mark.parametrize("model", MODELS)
def test_every_special_token_in_a_prompt(url: str, model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / model / "tokenizer.json"))
    added = sorted(tokenizer.get_added_tokens_decoder())
    vocabulary = tokenizer.get_vocab_size()
    for prompt in (
        added,
        [vocabulary - 1],
        "".join(str(tokenizer.id_to_token(token)) for token in added),
        "",
    ):
        body = {"model": model, "prompt": prompt, "max_tokens": 3}
        status, answer = post(url, json.dumps(body).encode(), "/v1/completions")
        assert status in (200, 400), answer


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(max_size=80))
def test_random_bytes(url: str, body: bytes) -> None:
    assert post(url, body)[0] == 400


def test_half_sent_requests_and_a_thousand_connections(url: str) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n"
    with ExitStack() as stack:
        held = [stack.enter_context(connect(url)) for _ in range(1000)]
        for at, one in enumerate(held):
            one.sendall((head, head + b"\r\n", head + b'\r\n{"model": "su', b"")[at % 4])
        assert sum_of(url, 40, 2) == "40 + 2 = 42."


def test_hang_ups_in_the_middle(url: str) -> None:
    ask = {
        "model": "stories",
        "prompt": "Once",
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
    }
    body = json.dumps(ask).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as stack:
        held = [stack.enter_context(connect(url)) for _ in range(8)]
        for one in held:
            one.sendall(head + body)
        for one in held:
            assert one.recv(64).startswith(b"HTTP/1.1 200")


def test_fuzzed_from_its_own_description(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema["/v1/completions"]["POST"]

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def fuzz(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body |= {"model": "sums", "max_tokens": 2}
        response = case.call(base_url=url, timeout=DEADLINE)
        assert response.status_code in (200, 400, 429, 503), response.text

    fuzz()

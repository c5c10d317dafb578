"""Requests made from the gateway's own description, and random bytes: every answer is one it describes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core import NOT_SET
from schemathesis.generation.meta import TestPhase
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient

from kvloom.api.auth import Keys
from kvloom.api.schemas.chat import ChatBody
from kvloom.api.schemas.generation import CompletionBody, ErrorAnswer
from kvloom.api.schemas.responses import ResponsesBody
from tests.api.fleet import ADDRESS, FORM, LOAD, PEER, administered
from tests.examples import examples

KEY = {"authorization": "Bearer admin"}
APP = administered(keys=Keys(admin=frozenset({"admin"}))).app
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
PATHS = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SHARE = examples(64) << 24  # of 2**32: of the cases by which schemathesis covers each keyword of each field


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=examples(7), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_described(case: schemathesis.Case) -> None:
    """What a schema cannot say (fields that need each other, the context length) may still be refused."""
    if case.meta is not None and case.meta.phase.name is TestPhase.COVERAGE:
        body = None if case.body is NOT_SET else case.body  # which has another name in each run
        sent = case.method, case.path, case.path_parameters, case.query, case.headers, body
        if zlib.crc32(repr(sent).encode()) >= SHARE:
            return
    if isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive:
        case.body |= {"model": "tiny"} if "model" in case.body else {}
    case.call_and_validate(headers=KEY, excluded_checks=[positive_data_acceptance])


ASKED: dict[str, Any] = {"model": "tiny", "request": "r", "prompt": [1, 2]}
SEND: dict[str, Any] = ASKED | {"address": ADDRESS, "peer": PEER, "begin": 0, "end": 1, "priority": 0}
SAMPLING = {"max_tokens": 1, "seed": 1, "top_k": 1, "logit_bias": {"1": 1}, "stop_token_ids": [1]}
VERBS: dict[str, dict[str, Any]] = {
    "prep_recv": ASKED | {"end": 1, "sender": FORM, "due": 1},
    "remote_send": SEND,
    "pin": ASKED | {"lease": 1},
    "hold": {"request": "r", "sends": [SEND]},
    "offer": {"destination": LOAD, "floor": 1},
    "abort": {"request": "r", "choice": 0},
    "evict": {"model": "tiny", "prompt": [1]},
    "contents": {"life": "", "version": 1},
    "start_generate": ASKED | {"sampling": SAMPLING, "begin": 0, "n": 1, "made": [[0, [1]]], "priority": 0},
}


@pytest.mark.parametrize("verb", VERBS)
def test_integers_of_80_bits(verb: str) -> None:
    """JSON holds them, msgpack, in which engines are asked, does not."""
    app = administered(keys=Keys(admin=frozenset({"admin"}))).app  # whose units nobody has stopped
    client = TestClient(app, raise_server_exceptions=False, headers=KEY)
    for body in huge(msgspec.to_builtins(VERBS[verb])):
        answer = client.post(f"/verbs/unit-0/{verb}", json=body)
        assert answer.status_code in (200, 400), (body, answer.text)


def huge(value: Any) -> Iterator[Any]:
    """Yields the value with one of its numbers after the other replaced by an integer of 80 bits."""
    if isinstance(value, dict):
        for key in value:
            yield from (value | {key: changed} for changed in huge(value[key]))
    elif isinstance(value, list) and value:
        yield from ([changed, *value[1:]] for changed in huge(value[0]))
    elif isinstance(value, int | float):
        yield 2**80
        yield -(2**80)


@settings(max_examples=examples(75), deadline=None, derandomize=True)
@given(st.sampled_from(PATHS), st.binary(max_size=60))
def test_random_bytes(path: str, body: bytes) -> None:
    answer = TestClient(APP, raise_server_exceptions=False).post(path, content=body)
    assert answer.status_code == 400
    ErrorAnswer.model_validate(answer.json())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    sorted(
        CompletionBody.model_fields.keys() | ChatBody.model_fields.keys() | ResponsesBody.model_fields.keys()
    )
)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.sampled_from(PATHS), st.dictionaries(FIELDS, JSON, max_size=3))
def test_any_json_in_any_field(path: str, change: dict[str, object]) -> None:
    messages = [{"role": "user", "content": "x"}]
    said = {"input": "x"} if path == "/v1/responses" else {"prompt": "x", "messages": messages}
    body = said | change
    body["model"] = "tiny"
    answer = TestClient(APP).post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400), answer.text

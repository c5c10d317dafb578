"""Requests made from the gateway's own description, and random bytes: every answer is one it describes."""

from __future__ import annotations

import json

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient

from kvloom.api.auth import Keys
from kvloom.api.schemas import CompletionBody, ErrorAnswer
from kvloom.api.schemas_chat import ChatBody
from tests.api.fleet import administered
from tests.examples import examples

KEY = {"authorization": "Bearer admin"}
APP = administered(keys=Keys(admin=frozenset({"admin"}))).app
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_described(case: schemathesis.Case) -> None:
    """What a schema cannot say (fields that need each other, the context length) may still be refused."""
    if isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive:
        case.body |= {"model": "tiny"} if "model" in case.body else {}
    case.call_and_validate(headers=KEY, excluded_checks=[positive_data_acceptance])


@settings(max_examples=examples(75), deadline=None, derandomize=True)
@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.binary(max_size=60))
def test_random_bytes(path: str, body: bytes) -> None:
    answer = TestClient(APP, raise_server_exceptions=False).post(path, content=body)
    assert answer.status_code == 400
    ErrorAnswer.model_validate(answer.json())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(sorted(CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.dictionaries(FIELDS, JSON, max_size=3)
)
def test_any_json_in_any_field(path: str, change: dict[str, object]) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]} | change
    body["model"] = "tiny"
    answer = TestClient(APP).post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400), answer.text

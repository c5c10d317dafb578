"""Whatever goes wrong at a verb, the gateway says it in one form, which is the one it describes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from kvloom.api.auth import Keys
from kvloom.api.verbs import create_verbs
from kvloom.types.errors import (
    BadRequest,
    KvloomError,
    OutOfBlocks,
    PromptTooLong,
    QueueFull,
    Unavailable,
    UnknownModel,
    WireError,
)
from kvloom.types.load import ModelLoad
from kvloom.types.request import PROTOCOL
from kvloom.types.verbs import RemoteSend, Sent, Standing
from tests.api.fleet import ADDRESS, PEER, Curt, administered

KEYS = Keys(api={"asker": None}, admin=frozenset({"admin"}), secret="fleet")
ADMIN = {"authorization": "Bearer admin", "content-type": "application/json"}
IDLE = {"total_blocks": 8, "free_blocks": 8, "block_bytes": 256, "policy": "adbs", "models": {}}
ASK = {"model": "tiny", "request": "r", "prompt": [1, 2]}
BODIES: dict[str, dict[str, Any] | None] = {
    "start_generate": ASK | {"sampling": {"max_tokens": 1, "seed": 0}},
    "prep_recv": ASK,
    "remote_send": ASK | {"address": msgspec.to_builtins(ADDRESS), "peer": msgspec.to_builtins(PEER)},
    "abort": {"request": "r"},
    "renew": {"request": "r"},
    "pin": ASK,
    "unpin": {"request": "r"},
    "hold": {"request": "r"},
    "resume": {"request": "r"},
    "offer": {"destination": IDLE},
    "evict": {"model": "tiny", "prompt": [1]},
    "contents": {"life": "", "version": 1},
    "models": None,
    "load": None,
}
RAISED = [
    BadRequest("no such position", param="end"),
    UnknownModel("gone"),
    PromptTooLong("too long"),
    QueueFull("full", retry_after=7),
    QueueFull("full"),
    OutOfBlocks("no room"),
    Unavailable("away"),
    KvloomError("a bug"),
    ZeroDivisionError("a bug that nobody thought of"),
]


def client(engine: Curt | None = None, **options: Any) -> TestClient:
    app = administered(keys=KEYS, engine=engine, **options).app
    return TestClient(app, raise_server_exceptions=False, follow_redirects=False)


def read(answer: Any, status: int) -> WireError:
    """The error, of which nothing is left unread."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = msgspec.json.decode(answer.content, type=WireError)
    assert msgspec.to_builtins(error) == answer.json()
    return error


def send(http: TestClient, verb: str, **options: Any) -> Any:
    body = BODIES[verb]
    if body is None:
        return http.get(f"/verbs/unit-0/{verb}", **{"headers": ADMIN} | options)
    return http.post(
        f"/verbs/unit-0/{verb}", **{"headers": ADMIN, "content": msgspec.json.encode(body)} | options
    )


@pytest.mark.parametrize("verb", BODIES)
def test_the_bodies_are_right(verb: str) -> None:
    """Of the other tests here: they fail for their own reasons."""
    assert send(client(), verb).status_code == 200


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", BODIES)
def test_what_the_engine_says(verb: str, error: Exception) -> None:
    answer = send(client(Curt(lambda asked: error if asked == verb else None)), verb)
    if isinstance(error, KvloomError):
        assert read(answer, error.status) == error.to_wire()
        assert answer.headers.get("retry-after") == (
            str(error.retry_after or 1) if error.status == 429 else None
        )
    else:
        assert "nobody thought" not in read(answer, 500).message


@pytest.mark.parametrize("verb", [verb for verb, body in BODIES.items() if body])
def test_bodies_that_are_none(verb: str) -> None:
    http = client()
    for wrong in (b"", b"{", b"[]", b"null", b"\xff", b'{"model": 3}', b"[" * 20_000, b'{"x":' * 20_000):
        assert read(send(http, verb, content=wrong), 400).code == "invalid_request"
    key = {"authorization": "Bearer admin"}
    for headers in (key, key | {"content-type": "text/plain"}):
        message = read(send(http, verb, headers=headers), 400).message
        assert message.startswith("content-type: ")
        assert message.endswith("; `Content-Type: application/json`, or application/msgpack, is right")


SAMPLING = {"max_tokens": 1, "seed": 0}
TINY = {
    name: 0
    for name, kind in ModelLoad.__annotations__.items()
    if kind == "int" and name not in ModelLoad.__struct_defaults__
}
INTEGERS: list[tuple[str, dict[str, Any]]] = [
    *(("start_generate", {name: ...}) for name in ("begin", "n", "priority", "interval")),
    *(
        ("start_generate", {"sampling": SAMPLING | {name: ...}})
        for name in ("max_tokens", "seed", "top_k", "min_tokens", "logprobs")
    ),
    ("start_generate", {"sampling": SAMPLING | {"stop_token_ids": [...]}}),
    ("start_generate", {"sampling": SAMPLING | {"logit_bias": {...: 1.0}}}),
    ("start_generate", {"made": [[..., [1]]]}),
    ("start_generate", {"prompt": [...]}),
    *(("prep_recv", {name: ...}) for name in ("end", "due")),
    *(("remote_send", {name: ...}) for name in ("begin", "end", "priority")),
    ("abort", {"choice": ...}),
    ("pin", {"lease": ...}),
    ("offer", {"destination": IDLE | {"total_blocks": ...}}),
    ("offer", {"destination": IDLE | {"models": {"tiny": TINY | {"waiting": ...}}}}),
]


@pytest.mark.parametrize(("verb", "change"), INTEGERS)
def test_integers_beyond_64_bits(verb: str, change: dict[str, Any]) -> None:
    body = BODIES[verb]
    assert body is not None
    said = str(body | change)
    http = client()
    for wrong in (2**64, 2**70, -(2**70)):
        content = json.dumps(body | _with(change, wrong)).encode()
        assert read(send(http, verb, content=content), 400).code == "invalid_request", said


@pytest.mark.parametrize(("verb", "change"), [one for one in INTEGERS if one[0] != "offer"])
def test_integers_that_a_tensor_does_not_hold(verb: str, change: dict[str, Any]) -> None:
    """MessagePack has integers up to 2**64 - 1."""
    body = BODIES[verb]
    assert body is not None
    content = msgspec.msgpack.encode(body | _with(change, 2**63))
    headers = ADMIN | {"content-type": "application/msgpack", "accept": "application/json"}
    answer = send(client(), verb, content=content, headers=headers)
    assert answer.status_code == 400, answer.text


def _with(change: Any, number: int) -> Any:
    """`change` with the number in place of each `...`."""
    match change:
        case dict():
            return {number if key is ... else key: _with(one, number) for key, one in change.items()}
        case list():
            return [_with(one, number) for one in change]
    return number if change is ... else change


@pytest.mark.parametrize("verb", BODIES)
def test_callers_who_may_not(verb: str) -> None:
    http = client()
    json = {"content-type": "application/json"}
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic admin"}):
        answer = send(http, verb, headers=json | given)
        assert read(answer, 401).code == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert read(send(http, verb, headers=json | {"authorization": "Bearer asker"}), 403).code


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/verbs", 404),
        ("GET", "/verbs/", 404),
        ("GET", "/verbs/unit-0", 404),
        ("GET", "/verbs/unit-0/", 404),
        ("GET", "/verbs/unit-0/load/", 404),
        ("POST", "/verbs/unit-0/steal", 404),
        ("GET", "/verbs/unit-7/load", 404),
        ("POST", "/verbs/unit-7/prep_recv", 404),
        ("GET", "/verbs/unit-0/prep_recv", 405),
        ("DELETE", "/verbs/unit-0/load", 405),
    ],
)
def test_paths_that_are_none(method: str, path: str, status: int) -> None:
    error = read(client().request(method, path, headers=ADMIN), status)
    assert path in error.message or "unit-0, unit-1" in error.message


@pytest.mark.parametrize("verb", ["start_generate", "remote_send", "hold", "renew"])
@pytest.mark.parametrize("whole", [True, False])
def test_callers_that_hang_up(verb: str, whole: bool) -> None:
    """An engine ends the call, and nothing is raised that its server would log as a bug."""
    app = create_verbs(Endless(), secret="fleet")
    body = msgspec.json.encode(BODIES[verb])
    headers = {
        "authorization": "Bearer fleet",
        "kvloom-protocol": PROTOCOL,
        "content-type": "application/json",
    }
    received = [
        {"type": "http.request", "body": body if whole else body[:5], "more_body": not whole},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop(0)

    async def answer(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/verbs/{verb}",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, answer))
    assert all(message.get("status", 499) in (200, 499) for message in sent)


class Endless(Curt):
    """An engine whose verbs that wait answer nobody."""

    async def remote_send(self, body: RemoteSend) -> Sent:
        raise await asyncio.Future[KvloomError]()

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        raise await asyncio.Future[KvloomError]()


def test_bodies_without_end() -> None:
    http = client(max_body=2000)
    assert read(send(http, "pin", content=b" " * 3000), 413).code == "body_too_large"
    assert read(send(http, "pin", content=iter([b" " * 1500] * 2)), 413).code == "body_too_large"


def test_callers_of_msgpack_get_msgpack() -> None:
    http = client()
    asked = ADMIN | {"accept": "application/msgpack"}
    for answer in (
        send(http, "pin", headers=asked, content=b"{"),
        http.get("/verbs/unit-7/load", headers=asked),
        http.get("/verbs/unit-0/load", headers=asked | {"authorization": "Bearer x"}),
    ):
        assert answer.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(answer.content, type=WireError).message


def test_every_status_here_is_described() -> None:
    document = client().get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values() if path.startswith("/verbs/") else ():
            forms = {
                status: answer["content"]["application/json"]["schema"]["$ref"]
                for status, answer in operation["responses"].items()
                if status != "200"
            }
            assert set(forms.values()) == {"#/components/schemas/WireError"}
            assert {"400", "401", "403", "404", "408", "413", "429", "500", "503"} == forms.keys()

"""Which pages in browsers may ask for completions, and which bodies are taken."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from tests.api.scripted import ScriptedEngine, says

ASKED = {"model": "tiny", "prompt": "hi"}
CHAT = "https://chat.example.org"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def client(*origins: str, keys: Keys | None = None) -> TestClient:
    app = create_app(ScriptedEngine(says("hello world")), keys=keys, origins=origins)
    return TestClient(app, client=("10.1.2.3", 5))


def status(host: str, *origins: str, allowed: tuple[str, ...] = (), **headers: str) -> int:
    sent = [("host", host), *(("origin", one) for one in origins)]
    sent += [(name.replace("_", "-"), value) for name, value in headers.items()]
    answer = client(*allowed).post("/v1/completions", json=ASKED, headers=sent)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "foreign_origin"
        assert "`allow_origins`" in answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.parametrize(
    "host", ["localhost:8000", "10.1.2.3", "[::1]:8000", "machine:8000", "gpu.corp.example", "", "::", "a b"]
)
def test_a_client_that_is_no_browser_may_use_any_name(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "10.1.2.3",
        "[::1]:8000",
        "[fe80::1]",
        "machine:8000",
        "machine.local",
        "x.internal:1",
    ],
)
def test_a_page_of_the_servers_own(host: str) -> None:
    assert status(host, f"http://{host}") == 200
    assert status(host, f"https://{host}", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize(
    ("host", "origins", "site"),
    [
        ("localhost:8000", ["https://evil.example"], ""),
        ("localhost:8000", ["http://localhost:3000"], "same-site"),
        ("localhost:8000", ["null"], "cross-site"),
        ("localhost:8000", ["http://localhost:8000", "https://evil.example"], ""),
        ("localhost:8000", [], "cross-site"),
        ("localhost:8000", [], "same-site"),
        ("evil.example:8000", ["http://evil.example:8000"], ""),
        ("evil.example", ["http://evil.example"], "same-origin"),
        ("10.1.2.3.evil.example", ["http://10.1.2.3.evil.example"], ""),
        ("local", ["http://evil.local.example"], ""),
    ],
)
def test_pages_of_others_are_refused(host: str, origins: list[str], site: str) -> None:
    """Also those whose name was made to lead here, as by DNS rebinding."""
    for allowed in ((), ("https://other.example",)):
        if site:
            assert status(host, *origins, allowed=allowed, sec_fetch_site=site) == 403
        else:
            assert status(host, *origins, allowed=allowed) == 403


def test_pages_that_the_config_names() -> None:
    assert status("localhost:8000", CHAT, allowed=(CHAT,)) == 200
    assert status("kvloom.example.org", CHAT, allowed=(CHAT,)) == 200
    assert status("chat.example.org", "http://chat.example.org", allowed=(CHAT,)) == 200
    assert status("localhost:8000", "https://any.example", "null", allowed=("*",)) == 200


def test_what_only_reads_may_be_linked_to() -> None:
    http = client()
    assert http.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
    assert http.get("/health", headers={"origin": "https://evil.example"}).status_code == 200


def test_with_a_key_no_origin_counts() -> None:
    http = client(keys=Keys({"asker": None}))
    headers = {"authorization": "Bearer asker", "origin": "https://evil.example"}
    assert http.post("/v1/completions", json=ASKED, headers=headers).status_code == 200
    assert http.post("/v1/completions", json=ASKED, headers={"origin": CHAT}).status_code == 401


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        (None, True),
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.x+json", True),
        ("text/plain", False),
        ("text/plain;application/json", False),
        ("application/x-www-form-urlencoded", True),
        ("multipart/form-data; boundary=x", False),
        ("application/jsonx", False),
    ],
)
def test_bodies_are_json(kind: str | None, right: bool) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"model": "tiny", "prompt": "hi"}'
    answer = client().post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == (200 if right else 415)
    if not right:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert error["message"].endswith("; `Content-Type: application/json` is right")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize"])
def test_other_apis_take_no_texts_and_no_pages_of_others(path: str) -> None:
    http, text = client(), {"content-type": "text/plain"}
    assert http.post(path, content=b'{"model": "tiny"}', headers=text).status_code == 415
    evil = {"origin": "https://evil.example"}
    assert http.post(path, json={"model": "tiny"}, headers=evil).status_code == 403


def test_two_content_types() -> None:
    kinds = [("content-type", "application/json"), ("content-type", "text/plain")]
    assert client().post("/v1/completions", content=b"{}", headers=kinds).status_code == 415


@pytest.mark.parametrize("keys", [None, Keys({"asker": None})])
def test_browsers_are_told_what_pages_may(keys: Keys | None) -> None:
    http = client(CHAT, keys=keys)
    before = http.options("/v1/completions", headers=PREFLIGHT | {"origin": CHAT})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == CHAT
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "authorization" in before.headers["access-control-allow-headers"]
    key = {"authorization": "Bearer asker"}
    for headers, code in ((key, 200), ({}, 401 if keys else 200)):
        answer = http.post(
            "/v1/completions", json=ASKED | {"stream": True}, headers=headers | {"origin": CHAT}
        )
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (code, CHAT)
    foreign = http.options("/v1/completions", headers=PREFLIGHT | {"origin": "https://evil.example"})
    assert foreign.status_code == 400
    assert "access-control-allow-origin" not in foreign.headers
    plain = http.post("/v1/completions", json=ASKED, headers=key)
    assert "access-control-allow-origin" not in plain.headers


def test_without_allowed_origins_no_page_may_read() -> None:
    answer = client(keys=Keys({"asker": None})).options(
        "/v1/completions", headers=PREFLIGHT | {"origin": CHAT}
    )
    assert answer.status_code == 401
    assert "access-control-allow-origin" not in answer.headers

"""Which key opens which path, for every pairing of keys that are set and keys that are given."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from tests.api.fleet import administered
from tests.api.scripted import ScriptedEngine, card, says

API: dict[str, int | None] = {"asker": None, "zwö": None}
ADMIN = frozenset({"admin"})
HERE, AWAY = ("127.0.0.1", 5000), ("10.1.2.3", 5000)
PATHS = {
    "open": ("GET", "/health", None),
    "completion": ("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"}),
    "metrics": ("GET", "/metrics", None),
    "program": ("POST", "/admin/program", {"name": "least_loaded"}),
    "units": ("GET", "/admin/units", None),
    "drain": ("POST", "/admin/units/unit-0/drain", {}),
    "verb": ("GET", "/verbs/unit-0/load", None),
}
FOR_ALL, FOR_ADMINS = ("open", "completion", "metrics"), ("program", "units", "drain", "verb")


def statuses(
    keys: Keys, given: str | None, caller: tuple[str, int] | None = HERE, scheme: str = "Bearer"
) -> dict[str, int]:
    app = administered(keys=keys).app
    http = TestClient(app, base_url="http://localhost", client=caller)  # type: ignore[arg-type]
    headers = {} if given is None else {"authorization": f"{scheme} {given}".encode()}
    return {
        name: http.request(method, path, json=body, headers=headers).status_code  # type: ignore[arg-type]
        for name, (method, path, body) in PATHS.items()
    }


def expected(for_all: int, for_admins: int) -> dict[str, int]:
    return {"open": 200} | dict.fromkeys(FOR_ALL[1:], for_all) | dict.fromkeys(FOR_ADMINS, for_admins)


@pytest.mark.parametrize("caller", [HERE, AWAY, None])
@pytest.mark.parametrize(
    ("api", "admin", "given", "for_all", "for_admins"),
    [
        (API, ADMIN, None, 401, 401),
        (API, ADMIN, "wrong", 401, 401),
        (API, ADMIN, "asker", 200, 403),
        (API, ADMIN, "zwö", 200, 403),
        (API, ADMIN, "admin", 200, 200),
        (API, ADMIN, "fleet", 200, 200),
        (API, (), None, 401, 403),
        (API, (), "wrong", 401, 403),
        (API, (), "asker", 200, 403),
        (API, (), "fleet", 200, 200),
        ((), ADMIN, None, 200, 401),
        ((), ADMIN, "wrong", 200, 401),
        ((), ADMIN, "admin", 200, 200),
        ((), ADMIN, "fleet", 200, 200),
        ((), (), "fleet", 200, 200),
    ],
)
def test_keys(
    api: Any, admin: Any, given: str | None, for_all: int, for_admins: int, caller: tuple[str, int] | None
) -> None:
    """Where the caller is does not count where there are keys."""
    keys = Keys(dict(api), frozenset(admin), "fleet")
    assert statuses(keys, given, caller) == expected(for_all, for_admins)


@pytest.mark.parametrize("given", ["admin", "asker", "fleet"])
def test_other_schemes_than_bearer(given: str) -> None:
    assert statuses(Keys(API, ADMIN, "fleet"), given, scheme="Basic") == expected(401, 401)


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        (HERE, 200),
        (("127.8.8.8", 1), 200),
        (("::1", 1), 200),
        (("::ffff:127.0.0.1", 1), 200),
        (None, 200),
        (AWAY, 403),
        (("::ffff:10.1.2.3", 1), 403),
        (("fe80::1%eth0", 1), 403),
        (("somewhere", 1), 403),
    ],
)
@pytest.mark.parametrize("given", [None, "anything"])
def test_without_keys_this_machine_may_do_all(
    given: str | None, caller: tuple[str, int] | None, status: int
) -> None:
    assert statuses(Keys(secret="fleet"), given, caller) == expected(200, status)


@pytest.mark.parametrize(
    ("caller", "host", "origin", "said"),
    [
        (HERE, "localhost", None, ""),
        (HERE, "LocalHost:8000", "http://localhost:8000", ""),
        (HERE, "127.0.0.1:8000", "http://127.0.0.1:8000", ""),
        (HERE, "[::1]:8000", "http://[::1]:8000", ""),
        (HERE, "[::1]", None, ""),
        (None, "kvloom", None, ""),
        (None, "kvloom", "http://kvloom", ""),
        (HERE, "evil.example", "http://evil.example", "Host header"),
        (HERE, "localhost.evil.example:8000", None, "Host header"),
        (HERE, "127.0.0.1.evil.example", None, "Host header"),
        (HERE, "[::1].evil.example", None, "Host header"),
        (HERE, "10.1.2.3", None, "Host header"),
        (HERE, "", None, "Host header"),
        (HERE, "localhost:8000", "http://evil.example", "is not open to a page of"),
        (HERE, "localhost:8000", "http://localhost:3000", "is not open to a page of"),
        (HERE, "localhost:8000", "null", "is not open to a page of"),
        (None, "kvloom", "http://evil.example", "is not open to a page of"),
    ],
)
def test_without_keys_no_page_in_a_browser_gets_through(
    caller: tuple[str, int] | None, host: str, origin: str | None, said: str
) -> None:
    """Not by a name that was made to lead here, nor from another site; with a key it does not matter."""
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    app = administered(keys=Keys(admin=frozenset({"admin"}))).app
    known = TestClient(app, client=caller, headers=headers)  # type: ignore[arg-type]
    assert known.get("/admin/units", headers={"authorization": "Bearer admin"}).status_code == 200
    http = TestClient(administered(keys=Keys()).app, client=caller, headers=headers)  # type: ignore[arg-type]
    assert http.get("/health").status_code == 200
    verb = http.get("/verbs/unit-0/load")
    answer = http.post("/admin/program", json={"name": "least_loaded"})
    assert verb.status_code == answer.status_code == (403 if said else 200)
    if said:
        message = answer.json()["error"]["message"]
        assert said in message
        assert "\n" not in message
        assert verb.json()["message"] == message


@pytest.mark.parametrize(
    ("sites", "status"),
    [
        ([], 200),
        (["none"], 200),
        (["same-origin"], 200),
        (["Same-Origin"], 200),
        (["same-site"], 403),
        (["cross-site"], 403),
        ([""], 403),
        (["what is yet to come"], 403),
        (["same-origin", "cross-site"], 403),
    ],
)
def test_without_keys_an_image_on_another_sites_page_reads_nothing(sites: list[str], status: int) -> None:
    """A browser sends no Origin with it, but says what page it is on."""
    headers = [("host", "localhost:8000"), *(("sec-fetch-site", site) for site in sites)]
    key = ("authorization", "Bearer admin")
    for caller in (HERE, None):
        http, known = (
            TestClient(administered(keys=keys).app, client=caller)  # type: ignore[arg-type]
            for keys in (Keys(), Keys(admin=frozenset({"admin"})))
        )
        for path in ("/admin/units", "/admin/program", "/verbs/unit-0/load"):
            answer = http.get(path, headers=headers)
            assert answer.status_code == status
            assert ("Sec-Fetch-Site" in answer.text) == (status == 403)
            assert known.get(path, headers=[*headers, key]).status_code == 200
        assert http.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("keys", "given", "said"),
    [
        (
            Keys(API, ADMIN),
            "asker",
            "this path needs an admin key, one of `admin_key_file` or a key with `admin: true`",
        ),
        (Keys(API), "asker", "none is set; `admin_key_file`, or a key with `admin: true`"),
        (Keys(), None, "open to callers on the server's own machine only"),
        (Keys(API, ADMIN), None, "no admin key was given: send 'Authorization: Bearer KEY'"),
        (Keys(API, ADMIN), "x", "the admin key is wrong"),
    ],
)
def test_one_clear_line(keys: Keys, given: str | None, said: str) -> None:
    http = TestClient(administered(keys=keys).app, client=AWAY)
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    answer = http.get("/admin/units", headers=headers)
    admin = answer.json()["error"]["message"]
    assert answer.headers.get("www-authenticate") == ("Bearer" if answer.status_code == 401 else None)
    assert said in admin
    assert "\n" not in admin
    assert http.get("/verbs/unit-0/load", headers=headers).json()["message"] == admin


def test_paths_that_only_look_like_others() -> None:
    http = TestClient(administered(keys=Keys(API)).app, client=HERE)
    key = {"authorization": "Bearer asker"}
    assert http.get("/administer", headers=key).status_code == 404
    assert http.get("/admin/nothing", headers=key).status_code == 403
    assert http.get("/admin/nothing", headers={"authorization": "Bearer x"}).status_code == 403


@pytest.mark.parametrize(
    ("key", "asked", "given"),
    [
        ("free", None, 0),
        ("free", -7, -7),
        ("slow", None, 5),
        ("slow", 0, 5),
        ("slow", 9, 9),
        ("fast", None, -10),
        ("fast", -20, -10),
        ("fast", 3, 3),
        ("admin", -20, -20),
    ],
)
def test_a_request_is_no_more_urgent_than_its_key(key: str, asked: int | None, given: int) -> None:
    engine = ScriptedEngine(says("hi"), cards=[card()])
    keys = Keys({"free": None, "slow": 5, "fast": -10}, ADMIN)
    with TestClient(create_app(engine, keys=keys), headers={"authorization": f"Bearer {key}"}) as http:
        body = {"model": "tiny", "priority": asked}
        assert http.post("/v1/completions", json=body | {"prompt": "x"}).status_code == 200
        messages = [{"role": "user", "content": "x"}]
        assert http.post("/v1/chat/completions", json=body | {"messages": messages}).status_code == 200
    assert [one.priority for one in engine.bodies] == [given, given]

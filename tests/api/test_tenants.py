"""Keys with names: what each opens, how much of it, what it is told, and for whom engines are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kvloom.api.access.keyring import KeyRing
from kvloom.api.access.tenants import Bucket, show_span
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.errors import RateLimited
from kvloom.config.keys import NamedKey, make_key
from kvloom.types.errors import Unavailable
from tests.api.fleet import administered
from tests.api.scripted import UNTIMED, ScriptedEngine, card, says, serving
from tests.processes import DEADLINE

ANSWER = "hello world"
OUTPUT = 12  # tokens of each choice, if as many may be made
PROMPT = [5, 6, 7]


@dataclass
class Named:
    """Keys by name, a clock, and the ring that has them."""

    texts: dict[str, str] = field(default_factory=dict)
    keys: dict[str, NamedKey] = field(default_factory=dict)
    now: float = 1000.0
    date: float = 0.0

    def __post_init__(self) -> None:
        self.ring = KeyRing({}, lambda: self.now, lambda: self.date)

    def add(self, name: str, **fields: Any) -> None:
        self.texts[name], self.keys[name] = make_key(name, **fields)
        self.ring.replace(dict(self.keys))

    def change(self, name: str, **fields: Any) -> None:
        """Gives a key other limits."""
        self.keys[name] = self.keys[name].model_copy(update=fields)
        self.ring.replace(dict(self.keys))

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[name]}"}


@pytest.fixture
def named() -> Named:
    return Named()


def client(named: Named, engine: ScriptedEngine | None = None, **keys: Any) -> TestClient:
    app = create_app(engine or ScriptedEngine(says(ANSWER)), keys=Keys(ring=named.ring, **keys))
    return TestClient(app, raise_server_exceptions=False)


def complete(http: TestClient, headers: dict[str, str] | None = None, **body: Any) -> Any:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": OUTPUT, "ignore_eos": True} | body
    return http.post("/v1/completions", json=asked, headers=headers)


def left(answer: Any) -> tuple[int | None, int | None]:
    """What is left of the requests and of the tokens of a minute."""
    told = (answer.headers.get(f"x-ratelimit-remaining-{what}") for what in ("requests", "tokens"))
    requests, tokens = (None if one is None else int(one) for one in told)
    return requests, tokens


def test_a_ring_locks_completions_even_if_it_is_empty(named: Named) -> None:
    with client(named) as http:
        assert complete(http).status_code == 401
        named.add("a")
        assert complete(http, named.headers("a")).status_code == 200
        for wrong in ("", "Bearer ", "Bearer x", f"Basic {named.texts['a']}", f"Bearer {named.texts['a']}0"):
            assert complete(http, {"authorization": wrong}).status_code == 401
        assert http.get("/health").status_code == 200
        named.ring.replace({})
        assert complete(http, named.headers("a")).status_code == 401


def test_keys_without_names_work_beside_it(named: Named) -> None:
    named.add("a")
    with client(named, api={"old": 5}, admin=frozenset({"boss"}), secret="fleet") as http:
        for key in ("old", "boss", "fleet"):
            answer = complete(http, {"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in answer.headers)
            assert http.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "metrics", "program"), [("plain", 403, 403), ("ops", 200, 200), ("gone", 401, 401)]
)
def test_which_paths_a_key_with_a_name_opens(named: Named, name: str, metrics: int, program: int) -> None:
    named.date = 10.0
    named.add("plain")
    named.add("ops", admin=True)
    named.add("gone", admin=True, expires="1970-01-01T00:00:10Z")
    http = TestClient(administered(keys=Keys(ring=named.ring)).app, base_url="http://localhost")
    assert http.get("/admin/program").status_code == 401
    assert http.get("/metrics", headers=named.headers(name)).status_code == metrics
    assert http.get("/admin/program", headers=named.headers(name)).status_code == program
    assert http.get("/verbs/unit-0/load", headers=named.headers(name)).status_code == program
    assert http.get("/health", headers=named.headers(name)).status_code == 200


def test_without_an_admin_key_nobody_administers(named: Named) -> None:
    named.add("plain")
    http = TestClient(administered(keys=Keys(ring=named.ring)).app, client=("127.0.0.1", 5))
    for headers in ({}, named.headers("plain")):
        answer = http.get("/admin/units", headers=headers)
        assert answer.status_code == 403
        assert "none is set" in answer.json()["error"]["message"]


def test_an_expired_key_says_so_to_its_owner_alone(named: Named) -> None:
    named.add("a", expires="1970-01-01T00:01:00Z")
    with client(named) as http:
        named.date = 59.9
        assert complete(http, named.headers("a")).status_code == 200
        named.date = 60.0
        answer = complete(http, named.headers("a"))
        assert answer.status_code == 401
        assert answer.json()["error"]["message"] == "the key of a has expired"
        guessed = complete(http, {"authorization": named.headers("a")["authorization"][:-1] + "x"})
        assert guessed.json()["error"]["message"].startswith("the API key is wrong")
        assert named.ring.tenants["a"].counts.refusals == {"expired": 1}


def test_other_models_are_as_none(named: Named) -> None:
    engine = ScriptedEngine(says(ANSWER), cards=[card(), card("secret"), card("third")])
    named.add("some", models=["tiny", "third"])
    named.add("all")
    with client(named, engine) as http:
        unknown, forbidden = (
            complete(http, named.headers("some"), model=name) for name in ("nothing", "secret")
        )
        assert (unknown.status_code, forbidden.status_code) == (404, 404)
        refused = http.post("/v1/completions", json={"model": "secret"}, headers=named.headers("some"))
        tagged = http.post(
            "/api/chat", json={"model": "tiny:latest", "messages": 1}, headers=named.headers("some")
        )
        assert refused.status_code == tagged.status_code == 400
        named.add("ops", admin=True)
        counted = http.get("/metrics", headers=named.headers("ops")).text
        for model in ("unknown", "tiny"):
            assert f'kvloom_requests_total{{model="{model}",status="400"}} 1.0' in counted
        assert forbidden.text.replace("secret", "nothing") == unknown.text
        assert "served: third, tiny" in unknown.text
        assert complete(http, named.headers("some")).status_code == 200
        assert complete(http, named.headers("all"), model="secret").status_code == 200
        for name, seen in (("some", {"tiny", "third"}), ("all", {"tiny", "third", "secret"})):
            listed = http.get("/v1/models", headers=named.headers(name)).json()["data"]
            assert {one["id"] for one in listed} == seen
            answer = http.get("/v1/models/secret", headers=named.headers(name))
            assert answer.status_code == (200 if name == "all" else 404)


def test_a_key_gives_its_priority(named: Named) -> None:
    engine = ScriptedEngine(says(ANSWER))
    named.add("slow", priority=0)
    with client(named, engine) as http:
        for asked in (None, -5, 3):
            assert complete(http, named.headers("slow"), priority=asked).status_code == 200
    assert [one.priority for one in engine.bodies] == [0, 0, 3]


def test_requests_a_minute(named: Named) -> None:
    named.add("a", requests_per_minute=3)
    named.add("b", requests_per_minute=3)
    with client(named) as http:
        assert [left(complete(http, named.headers("a")))[0] for _ in range(3)] == [2, 1, 0]
        refused = complete(http, named.headers("a"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "20"
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert "x-ratelimit-limit-tokens" not in refused.headers
        assert complete(http, named.headers("b")).status_code == 200
        named.now += 19.9
        assert complete(http, named.headers("a")).status_code == 429
        named.now += 0.1
        assert complete(http, named.headers("a")).status_code == 200
        assert http.get("/v1/models", headers=named.headers("a")).status_code == 200
        assert http.get("/v1/completions", headers=named.headers("a")).status_code == 405
        named.change("a", requests_per_minute=4)
        assert left(complete(http, named.headers("a"))) == (0, None)


def test_tokens_a_minute(named: Named) -> None:
    named.add("a", tokens_per_minute=60)
    with client(named) as http:
        assert left(complete(http, named.headers("a"))) == (None, 60 - 3 - OUTPUT)
        # what was taken off and not made comes back
        short = complete(http, named.headers("a"), max_tokens=30, prompt=[5], stop="hell")
        total = short.json()["usage"]["total_tokens"]
        assert total < 30
        named.now += total - 6
        assert left(short) == (None, 45 - total)
        refused = complete(http, named.headers("a"), max_tokens=40)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (left(refused), refused.headers["retry-after"]) == ((None, 39), "4")
        assert refused.headers["x-ratelimit-reset-tokens"] == "21s"
        named.now += 4
        assert complete(http, named.headers("a"), max_tokens=40).status_code == 200
        named.now += 60
        assert left(complete(http, named.headers("a"), n=3, prompt=[PROMPT, PROMPT], max_tokens=9)) == (
            None,
            0,
        )
        assert complete(http, named.headers("a"), max_tokens=1).status_code == 429


def test_a_request_that_asks_for_more_than_all_is_told_so(named: Named) -> None:
    named.add("a", tokens_per_minute=60)
    with client(named) as http:
        refused = complete(http, named.headers("a"), max_tokens=58)
        assert refused.status_code == 429
        assert "asks for 61 tokens, and a may use 60 a minute" in refused.json()["error"]["message"]
        assert left(refused) == (None, 60)
        assert "retry-after" not in refused.headers
        assert named.ring.tenants["a"].counts.refusals == {"tokens": 1}


def test_the_official_client_does_not_retry_what_never_passes(named: Named) -> None:
    named.add("a", tokens_per_minute=60)
    with serving(create_app(ScriptedEngine(says(ANSWER)), keys=Keys(ring=named.ring))) as url:
        ask = openai.OpenAI(base_url=f"{url}/v1", api_key=named.texts["a"], max_retries=2)
        with pytest.raises(openai.RateLimitError):
            ask.completions.create(model="tiny", prompt=PROMPT, max_tokens=58)
    assert named.ring.tenants["a"].counts.refusals == {"tokens": 1}


def test_what_is_made_beyond_is_a_debt(named: Named) -> None:
    """A chat that names no `max_tokens` may have the whole context."""
    engine = ScriptedEngine(lambda *_: [6] * 400)
    named.add("a", tokens_per_minute=100)
    with client(named, engine) as http:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json=ask, headers=named.headers("a"))
        used = answer.json()["usage"]["total_tokens"]
        assert used > 300
        assert left(answer) == (None, 0)
        refused = http.post("/v1/chat/completions", json=ask, headers=named.headers("a"))
        assert refused.status_code == 429
        named.now += (used - 99) * 0.6 - 0.1
        assert complete(http, named.headers("a"), prompt=[5], max_tokens=1).status_code == 429
        named.now += 0.7
        assert complete(http, named.headers("a"), prompt=[5], max_tokens=1).status_code == 200


def test_errors_tell_what_is_left_and_keep_the_prompt(named: Named) -> None:
    engine = ScriptedEngine(says(ANSWER), error=Unavailable("away"))
    named.add("a", tokens_per_minute=60, requests_per_minute=9)
    with client(named, engine) as http:
        answer = complete(http, named.headers("a"))
        assert (answer.status_code, left(answer)) == (503, (8, 45))
        answer = complete(http, named.headers("a"), model="nothing")
        assert (answer.status_code, left(answer)) == (404, (7, 57))


def test_which_answers_tell_what_is_left(named: Named) -> None:
    """Those that are given once the key was looked up, whatever they say."""
    engine = ScriptedEngine(says(ANSWER))
    named.add("a", requests_per_minute=100, expires="1970-01-01T00:01:00Z")
    app = create_app(engine, keys=Keys(ring=named.ring), max_body=4000)
    with TestClient(app, raise_server_exceptions=False) as http:
        headers = named.headers("a")

        def post(**asked: Any) -> Any:
            return http.post("/v1/completions", **{"headers": headers} | asked)

        plain = headers | {"content-type": "text/plain"}
        for status, answer in (
            (200, complete(http, headers)),
            (400, complete(http, headers, n=0)),
            (404, complete(http, headers, model="nothing")),
            (413, post(content=iter([b" " * 4001]))),  # in chunks, which say no length
            (415, post(content=b"{}", headers=plain)),
        ):
            assert (answer.status_code, left(answer)[0] is not None) == (status, True)
        named.change("a", concurrency=0)
        answer = complete(http, headers)
        assert (answer.status_code, left(answer)) == (429, (95, None))
        named.change("a", concurrency=None)

        engine.error = RuntimeError("a fault")  # type: ignore[assignment]
        unheard = [(500, complete(http, headers)), (413, post(content=b" " * 4001))]
        unheard += [(405, http.get("/v1/completions", headers=headers))]
        named.date = 60.0
        unheard += [(401, complete(http, headers))]
        for status, answer in unheard:
            assert (answer.status_code, left(answer)) == (status, (None, None))


def test_a_stream_tells_its_limits_with_its_head(named: Named) -> None:
    named.add("a", tokens_per_minute=60)
    with client(named) as http:
        answer = complete(http, named.headers("a"), stream=True)
        assert (answer.status_code, left(answer)) == (200, (None, 60 - 3 - OUTPUT))
        assert answer.text.endswith("[DONE]\n\n")


def test_concurrency_is_given_back_when_a_client_hangs_up(named: Named) -> None:
    engine = ScriptedEngine(says(ANSWER), hold=2)
    named.add("a", concurrency=1, tokens_per_minute=100)
    app = create_app(engine, keys=Keys(ring=named.ring))
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50, "stream": True}
    with (
        serving(app) as url,
        httpx.Client(base_url=url, headers=named.headers("a"), timeout=DEADLINE) as http,
    ):
        for _ in range(3):
            engine.held.clear()
            engine.gone.clear()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                assert engine.held.wait(DEADLINE)
                refused = http.post("/v1/completions", json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert "a has 1 request under way; 1 at once is right" in refused.text
            assert engine.gone.wait(DEADLINE)
            engine.hold = None
            assert soon_allowed(http, body).status_code == 200
            engine.hold = 2
    counts = named.ring.tenants["a"].counts
    assert counts.refusals["concurrency"] >= 3


def soon_allowed(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """The engine hears of the end a moment before the request has ended."""
    for _ in range(1000):
        answer = http.post("/v1/completions", json=body)
        if answer.status_code != 429:
            break
    return answer


@contextmanager
def official(named: Named, engine: ScriptedEngine, name: str) -> Iterator[openai.OpenAI]:
    app = create_app(engine, keys=Keys(ring=named.ring))
    with (
        serving(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=named.texts[name], max_retries=0) as made,
    ):
        yield made


def test_the_official_client_understands(named: Named) -> None:
    named.add("a", requests_per_minute=1, tokens_per_minute=600)
    named.add("gone", expires="1969-01-01")
    with official(named, ScriptedEngine(says(ANSWER)), "a") as made:
        ask: Any = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
        raw = made.completions.with_raw_response.create(**ask)
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        assert raw.headers["x-ratelimit-limit-tokens"] == "600"
        assert re.fullmatch(r"\d+ms|\d+s", raw.headers["x-ratelimit-reset-tokens"])
        with pytest.raises(openai.RateLimitError) as error:
            made.completions.create(**ask)
        assert error.value.code == "rate_limit_exceeded"
        assert error.value.type == "rate_limit_error"
        with pytest.raises(openai.AuthenticationError, match="has expired"):
            made.with_options(api_key=named.texts["gone"]).models.list()


@pytest.mark.parametrize(
    ("share", "named_salt", "named_cached", "old_salted"),
    [("auto", "a", 2, False), ("key", "a", 2, True), ("all", "", 0, False)],
)
def test_for_whom_engines_are_asked(
    named: Named, share: Any, named_salt: str, named_cached: int, old_salted: bool
) -> None:
    engine = ScriptedEngine(says(ANSWER))
    named.add("a")
    with client(named, engine, api={"old": None, "older": None}, share=share) as http:
        answers = [complete(http, named.headers("a")) for _ in range(2)]
        answers += [complete(http, {"authorization": f"Bearer {key}"}) for key in ("old", "old", "older")]
    first, second, old, again, older = engine.bodies
    assert (first.tenant, first.salt) == (second.tenant, second.salt) == ("a", named_salt)
    assert old.tenant == again.tenant != older.tenant
    assert "old" not in old.tenant
    assert old.tenant.startswith("#")
    assert [one.salt for one in (old, again, older)] == (
        [old.tenant, old.tenant, older.tenant] if old_salted else [""] * 3
    )
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached == [named_cached] * 2 + [2] * 3


@pytest.mark.parametrize(
    ("address", "tenant"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
        (None, ""),
    ],
)
@pytest.mark.parametrize("share", ["auto", "key", "all"])
def test_without_keys_a_tenant_is_an_address(address: str | None, tenant: str, share: Any) -> None:
    engine = ScriptedEngine(says(ANSWER))
    app = create_app(engine, keys=Keys(share=share))
    http = TestClient(app, client=None if address is None else (address, 5))  # type: ignore[arg-type]
    with http:
        answer = complete(http)
    assert (engine.bodies[0].tenant, engine.bodies[0].salt) == (tenant, "")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_metrics_have_the_names_of_the_file_alone(named: Named) -> None:
    named.add("a", tokens_per_minute=60)
    named.add("b", requests_per_minute=1)
    named.add("ops", admin=True)
    with client(named) as http:
        complete(http, named.headers("a"), n=2)
        complete(http, named.headers("a"), max_tokens=59)
        complete(http, {"authorization": "Bearer kvl-stranger-0"})
        complete(http, named.headers("b"), max_tokens=1)
        complete(http, named.headers("b"))
        assert told(http, named) == {
            'kvloom_key_requests_total{key="a"}': 2,
            'kvloom_key_requests_total{key="b"}': 1,
            'kvloom_key_requests_total{key="ops"}': 0,
            'kvloom_key_prompt_tokens_total{key="a"}': 3,
            'kvloom_key_prompt_tokens_total{key="b"}': 3,
            'kvloom_key_prompt_tokens_total{key="ops"}': 0,
            'kvloom_key_output_tokens_total{key="a"}': 2 * OUTPUT,
            'kvloom_key_output_tokens_total{key="b"}': 1,
            'kvloom_key_output_tokens_total{key="ops"}': 0,
            'kvloom_key_refusals_total{key="a",limit="tokens"}': 1,
            'kvloom_key_refusals_total{key="b",limit="requests"}': 1,
        }
        del named.keys["b"]
        named.ring.replace(named.keys)
        assert not any('"b"' in line for line in told(http, named))


def told(http: TestClient, named: Named) -> dict[str, float]:
    text = http.get("/metrics", headers=named.headers("ops")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("kvloom_key_"))
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0ms"),
        (0.0191, "20ms"),
        (0.99, "990ms"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (7261, "2h1m1s"),
    ],
)
def test_times_are_shown_as_openai_shows_them(seconds: float, shown: str) -> None:
    assert show_span(seconds) == shown


@UNTIMED
@given(
    limit=st.integers(1, 50),
    asks=st.lists(st.tuples(st.floats(0, 40), st.integers(1, 50)), max_size=40),
)
def test_no_minute_has_more_than_twice_the_limit(limit: int, asks: list[tuple[float, int]]) -> None:
    """A full bucket and what has come back; and who waits as long as it is told gets through."""
    bucket, now, taken = Bucket(), 0.0, list[tuple[float, int]]()
    for pause, ask in asks:
        now += pause
        more = min(ask, limit)
        if wait := bucket.wait(limit, more, now):
            assert 0 < wait <= 60.001
            now += wait
            assert bucket.wait(limit, more, now) == 0
        bucket.used += more
        taken.append((now, more))
        since = [(at, count) for at, count in taken if at > now - 60]
        span = now - since[0][0]
        assert sum(count for _, count in since) <= limit * (1 + span / 60) + 1e-6


def test_a_refused_request_holds_nothing(named: Named) -> None:
    named.add("a", concurrency=1, requests_per_minute=2, tokens_per_minute=5)
    tenant = named.ring.tenants["a"]
    for _ in range(3):
        grant = tenant.begin()
        with pytest.raises(RateLimited):
            tenant.begin()
        with pytest.raises(RateLimited):
            grant.reserve(4, 2)
        grant.end()
        named.now += 60
    assert dict(tenant.headers())[b"x-ratelimit-remaining-tokens"] == b"5"

"""The files of the page, as a gateway serves them."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.page import served_files
from tests.api.scripted import ScriptedEngine

MOST_BYTES = 200_000


@pytest.fixture
def client() -> TestClient:
    app = create_app(
        ScriptedEngine(lambda body, choice: []),
        keys=Keys(api={"a-key": None}, admin=frozenset({"an-admin-key"})),
    )
    return TestClient(app)


def test_the_page_and_its_parts_need_no_key_and_may_do_little(client: TestClient) -> None:
    text = client.get("/").text
    parts = re.findall(r'(?:src|href)="(/[^"]+)"', text)
    assert len(parts) == 4
    for path in ["/", *parts]:
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
        )
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<style|<script>| style=| on\w+=", text)


@pytest.mark.parametrize("path", ["/page/", "/page/no.js", "/page/../auth.py", "/page/index.html"])
def test_nothing_else_is_there(client: TestClient, path: str) -> None:
    assert client.get(path).status_code in (401, 404)


def test_the_page_is_small() -> None:
    assert sum(len(content) for content, _ in served_files().values()) <= MOST_BYTES

"""The files of the page, as a gateway serves them."""

from __future__ import annotations

import re
from itertools import combinations
from math import dist
from operator import mul

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.page import served_files
from kvloom.router.programs import PROGRAMS
from tests.api.scripted import ScriptedEngine

MOST_BYTES = 200_000
MODELS = 24  # that have colours of their own
COLOUR = re.compile(r"--([\w-]+):(#[0-9a-f]{6}|#[0-9a-f]{3})(?=[;}]|$)")
WEIGHTS = (0.2126, 0.7152, 0.0722)
CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


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


def test_the_page_offers_the_programs_that_there_are() -> None:
    [listed] = re.findall(r"^const PROGRAMS = \[(.*)\];$", served_files()["fleet.js"][0].decode(), re.M)
    assert re.findall(r'"(\w+)"', listed) == list(PROGRAMS)


def linear(colour: str) -> list[float]:
    """Red, green and blue of `#rrggbb`, as light adds up."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """That of WCAG 2."""
    pale, dark = sorted((sum(map(mul, WEIGHTS, linear(each))) for each in (one, other)), reverse=True)
    return float((pale + 0.05) / (dark + 0.05))


def seen_as(colour: str) -> list[float]:
    """The colour in OKLab, where distances are as eyes have them."""
    cones = [sum(map(mul, row, linear(colour))) ** (1 / 3) for row in CONES]
    return [sum(map(mul, row, cones)) for row in LAB]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_models_have_colours_that_can_be_told_apart(scheme: int) -> None:
    style = served_files()["page.css"][0].decode()
    root = re.findall(r":root\{(.*?)\}", style, re.S)[scheme]
    named = {name: re.sub(r"^#(.)(.)(.)$", r"#\1\1\2\2\3\3", value) for name, value in COLOUR.findall(root)}
    names = [f"c{number}" for number in range(MODELS)]
    models = [named[name] for name in names]
    [count] = re.findall(r"^const COLOURS = (\d+);", served_files()["store.js"][0].decode(), re.M)
    assert [name for name in named if re.fullmatch(r"c\d+", name)] == [
        f"c{number}" for number in range(MODELS)
    ]
    assert int(count) == MODELS
    for ground in ("ground", "card", "wash"):
        assert [one for one in models if contrast(one, named[ground]) < 3] == []  # AA of what is no text
    for one, other in combinations(models, 2):
        assert dist(seen_as(one), seen_as(other)) > 0.09, (one, other)

"""Reports: files that load nothing, in which names are text, and that a small screen shows whole."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from kvloom.page.report import Bar, Card, Grid, Pair, Part, report_page
from tests.page.browser import Scheme, overflow, shown

HOSTILE = "<script>alert(1)</script>&\"'"
LONG = "a-name-without-an-end-" * 8
BARS = [
    Bar(HOSTILE, [Part(30, 0, said=HOSTILE), Part(20, 9, pale=True), Part(5, None)], "55 of 100", 100, 0),
    Bar(LONG, [Part(500, 1)], "too much", 100),
    Bar("nothing", [Part(0, 1)], "0 of 0", 0),
]
CARDS = [
    Card(
        HOSTILE, "said", [BARS, [Pair(HOSTILE, 5.0, 10.0, "5 told", 10.0), Pair("b", None, 1.0, "1", 10.0)]]
    ),
    Card("table", "", [Grid(("a", HOSTILE), [(HOSTILE, str(n)) for n in range(20)], right=(1,))]),
]


def report() -> str:
    return report_page(HOSTILE, HOSTILE, CARDS)


def test_names_are_text_and_nothing_is_loaded() -> None:
    text = report()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 20
    assert not re.search(r"(src|href|style)=|url\(|@import", text)


def test_its_policy_lets_its_own_style_be_and_nothing_else() -> None:
    text = report()
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'" in text


def test_parts_follow_one_another_within_the_bar() -> None:
    drawn = re.findall(r'<rect class="([^"]+)" x="([\d.]+)" width="([\d.]+)"', report())
    assert drawn == [
        ("c0", "0.0", "300.0"),
        ("c1 pale", "300.0", "200.0"),
        ("back", "500.0", "50.0"),
        ("c1", "0.0", "1000.0"),
        ("c1", "0", "0"),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_whole(browser: Browser, tmp_path: Path, width: int, scheme: Scheme) -> None:
    file = tmp_path / "report.html"
    file.write_text(report())
    with shown(browser, file.as_uri(), width=width, scheme=scheme) as (page, seen):
        drawn, window = overflow(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert page.title() == HOSTILE
    assert drawn <= window
    assert ground == {"light": "rgb(251, 251, 252)", "dark": "rgb(19, 20, 24)"}[scheme]
    assert [request.url for request in seen.requests] == [file.as_uri()]
    assert seen.complaints == []

"""The page of a served fleet, in a real browser: its numbers, its story, its chat box, and who can use it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections import defaultdict
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.page.browser import Scheme, jumps, overflow, poor_contrasts, shown
from tests.page.conftest import KEY, Served
from tests.processes import DEADLINE
from tests.serve.streaming import asking, call

HOSTILE = "<img src=x onerror=document.title='taken'>"


def metrics(url: str) -> dict[str, float]:
    """What /metrics has, by name, unit and model; what a model has at several units is added up, too."""
    with urllib.request.urlopen(asking(url, "/metrics", key=KEY), timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(kvloom_\w+)\{(.*)\} (\S+)$", text, re.M):
        by = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if "model" in by and "le" not in by:
            found[f"{name} {by['model']}"] += float(value)
            if "unit" in by:
                found[f"{name} {by['unit']} {by['model']}"] = float(value)
        elif "unit" in by and "state" not in by:
            found[f"{name} {by['unit']}"] = float(value)
    return dict(found)


DRAWN = """
() => {
  const cells = [...document.querySelectorAll("[data-metric]")].map(({ dataset }) =>
    [[dataset.metric, dataset.unit, dataset.model].filter(Boolean).join(" "), Number(dataset.value)]);
  const pools = [...document.querySelectorAll("figure.pool")].flatMap(({ dataset }) => [
    [`kvloom_kv_blocks ${dataset.unit}`, Number(dataset.blocks)],
    [`kvloom_kv_blocks_free ${dataset.unit}`, Number(dataset.free)],
    [`kvloom_kv_blocks_lent ${dataset.unit}`, Number(dataset.lent)],
    [`kvloom_kv_block_bytes ${dataset.unit}`, Number(dataset.blockBytes)],
  ]);
  return Object.fromEntries([...cells, ...pools]);
}
"""

TEXTS = """
() => [...document.querySelectorAll("[data-metric]")].map((cell) => {
  const pool = cell.closest("figure.pool");
  return [cell.textContent, Number(cell.dataset.value) * (pool ? Number(pool.dataset.blockBytes) : 1)];
})
"""

UNITS = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS |= {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def read(text: str) -> float:
    """The number that a text with a unit means."""
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * UNITS[unit]


EQUAL = f"""
new Promise((done, fail) => {{
  const until = performance.now() + {1000 * DEADLINE};
  const look = () => {{
    const drawn = ({DRAWN})();
    if (Object.keys(expected).every((name) => drawn[name] === expected[name])) done();
    else if (performance.now() > until) fail(new Error(JSON.stringify(drawn)));
    else requestAnimationFrame(look);
  }};
  look();
}})
"""


# A unit reports what it keeps a moment after a request's last token.
SETTLED = f"""
() => {{
  const drawn = Object.entries(({DRAWN})());
  const sum = (start) =>
    drawn.filter(([name]) => name.startsWith(start)).reduce((all, [, value]) => all + value, 0);
  const cached = (who) => sum("kvloom_kv_blocks_cached " + who);
  const sums = cached("unit-0 sums") + cached("unit-1 sums");
  return sums > 0 && cached("unit-2 plain") > 0 && sum("kvloom_kv_blocks_used ") === 0;
}}
"""


def ask(page: Page, model: str, prompt: str) -> None:
    page.get_by_role("radio", name=model, exact=True).check(force=True)
    page.get_by_label("Your question").fill(prompt)
    page.get_by_role("button", name="Ask", exact=True).click()


def test_numbers_drawn_are_those_of_metrics(browser: Browser, served: Served) -> None:
    for model in ("sums", "plain"):
        call(served.url, "/v1/completions", {"model": model, "prompt": "1 2 3", "max_tokens": 9})
    with shown(browser, served.url, key=KEY) as (page, seen):
        page.wait_for_function(SETTLED, timeout=1000 * DEADLINE)
        told = metrics(served.url)
        names = set(page.evaluate(DRAWN))
        assert len(names) >= 3 * 4 + 3 * 5 + 2 * 6
        expected = {name: told.get(name, 0.0) for name in names}
        assert expected["kvloom_kv_blocks_cached unit-2 plain"] > 0
        assert expected["kvloom_requests_total sums"] >= 1
        page.evaluate(f"(expected) => {EQUAL}", expected)
        for text, value in page.evaluate(TEXTS):
            assert read(text) == pytest.approx(value, rel=5e-3), (text, value)  # three digits are shown
        assert seen.complaints == []
        for request in seen.requests:
            assert request.url.startswith((served.url + "/", "data:,")), request.url
            assert KEY not in request.url
            assert not request.headers.get("referer")
        assert {request.headers.get("authorization") for request in seen.requests if "/admin" in request.url}


def test_the_chat_box_answers_and_draws_the_requests_life(browser: Browser, served: Served) -> None:
    with shown(browser, served.url, key=KEY) as (page, seen):
        page.get_by_text("Parameters").click()
        page.get_by_label("temperature").fill("0")
        ask(page, "sums", "What is 17 + 25?")
        expect(page.locator("#chat-talk .answer")).to_have_text("17 + 25 = 42.")
        life = page.locator("#chat-life")
        expect(life).to_have_attribute("data-state", "ended")
        expect(life.locator("[data-phase=decode]")).to_have_count(1)
        expect(life.locator("li", has_text="first token")).to_have_count(1)
        expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()

        request = life.get_attribute("data-request")
        assert request is not None
        page.get_by_label("A request's id").fill(request)
        page.get_by_role("button", name="Show", exact=True).click()
        expect(page.locator("#life")).to_have_attribute("data-request", request)
        assert seen.complaints == []

        seeded = []
        page.get_by_label("seed").fill("7")
        page.get_by_label("max_tokens").fill("5")
        for _ in range(2):
            ask(page, "plain", "again")
            expect(page.locator("#chat-send")).to_have_text("Ask")
            seeded.append(page.locator("#chat-talk .answer").last.inner_text())
        assert seeded[0] == seeded[1] != ""
        assert [one for one in seen.complaints if "400" not in one] == []  # that it has no template


def test_a_killed_engine_is_told_in_its_lane_with_reasons(browser: Browser, served: Served) -> None:
    with shown(browser, served.url, key=KEY) as (page, seen):
        lane = page.locator(".lane[data-component=unit-1]")
        expect(lane).to_have_attribute("data-state", "up")
        os.kill(served.fleet.children()["unit-1"], signal.SIGKILL)
        logged = page.locator("#log li[data-component=unit-1]")
        expect(logged.filter(has_text="SIGKILL").first).to_have_attribute("data-type", "died")
        expect(logged.first).to_have_attribute("data-type", "ready")
        expect(lane).to_have_attribute("data-state", "up")
        mark = lane.locator("button[data-types*=died]")
        mark.focus()
        expect(page.get_by_role("tooltip")).to_contain_text("SIGKILL")
        assert "SIGKILL" in (mark.get_attribute("aria-label") or "")
        page.keyboard.press("ArrowLeft")
        expect(mark).not_to_be_focused()
        expect(lane.locator("button:focus")).to_have_count(1)
        assert seen.complaints == []


def test_an_order_shows_its_command_and_is_carried_out(browser: Browser, served: Served) -> None:
    with shown(browser, served.url, key=KEY) as (page, seen):
        for verb, state in (("drain", "drained"), ("admit", "up")):
            page.get_by_role("button", name=f"{verb} unit-0").click()
            command = page.locator("#order-command").inner_text()
            assert command == f"kvloom unit {verb} unit-0 --url {served.url} --admin-key-file FILE"
            page.get_by_role("button", name="Do it").click()
            expect(page.locator("#order")).to_be_hidden()
            expect(page.locator("#units tr[data-unit=unit-0] td").first).to_have_text(state)
            expect(page.locator("#log li[data-component=unit-0]").first).to_contain_text("ordered")
        page.locator("#set-program [name=program]").fill("least_loaded")
        page.get_by_role("button", name="Set", exact=True).click()
        assert "kvloom program set least_loaded" in page.locator("#order-command").inner_text()
        page.get_by_role("button", name="Do it").click()
        expect(page.locator("#program-now")).to_contain_text("least_loaded")
        expect(page.locator("#log li[data-type=program]").first).to_contain_text("program least_loaded")
        assert seen.complaints == []


def test_without_a_key_the_page_asks_for_one(browser: Browser, served: Served) -> None:
    with shown(browser, served.url) as (page, _):
        expect(page.locator("#link")).to_have_text("an admin key shows the fleet")
        expect(page.get_by_role("radio")).to_have_count(2)  # who has no key may chat here
        page.get_by_role("button", name="Key", exact=True).click()
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("figure.pool")).to_have_count(3)


@pytest.mark.parametrize(("width", "height"), [(400, 800), (1280, 900), (3840, 2160)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_size_and_scheme(
    browser: Browser, served: Served, width: int, height: int, scheme: Scheme
) -> None:
    with shown(browser, served.url, key=KEY, width=width, height=height, scheme=scheme) as (page, seen):
        page.wait_for_selector("#log li")
        page.wait_for_selector("[data-metric]")
        page.wait_for_selector("#models tr")
        assert not jumps(page)
        page.get_by_text("Parameters").click()
        drawn, window = overflow(page)
        assert drawn <= window
        assert poor_contrasts(page) == []
        page.get_by_role("button", name="drain unit-0").click()
        assert poor_contrasts(page) == []
        assert seen.complaints == []


def test_everything_is_reached_by_keyboard(browser: Browser, served: Served) -> None:
    with shown(browser, served.url, key=KEY) as (page, _):
        page.wait_for_selector("#log li")
        page.wait_for_selector("#models tr")
        reached = set()
        for _ in range(80):
            page.keyboard.press("Tab")
            what, outlined = page.evaluate(
                "() => { const at = document.activeElement; const ring = at.closest('label.choice') ?? at;"
                " return [at.id || at.getAttribute('aria-label') || at.name || at.className,"
                " getComputedStyle(ring).outlineStyle] }"
            )
            if what:
                assert outlined != "none", what
            reached.add("mark" if "\n" in what or " unit-2 " in what else what)
            page.keyboard.press("Escape")
        wanted = {
            "span",
            "key-open",
            "model",
            "chat-talk",
            "chat-prompt",
            "chat-send",
            "chat-anew",
            "life-id",
        }
        assert wanted | {"log", "drain unit-0", "restart unit-2", "remove sums", "program"} <= reached
        assert page.locator("button.mark[tabindex='0']").count() >= 3


def test_what_has_a_name_that_is_markup_is_text(browser: Browser, served: Served) -> None:
    model = {
        "model": HOSTILE, "waiting": 1, "oldest": 2.0, "running": 3, "used": 4, "cached": 5, "pinned": 0,
        "quota": 6, "weights": 0, "awake": True, "away": 0, "prompt_tokens": 7, "cached_tokens": 8,
        "output_tokens": 9, "preemptions": 0,
    }  # fmt: skip
    unit = {"unit": HOSTILE, "state": "up", "node": HOSTILE, "blocks": 64, "free": 55, "lent": 0}
    unit |= {"block_bytes": 4096, "models": [model], "waves": [{"peer": HOSTILE, "wait_seconds": 0.5}]}
    sample = {"at": 1.0, "units": [unit], "models": []}
    event = {"type": "preempted", "model": HOSTILE, "request": HOSTILE, "reason": HOSTILE}
    record = {"journal": 1, "number": 1, "at": 1.0, "component": HOSTILE, "event": event}
    answers: dict[str, Any] = {
        "live": ("text/event-stream", f"event: sample\ndata: {json.dumps(sample)}\n\n"),
        "events": ("text/event-stream", f"event: preempted\ndata: {json.dumps(record)}\n\n"),
        "models": (
            "application/json",
            json.dumps([{"name": HOSTILE, "path": HOSTILE, "units": {HOSTILE: HOSTILE}}]),
        ),
        "program": ("application/json", json.dumps({"name": HOSTILE, "options": {HOSTILE: HOSTILE}})),
    }

    def lie(page: Page) -> None:
        def answer(route: Route) -> None:
            media, body = answers[route.request.url.rsplit("/", 1)[1]]
            route.fulfill(content_type=media, body=body)

        page.route(re.compile("/admin/(live|events|models|program)$"), answer)

    with shown(browser, served.url, key=KEY, before=lie) as (page, seen):
        expect(page.locator("#units th")).to_have_text(HOSTILE)
        expect(page.locator("#models td").first).to_have_text(HOSTILE)
        expect(page.locator("#log li")).to_contain_text(HOSTILE)
        expect(page.locator("#flow-table th span").first).to_have_text(HOSTILE)
        expect(page.locator(".lane-name")).to_contain_text(HOSTILE)
        mark = page.locator("button.mark").first
        expect(mark).to_be_visible()
        mark.focus()
        expect(page.get_by_role("tooltip")).to_contain_text(HOSTILE)
        page.get_by_label("A request's id").fill(HOSTILE)
        page.get_by_role("button", name="Show", exact=True).click()
        expect(page.locator("#life .life-said")).to_contain_text("<img")
        assert page.locator("img").count() == 0
        assert page.title() == "kvloom"
        assert [one for one in seen.complaints if "404" not in one] == []

"""A story on a real fleet, as the page tells it: units weave, a pool fills, a model is woken, a stream moves,
and an engine is killed. How late an event is shown is told by the clock that all processes share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.checkpoints import make_checkpoint
from tests.page.browser import shown
from tests.page.conftest import Served
from tests.processes import DEADLINE
from tests.serve.streaming import call, said, serving
from tests.serve.test_journal_live import followed
from tests.serve.test_rescheduling_live import MOST, Stream, home

CONFIG = """
block_bytes: 4KiB
threads: 1
sleep_dir: {folder}
rescheduling: {{period: 100ms}}
models: {{llama: {llama}, a: {a}, b: {b}}}
units: [{{models: [llama], replicas: 2, kv_memory: 64MiB}}, {{models: [a, b], memory: 12MiB}}]
weave: [{{hot: unit-0, cold: unit-1, share: 0.5, part: 0.2}}]
"""
SOON = 1.0  # seconds
ROOM = 29.0  # seconds more for single events, where more wants to run than can
AT_ONCE = 24  # streams of model a; a third of them is what its pool holds
TOKENS = 200
WATCHING = """
addEventListener("DOMContentLoaded", () => {
  window.told = [];
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) for (const { dataset, textContent } of addedNodes) {
      const at = Number(dataset.at);
      told.push({ ...dataset, at, text: textContent, late: Date.now() / 1000 - at });
    }
  }).observe(document.getElementById("log"), { childList: true });
});
"""
TOLD = """
([component, type, since]) =>
  told.find((one) => one.at > since && one.component === component && one.type === type)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two units of one model, of which the first borrows from the second, and one of two models that has
    memory for one."""
    folder: Path = tmp_path_factory.mktemp("story")
    llama = make_checkpoint(folder / "llama", "llama", max_position_embeddings=2 * MOST)
    a = make_checkpoint(folder / "a", "llama", hidden_size=256, intermediate_size=512)
    b = make_checkpoint(folder / "b", "qwen3", hidden_size=256, intermediate_size=512)
    with serving(folder, CONFIG.format(folder=folder, llama=llama, a=a, b=b)) as (running, url):
        yield Served(running, url)


@dataclass
class Told:
    """What the page's list of events has told since it was opened, whatever stands there now."""

    page: Page
    since: float = 0.0

    def waits_for(self, component: str, kind: str) -> dict[str, Any]:
        """The first such event since the chapter has begun, once it is on the page."""
        found = self.page.wait_for_function(TOLD, arg=[component, kind, self.since])
        event: dict[str, Any] = found.json_value()
        return event

    def begin_chapter(self) -> None:
        self.since = self.page.evaluate("Math.max(...told.map((one) => one.at))")

    def reason_in_lane(self, component: str, kind: str) -> str:
        """What is said where one points at the last mark of such events in the component's lane."""
        mark = self.page.locator(f".lane[data-component='{component}'] button.mark[data-types~={kind}]").last
        mark.focus()
        return self.page.get_by_role("tooltip").inner_text()


def id_of(record: dict[str, Any]) -> str:
    return f"{record['journal']}-{record['number']}"


def test_the_page_tells_a_story_as_it_happens(browser: Browser, fleet: Served) -> None:
    url = fleet.url
    with (
        shown(browser, url, before=lambda page: page.add_init_script(WATCHING)) as (page, seen),
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        told = Told(page)
        for unit in ("unit-0", "unit-1", "unit-2"):
            told.waits_for(unit, "ready")

        assert "blocks of" in told.waits_for("unit-1", "lent")["text"]
        lender = page.locator("figure.pool[data-unit=unit-1] figcaption")
        expect(lender).to_contain_text("lent")
        began = page.evaluate("Number(document.body.dataset.at)")
        list(pool.map(lambda seed: said(url, "llama", seed, TOKENS), range(8)))
        expect(lender).to_contain_text("unit-0 waits")

        told.begin_chapter()
        filling = [pool.submit(said, url, "a", seed, TOKENS) for seed in range(AT_ONCE)]
        assert "gave way to" in told.waits_for("unit-2", "preempted")["text"]
        for one in filling:
            one.result(DEADLINE)
        expect(
            page.locator("#flow-table [data-metric=kvloom_preemptions_total][data-model=a]")
        ).not_to_have_text("0")

        said(url, "b", 7, TOKENS)
        assert "requests wait" in told.waits_for("unit-2", "woken")["text"]
        assert "nobody wants it" in told.waits_for("unit-2", "slept")["text"]
        told.waits_for("unit-2", "awake")
        expect(page.locator("[data-metric=kvloom_weights_blocks][data-model=a]")).to_have_text("asleep")

        told.begin_chapter()
        stream = Stream(url, pool)
        unit = home(url)
        assert call(url, f"/admin/units/{unit}/drain", {})["state"] == "drained"
        assert "ordered" in told.waits_for(unit, "draining")["text"]
        stream.more()
        elsewhere = home(url, but=unit)
        moved = told.waits_for("gateway/1", "moved")["text"]
        assert f"from {unit} to {elsewhere}: it drains" in moved
        call(url, f"/admin/units/{unit}/admit", {})
        told.waits_for(unit, "admitted")

        told.begin_chapter()
        os.kill(fleet.fleet.children()["unit-0"], signal.SIGKILL)
        assert "SIGKILL" in told.waits_for("unit-0", "died")["text"]
        assert "the borrower has left" in told.waits_for("unit-1", "returned")["text"]
        stream.more()
        stream.hang_up()
        told.waits_for("unit-0", "ready")
        last = told.waits_for("unit-1", "lent")

        for component, kind, reason in (
            ("unit-2", "preempted", "gave way to"),
            ("unit-2", "woken", "requests wait"),
            (unit, "moved", "it drains"),
            (elsewhere, "moved", "it drains"),
            ("unit-0", "died", "SIGKILL"),
            ("unit-1", "returned", "the borrower has left"),
        ):
            assert reason in told.reason_in_lane(component, kind)

        shown_by_id = {one["record"]: one for one in page.evaluate("told")}
        for record in followed(url, lambda record: id_of(record) == last["record"]):
            listed = shown_by_id.get(id_of(record))
            if listed is None:  # more than the 60 that the list has came between two looks
                continue
            assert listed["at"] == record["at"]
            assert record["event"].get("reason", "") in listed["text"]
        check_late([one["late"] for one in shown_by_id.values() if one["at"] > began])
        assert seen.complaints == []


def check_late(late: list[float]) -> None:
    """late: seconds from each event to when it was shown."""
    print(f"{len(late)} events: half within {median(late):.3f} s, the last after {max(late):.3f} s")
    assert median(late) <= SOON
    assert max(late) <= SOON + ROOM

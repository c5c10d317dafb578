"""The page of a recorded run, opened from a file: its slider, its player, and what it may load."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from kvloom.journal.records import Preempted, Record
from kvloom.journal.samples import ModelTotals, Sample, UnitModel, UnitSample
from kvloom.page import recorded_page
from tests.page.browser import Scheme, overflow, poor_contrasts, shown

TITLE = "</title><script>document.title='taken'</script>"
SAMPLES = 120


def sample(at: int) -> Sample:
    models = tuple(
        UnitModel(
            model=name, waiting=at % 5, oldest=float(at % 5), running=at % 7, used=4 * (at % 9), cached=at,
            pinned=2 * (at % 2), quota=96, weights=0, awake=True, away=0, prompt_tokens=30 * at,
            cached_tokens=10 * at, output_tokens=50 * at, preemptions=at // 40,
        )
        for name in ("chat", "</script><img src=x>")
    )  # fmt: skip
    units = tuple(
        UnitSample(
            unit=name, state="down" if at in range(50, 55) and name == "unit-1" else "up", node="",
            blocks=512, free=512 - sum(one.used + one.cached for one in models), lent=0, block_bytes=4096,
            models=models,
        )
        for name in ("unit-0", "unit-1")
    )  # fmt: skip
    totals = ModelTotals(model="chat", requests=at, ttft_sum=0.1 * at, ttft_count=at)
    return Sample(at=float(at), units=units, models=(totals,))


def record(number: int) -> Record:
    event = Preempted(model="chat", request=f"</script>{number}", reason=f"gave way, turn {number}")
    return Record(journal=0, number=number, at=10.0 * number, component="unit-0", event=event)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("recording") / "out.html"
    file.write_bytes(
        recorded_page(TITLE, [sample(at) for at in range(SAMPLES)], [record(i) for i in range(1, 12)])
    )
    return file.as_uri()


def test_a_recording_plays_with_a_slider_and_loads_nothing(browser: Browser, recording: str) -> None:
    with shown(browser, recording) as (page, seen):
        assert page.title() == TITLE
        slider, running = page.locator("#slider"), page.locator("[data-tile=running] dd")
        expect(running).to_have_attribute("data-value", "0")
        expect(page.locator("#log li")).to_have_count(0)
        slider.focus()
        page.keyboard.press("End")
        expect(running).to_have_attribute("data-value", str(2 * 2 * (119 % 7)))
        expect(page.locator("#log li")).to_have_count(11)
        slider.fill("53")
        expect(running).to_have_attribute("data-value", str(2 * 2 * (53 % 7)))
        expect(page.locator("#log li")).to_have_count(5)
        expect(page.locator("#moment")).to_have_text("0:53 of 1:59")
        expect(page.locator(".lane[data-component=unit-1]")).to_have_attribute("data-state", "down")
        page.locator("button.mark").first.focus()
        expect(page.get_by_role("tooltip")).to_contain_text("gave way, turn 1")
        page.locator("#speed").select_option("300")
        page.get_by_role("button", name="Play").click()
        expect(page.locator("#moment")).to_have_text("1:59 of 1:59")
        expect(page.get_by_role("button", name="Play")).to_be_visible()
        assert page.locator("img").count() == 0
        assert page.get_by_label("Your question").is_hidden()
        assert seen.complaints == []
        assert [one.url for one in seen.requests if not one.url.startswith("data:,")] == [recording]


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light"), (3840, "dark")])
def test_a_recording_at_every_size(browser: Browser, recording: str, width: int, scheme: Scheme) -> None:
    with shown(browser, recording, width=width, scheme=scheme) as (page, _):
        page.wait_for_selector("[data-metric]", state="attached")
        drawn, window = overflow(page)
        assert drawn <= window
        assert poor_contrasts(page) == []


def test_an_empty_recording_is_a_page(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_bytes(recorded_page("nothing", [], []))
    with shown(browser, (tmp_path / "out.html").as_uri()) as (page, seen):
        expect(page.get_by_role("heading", name="nothing")).to_be_visible()
        assert seen.complaints == []

"""The bar of one request's life: which phase is drawn from one step to the next."""

from __future__ import annotations

import re

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from kvloom.journal.lives import Life, State, Step
from tests.page.browser import shown
from tests.page.conftest import KEY, Served

BEGAN = 1_000_000.0


@pytest.mark.parametrize(
    ("state", "steps", "phases"),
    [
        ("queued", "came queued", "queued"),
        ("prefill", "came queued admitted", "queued prefill"),
        ("decode", "came queued admitted first_token", "queued prefill decode"),
        ("queued", "came queued admitted preempted", "queued prefill queued"),
        (
            "ended",
            "came queued admitted preempted admitted first_token ended",
            "queued prefill queued prefill decode",
        ),
        ("queued", "came queued admitted resumed", "queued prefill queued"),
        ("queued", "came queued moved", "queued"),
        (
            "ended",
            "came queued admitted resumed admitted first_token ended",
            "queued prefill queued prefill decode",
        ),
        ("ended", "came queued admitted first_token moved preempted ended", "queued prefill decode"),
    ],
)
def test_a_bar_has_the_phases_of_the_steps(
    browser: Browser, served: Served, state: State, steps: str, phases: str
) -> None:
    told = tuple(Step(at=BEGAN + at, what=what) for at, what in enumerate(steps.split()))
    life = Life(
        id="mine", api_id="", model="sums", state=state, began=BEGAN, prompt_tokens=9, output_tokens=0,
        cached_tokens=0, steps=told,
    )  # fmt: skip

    def tell(page: Page) -> None:
        def answer(route: Route) -> None:
            route.fulfill(content_type="application/json", body=msgspec.json.encode(life))

        page.route(re.compile("/admin/requests/mine$"), answer)

    with shown(browser, served.url, key=KEY, before=tell) as (page, seen):
        page.get_by_label("A request's id").fill("mine")
        page.get_by_role("button", name="Show", exact=True).click()
        expect(page.locator("#life")).to_have_attribute("data-state", state)
        drawn = page.locator("#life [data-phase]").evaluate_all("all => all.map((one) => one.dataset.phase)")
        assert drawn == phases.split()
        expect(page.locator("#life .life-said")).to_contain_text(f"; {state}.")
        assert seen.complaints == []

"""The chart of a unit's pool: what stands upon what, and a line for each model's quota."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from kvloom.journal.samples import Sample, UnitModel, UnitSample
from tests.page.browser import shown
from tests.page.conftest import KEY, Served

BLOCKS = 1000
WATCHING = """
Object.defineProperty(window, "uPlot", {
  get() { return this.watched; },
  set(plain) {
    window.charts = [];
    this.watched = class extends plain {
      constructor(options, data, host) { super(options, data, host); charts.push(this); }
    };
  },
});
"""
LAST = """
() => {
  const [pool] = charts.filter((chart) => chart.root.closest("figure.pool") && chart.root.isConnected);
  const shown = pool.series.map((one, i) => [one.label, [pool.data[i].at(-1), Boolean(one.dash), one.show]]);
  return { most: pool.scales.y.max, series: Object.fromEntries(shown.slice(1)) };
}
"""


def model(name: str, used: int, cached: int, quota: int) -> UnitModel:
    return UnitModel(
        model=name, waiting=0, oldest=0.0, running=0, used=used, cached=cached, pinned=0, quota=quota,
        weights=0, awake=True, away=0, prompt_tokens=0, cached_tokens=0, output_tokens=0, preemptions=0,
    )  # fmt: skip


def drawn(browser: Browser, served: Served, *models: UnitModel) -> tuple[dict[str, Any], str]:
    """What a pool with these models is drawn as, and what its caption says."""
    free = BLOCKS - sum(one.used + one.cached for one in models)
    unit = UnitSample(
        unit="unit-0", state="up", node="", blocks=BLOCKS, free=free, lent=0, block_bytes=1024, models=models
    )
    events = (msgspec.json.encode(Sample(at=at, units=(unit,), models=())).decode() for at in (1.0, 2.0))
    body = "".join(f"event: sample\ndata: {event}\n\n" for event in events)

    def tell(page: Page) -> None:
        def answer(route: Route) -> None:
            route.fulfill(content_type="text/event-stream", body=body)

        page.route(re.compile("/admin/live$"), answer)
        page.add_init_script(WATCHING)

    with shown(browser, served.url, key=KEY, before=tell) as (page, _):
        expect(page.locator("figure.pool figcaption")).to_contain_text("free")
        page.wait_for_selector("figure.pool .uplot")
        found: dict[str, Any] = page.evaluate(LAST)
        return found, page.locator("figure.pool figcaption").inner_text()


def test_each_model_has_a_line_as_far_as_its_quota_reaches(browser: Browser, served: Served) -> None:
    found, said = drawn(browser, served, model("a", 100, 50, 300), model("b", 200, 40, 500))
    series = found["series"]
    assert series["a quota"] == [300, True, True]
    assert series["b quota"] == [150 + 500, True, True]  # from where b's part begins
    assert [series[name][0] for name in ("a used", "a cached", "b used", "b cached")] == [100, 150, 350, 390]
    assert found["most"] == BLOCKS
    assert "drawn up to" not in said


@pytest.mark.parametrize(("quota", "above"), [(20, False), (300, True)])
def test_a_pool_that_is_drawn_in_part_says_whether_quotas_are_above(
    browser: Browser, served: Served, quota: int, above: bool
) -> None:
    found, said = drawn(browser, served, model("a", 10, 5, quota), model("b", 0, 0, 300))
    assert found["most"] == pytest.approx(1000 / 2**5)
    assert ("below all quotas" in said) == above

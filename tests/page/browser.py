"""A headless Chromium that shows pages, and what it noticed of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.processes import DEADLINE

Scheme = Literal["light", "dark"]
expect.set_options(timeout=1000 * DEADLINE)


def chromium() -> str:
    """Returns the path of Chromium, or skips the test."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("Chromium is not here: `make chromium` installs Debian's package")
    return found


@contextmanager
def started() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        # a root's browser has no sandbox, and loads this server's pages alone
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """What a page has asked for and complained of."""

    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def ask(self, request: Request) -> None:
        self.requests.append(request)

    def complain(self, message: ConsoleMessage) -> None:
        self.complaints.append(f"{message.type}: {message.text}")


@contextmanager
def shown(
    browser: Browser,
    url: str,
    *,
    key: str = "",
    width: int = 1280,
    height: int = 900,
    scheme: Scheme = "light",
    before: Any = None,
) -> Iterator[tuple[Page, Seen]]:
    """Gives a page, and what is seen of it. key: the page has it from the beginning; before: is called with
    the page before it is loaded."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(1000 * DEADLINE)
    try:
        page, seen = context.new_page(), Seen()
        page.on("request", seen.ask)
        page.on("console", seen.complain)
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        if key:
            page.add_init_script(f"sessionStorage.setItem('kvloom-key', '{key}')")
        page.add_init_script(SHIFTS)
        if before:
            before(page)
        page.goto(url)
        yield page, seen
    finally:
        context.close()


CONTRASTS = """
() => {
  const part = (value) => ((value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const read = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = (above, below) => {
    const alpha = above[3] ?? 1;
    return [0, 1, 2].map((i) => above[i] * alpha + below[i] * (1 - alpha));
  };
  const ground = (node) => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) {
      layers.push(read(getComputedStyle(one).backgroundColor));
    }
    return layers.reverse().reduce((below, above) => over(above, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.closest(":disabled")) continue;
    if (["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const below = ground(node);
    const one = light(over(read(style.color), below));
    const other = light(below);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    found.push([walker.currentNode.textContent.trim().slice(0, 40), ratio, large ? 3 : 4.5]);
  }
  return found;
}
"""


SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shifted += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""
MOST_SHIFT = 0.1  # that is called good


def jumps(page: Page) -> bool:
    """Whether what is shown has moved by more than what is called good (Cumulative Layout Shift)."""
    return bool(page.evaluate("shifted") > MOST_SHIFT)


def poor_contrasts(page: Page) -> list[Any]:
    """The texts of a page that WCAG AA finds too pale."""
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    return [one for one in found if one[1] < one[2]]


def overflow(page: Page) -> list[int]:
    """The width of what is drawn, and of the window."""
    found: list[int] = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return found

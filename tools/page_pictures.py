"""Makes the pictures of the page in docs/img/ from a real run: the demo fleet, asked by its own page.

python -m tools.page_pictures
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser, expect, sync_playwright

from kvloom.config.config import DEMO

PICTURES: Final = Path(__file__).resolve().parents[1] / "docs" / "img"
CONFIG: Final = """
port: 0
kv_memory: 12MiB
block_bytes: 4KiB
threads: 1
models: {{sums: {demo}/sums, stories: {demo}/stories, guide: {demo}/guide}}
units: [{{models: [sums, stories, guide]}}, {{models: [stories]}}]
"""
WIDTH: Final = 1360
SECONDS: Final = 60
TURNS: Final = 12  # that every model is asked


@contextmanager
def served() -> Iterator[str]:
    """Gives the URL of a fleet."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.yaml"
        file.write_text(CONFIG.format(demo=DEMO))
        command = [sys.executable, "-m", "kvloom.cli", "serve", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fleet:
            assert fleet.stdout is not None
            try:
                found = next(
                    filter(None, (re.search(r"Ready in .*(http://\S+)", line) for line in fleet.stdout))
                )
                yield found[1]
            finally:
                fleet.terminate()


def picture(browser: Browser, url: str, scheme: Literal["light", "dark"], height: int) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
    page.set_default_timeout(1000 * SECONDS)
    expect.set_options(timeout=1000 * SECONDS)
    page.goto(url)
    page.locator("#span").select_option("60")
    for _ in range(TURNS):
        page.get_by_role("button", name="Ask every model").click()
        expect(page.locator("#chat-life")).to_contain_text("answers are there")
    page.get_by_role("button", name="dragon").click()
    expect(page.locator("#chat-life")).to_have_attribute("data-state", "ended")
    page.screenshot(path=PICTURES / f"page-{scheme}.png")
    page.close()


def main() -> None:
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        picture(browser, url, "light", 1000)
        picture(browser, url, "dark", 1000)
        browser.close()


if __name__ == "__main__":
    main()

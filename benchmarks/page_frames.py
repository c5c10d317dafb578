"""How smoothly a recorded run plays: 10,000 requests to 16 simulated units, in a headless Chromium.

python -m benchmarks.page_frames [--requests 10000]. `kvloom simulate --page` writes the page, and its player
plays it to the end at the speed that it proposes. The page counts its own frames (requestAnimationFrame) from
the press of the button on. Needs Debian's Chromium (`make chromium`) and playwright; drawing is the CPU's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from playwright.sync_api import sync_playwright

from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.simulator import INSTANCES, MODEL, RATE, REQUESTS, fleet
from kvloom.plan.plan import write_plan

LEAST = 30.0  # frames a second
WIDTH, HEIGHT = 1360, 900
LONGEST = 300.0  # seconds that the run may play
PLAYED = """
() => new Promise((done) => {
  const button = document.getElementById("play");
  const moments = [];
  const count = (at) => {
    moments.push(at);
    if (button.textContent === "Play") done(moments);
    else requestAnimationFrame(count);
  };
  button.click();
  requestAnimationFrame(count);
})
"""


def recorded(folder: Path, requests: int) -> Path:
    """Returns the page of a run."""
    plan, workload, page = folder / "plan.json", folder / "workload.json", folder / "run.html"
    write_plan(plan, fleet())
    asked = {"models": [MODEL], "rate": RATE, "requests": requests, "lengths": "sharegpt"}
    workload.write_bytes(msgspec.json.encode(asked))
    command = [sys.executable, "-m", "kvloom.cli", "simulate", str(plan), "--workload", str(workload)]
    done = subprocess.run([*command, "--page", str(page)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kvloom simulate: {done.stderr.strip()}")
    return page


def frames(page: Path) -> dict[str, Any]:
    """Returns the moments of the frames in milliseconds, and what was played."""
    path = shutil.which("chromium")
    if path is None:
        raise RuntimeError("Chromium is not here: `make chromium` installs Debian's package")
    with sync_playwright() as playwright:
        # a root's browser has no sandbox, and loads this page alone
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            shown.set_default_timeout(1000 * LONGEST)
            shown.goto(page.as_uri())
            shown.wait_for_selector("#play")
            moments = shown.evaluate(PLAYED)
            return {
                "moments": moments,
                "speed": shown.locator("#speed").input_value(),
                "end": shown.locator("#moment").inner_text(),
            }
        finally:
            browser.close()


def measure(requests: int = REQUESTS) -> Report:
    machine = this_machine()
    with tempfile.TemporaryDirectory() as folder:
        page = recorded(Path(folder), requests)
        size = page.stat().st_size / (1 << 20)
        seen = frames(page)
    moments = seen["moments"]
    gaps = sorted(after - before for before, after in pairwise(moments))
    seconds = (moments[-1] - moments[0]) / 1000
    rate = len(gaps) / seconds
    return Report(
        name="page-frames",
        title=f"{requests:,} requests to {INSTANCES} simulated units, played at {seen['speed']}×",
        columns=["seconds", "frames", "a second", "median ms", "95 % within ms", "slowest ms", "page, MiB"],
        rows=[[seconds, len(gaps), rate, median(gaps), gaps[19 * len(gaps) // 20], gaps[-1], size]],
        findings=[Finding(what="frames", value=rate, unit=" a second", least=LEAST)],
        machine=machine,
        notes=[f"The player's clock stands at {seen['end']}. Chromium shows 60 frames a second at most."],
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    publish(measure(parser.parse_args().requests))


if __name__ == "__main__":
    main()

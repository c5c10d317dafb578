"""A real Prometheus scrapes a served fleet: each panel's query has data, and each alert is evaluated."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloom.config.config import DEMO
from kvloom.config.keys import add_key, make_key
from tests.deploy.dashboard import RULES, SCRAPE, drawn, rules
from tests.deploy.promql import SCRAPED, exported
from tests.processes import DEADLINE
from tests.serve.streaming import asking, call, serving
from tests.serve.test_log_live import eventually

RULE_TESTS = Path(__file__).with_name("kvloom.rules.test.yml")
SCRAPER = "a-key-of-the-scraper"
CONFIG = """
kv_memory: 64MiB
block_bytes: 4KiB
threads: 1
api_key_file: {folder}/kvloom.key
keys: {folder}/keys.yaml
rescheduling: {{period: 50ms}}
models: {{stories: {demo}/stories, guide: {demo}/guide, sums: {demo}/sums}}
units: [{{models: [stories], replicas: 2}}, {{models: [guide, sums]}}]
weave: [{{hot: unit-0, cold: unit-2, share: 0.7}}]
"""


def tool(name: str) -> str:
    """Returns the path of one of Prometheus' programs, or skips the test."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: `make prometheus` unpacks Debian's package into .venv")
    return found


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [tool("promtool"), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def spoken(folder: Path) -> Path:
    """Returns the scrape config with what it says of keys in comments."""
    text = SCRAPE.read_text("utf-8")
    found = re.sub(r"^    # (authorization:\n)    # (.*\n)", r"    \1    \2", text, flags=re.M)
    assert found != text
    (folder / RULES.name).write_text(RULES.read_text("utf-8"))
    (folder / SCRAPE.name).write_text(found)
    return folder / SCRAPE.name


def test_promtool_finds_nothing(tmp_path: Path) -> None:
    promtool("check", "rules", "--lint-fatal", RULES)
    promtool("check", "config", "--lint-fatal", SCRAPE)
    (tmp_path / "kvloom.key").write_text(SCRAPER)
    promtool("check", "config", "--lint-fatal", spoken(tmp_path))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", RULE_TESTS)


def test_each_alert_is_tried_with_series_that_kvloom_exports() -> None:
    """The label of a histogram's buckets is among those of its series."""
    known, tests = exported(), yaml.safe_load(RULE_TESTS.read_text("utf-8"))["tests"]
    for series in (one["series"] for test in tests for one in test["input_series"]):
        name, labels = series.rstrip("}").split("{")
        assert set(re.findall(r"(\w+)=", labels)) == known[name] | SCRAPED, series
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if "exp_alerts" in one}
    assert fired == {rule["alert"] for rule in rules()}


@contextmanager
def prometheus(folder: Path, url: str) -> Iterator[str]:
    """A Prometheus that scrapes the fleet at `url` each second, by the scrape config of deploy/."""
    file, log = spoken(folder), folder / "prometheus.log"
    config = yaml.safe_load(file.read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [url.removeprefix("http://")]
    file.write_text(yaml.safe_dump(config))
    command = [tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as written:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=written)
    try:

        def port() -> str:
            found = re.search(r'"Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
            assert process.poll() is None, log.read_text()
            return found[1] if found else ""

        eventually(lambda: bool(port()), "Prometheus")
        yield f"http://127.0.0.1:{port()}"
    finally:
        process.terminate()
        process.wait(DEADLINE)


def api(url: str, path: str, **parameters: str) -> Any:
    asked = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
        return json.load(answer)["data"]


def has_data(url: str, expression: str) -> bool:
    """Whether a query has a value that is a number. Raises HTTPError if Prometheus does not understand it."""
    result = api(url, "query", query=expression)["result"]
    return any(not isnan(float(one["value"][1])) for one in result)


def alerts_are_evaluated(url: str) -> bool:
    found = [rule for group in api(url, "rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in found] == [rule["alert"] for rule in rules()]
    assert not [rule["lastError"] for rule in found if rule["health"] == "err"]
    return all(rule["health"] == "ok" for rule in found)


@contextmanager
def asked_of(url: str, key: str) -> Iterator[None]:
    """Each model streams one answer after the other meanwhile."""
    over = threading.Event()

    def ask(model: str) -> None:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "stream": True}
        while not over.is_set():
            with urllib.request.urlopen(
                asking(url, "/v1/completions", body, key), timeout=DEADLINE
            ) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor() as pool:
        asking_all = [pool.submit(ask, model) for model in ("stories", "guide", "sums")]
        try:
            yield
        finally:
            over.set()
        for one in asking_all:
            one.result()


def moved(url: str, key: str) -> bool:
    """Whether a stream has left a unit that was drained; drains one if not."""
    with suppress(StopIteration):
        loads = call(url, "/admin/fleet", key=key)["loads"]
        busy = next(unit for unit, load in loads.items() if load["models"].get("stories", {}).get("running"))
        call(url, f"/admin/units/{busy}/drain", {}, key)
        call(url, f"/admin/units/{busy}/admit", {}, key)
    with urllib.request.urlopen(asking(url, "/metrics", key=key), timeout=DEADLINE) as answer:
        return b"kvloom_kv_choices_total{" in answer.read()


def test_each_panel_has_data_of_a_served_fleet_with_keys(tmp_path: Path) -> None:
    tool("prometheus")
    (tmp_path / "kvloom.key").write_text(SCRAPER + "\n")
    keys = {}
    for name, admin in (("team", False), ("ops", True)):
        keys[name], key = make_key(name, admin=admin)
        add_key(tmp_path / "keys.yaml", key)
    with (
        serving(tmp_path, CONFIG.format(folder=tmp_path, demo=DEMO)) as (_, fleet),
        prometheus(tmp_path, fleet) as url,
        asked_of(fleet, keys["team"]),
    ):
        eventually(lambda: moved(fleet, keys["ops"]), "a move")
        for query in drawn():
            eventually(partial(has_data, url, query.expression), f"data of {query}")
        eventually(lambda: alerts_are_evaluated(url), "an evaluation of each alert")

"""Models added to a fleet and removed from it while it serves, and another config applied. Real processes."""

from __future__ import annotations

import signal
from pathlib import Path

from kvloom.config.config import DEMO
from tests.commands import kvloom
from tests.processes import fleet
from tests.serve.test_units import ask

CONFIG = f"""
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], kv_memory: 8MiB, threads: 1}}]
"""
ANOTHER = "  - {models: [sums], kv_memory: 8MiB, threads: 1}\n"


def test_a_model_comes_and_goes_and_a_config_is_applied(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    with fleet(str(file)) as running:
        url = running.wait_until_ready()

        def say(*words: str) -> str:
            done = kvloom(*words, "--url", url)
            return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"

        sums = f"unit-0 up  {DEMO}/sums\n"
        assert say("model", "list") == "sums  " + sums
        assert (
            say("config", "apply", str(file), "--yes") == "units, models and program are as the config says\n"
        )
        before = running.children()

        assert say("model", "add", f"stories={DEMO}/stories") == f"stories  unit-0 up  {DEMO}/stories\n"
        assert [ask(url, model) for model in ("stories", "sums")] == [200, 200]
        assert "there is a model stories already" in say("model", "add", f"stories={DEMO}/guide")
        serving = running.children()
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "config.json").write_text("{}")
        refused = say("model", "add", f"wrong={tmp_path}/none")
        assert refused.startswith(f"1: kvloom: {url}: unit-0: models.wrong: its files lack ")
        assert running.children() == serving
        assert refused.count("\n") == 1
        assert [ask(url, model) for model in ("stories", "sums")] == [200, 200]

        assert say("model", "remove", "stories") == "sums  " + sums
        assert [ask(url, model) for model in ("stories", "sums")] == [404, 200]

        file.write_text(CONFIG.replace("units: [{", "units:\n  - {").replace("}]", "}") + ANOTHER)
        change = "unit-1 is added, with sums\n"
        assert say("config", "apply", str(file)) == change + "nothing is changed yet; --yes does it\n"
        assert (
            say("config", "apply", str(file), "--yes")
            == change + "done: units, models and program are as the config says\n"
        )
        assert say("model", "list") == f"sums  unit-0 up, unit-1 up  {DEMO}/sums\n"
        assert running.children()["gateway"] == before["gateway"]
        assert running.end(signal.SIGINT) == 0

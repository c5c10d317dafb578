"""An adapter that is loaded into a fleet and unloaded while it serves. Real processes."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint
from tests.processes import fleet
from tests.serve.test_units import ask

CONFIG = """
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {base: ./base}
"""


def post(url: str, path: str, **body: str) -> tuple[int, str]:
    asked = urllib.request.Request(
        f"{url}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_an_adapter_comes_outlives_its_engine_and_goes(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen2")
    adapter = make_adapter(tmp_path / "lora", base)
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    with fleet(str(file)) as running:
        url = running.wait_until_ready()
        assert [ask(url, model) for model in ("base", "x")] == [200, 404]
        engine = running.children()["unit-0"]
        loaded = post(url, "load_lora_adapter", lora_name="x", lora_path=str(adapter))
        assert loaded == (200, "Success: LoRA adapter 'x' added successfully.")
        status, said = post(url, "load_lora_adapter", lora_name="y", lora_path=str(base))
        assert status == 400
        assert "unit-0: models.y: " in said
        assert [ask(url, model) for model in ("base", "x", "y")] == [200, 200, 404]
        assert running.children()["unit-0"] == engine

        os.kill(engine, signal.SIGKILL)
        assert [ask(url, model) for model in ("base", "x")] == [200, 200]
        assert running.children()["unit-0"] != engine

        unloaded = post(url, "unload_lora_adapter", lora_name="x")
        assert unloaded == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert [ask(url, model) for model in ("base", "x")] == [200, 404]
        assert running.end(signal.SIGINT) == 0

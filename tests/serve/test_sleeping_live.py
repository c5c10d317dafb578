"""Two models in the memory of one, by real processes: streams of both go on, past the engine's death too."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.serve.streaming import metric, said, serving, states, streams

CONFIG = """
memory: 12MiB
block_bytes: 4KiB
sleep_dir: {folder}
models: {{a: {a}, b: {b}}}
"""
TOKENS = 40


def test_streams_of_two_models_in_the_memory_of_one(tmp_path: Path) -> None:
    paths = {
        name: make_checkpoint(tmp_path / name, kind, hidden_size=256, intermediate_size=512)
        for name, kind in (("a", "llama"), ("b", "qwen3"))
    }
    with serving(tmp_path, CONFIG.format(folder=tmp_path, **paths)) as (running, url):
        alone = {name: said(url, name, 7, TOKENS) for name in paths}
        with streams(url, TOKENS, a=2, b=2) as ended:
            while len(ended) < 8:
                pass
            os.kill(running.children()["unit-0"], signal.SIGKILL)
            running.wait_for("unit-0 | answers again")
            after = len(ended)
            while len(ended) < after + 8:
                pass
        assert {name: said(url, name, 7, TOKENS) for name in paths} == alone
        assert metric(url, "kvloom_weights_wakes_total") >= len(paths)
        assert set(states(url).values()) == {"up"}

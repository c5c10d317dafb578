"""More models than memory, by real processes: streams go on, past kills and vanished checkpoints too."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
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


def test_kills_while_models_are_woken_and_checkpoints_that_vanish(tmp_path: Path) -> None:
    """Four models in the memory of two. What is asked while the engine is killed says what it says alone."""
    paths = {
        name: make_checkpoint(tmp_path / name, kind, seed=ord(name), hidden_size=256, intermediate_size=512)
        for name, kind in (("a", "llama"), ("b", "qwen3"), ("c", "llama"), ("d", "qwen3"))
    }
    models = "{" + ", ".join(f"{name}: {path}" for name, path in paths.items()) + "}"
    config = f"memory: 16MiB\nblock_bytes: 4KiB\nsleep_dir: {tmp_path}\nmodels: {models}\n"
    with serving(tmp_path, config) as (running, url), ThreadPoolExecutor() as pool:
        alone = {name: said(url, name, 7, TOKENS) for name in paths}
        for asked in ("c", "d"):
            with streams(url, TOKENS, a=1, b=1):  # one that two engines die with would be quarantined
                asking = pool.submit(said, url, asked, 7, TOKENS)
                os.kill(running.children()["unit-0"], signal.SIGKILL)
                running.wait_for("unit-0 | answers again")
                assert asking.result() == alone[asked]
        for path in paths.values():
            shutil.rmtree(path)
        assert {name: said(url, name, 7, TOKENS) for name in paths} == alone
        assert metric(url, "kvloom_weights_wakes_total") >= len(paths)

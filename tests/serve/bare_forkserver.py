"""A fork server that imports nothing ahead: `python -m tests.serve.bare_forkserver 0 NAME`. With THREAD in
its environment it has a thread beside its main one; with DIES it dies as soon as it has forked; with AHEAD it
has something to do ahead of time: it says so in that file, and waits until the file is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvloom.serve.forkserver_process import serve_forks


def prepare() -> list[Callable[[], object]]:
    if "THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if "DIES" in os.environ:
        fork = os.fork
        os.fork = lambda: os._exit(1) if fork() else 0
    return [lambda: work_ahead(Path(os.environ["AHEAD"]))] if "AHEAD" in os.environ else []


def work_ahead(file: Path) -> None:
    file.touch()
    while file.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    serve_forks(prepare)

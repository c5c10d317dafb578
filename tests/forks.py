"""Processes that tests fork off one fork server, which has imported what they need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

FORKS: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_PRELOADED: Final[list[str]] = []


def preload(*modules: str) -> None:
    """Has the fork server import these too, and then compile the kernels. Each test session has one fork
    server, which starts with the first process, after all tests were collected; without this the process of
    every test would import torch."""
    _PRELOADED.extend(modules)
    FORKS.set_forkserver_preload([*_PRELOADED, "tests.compiled"])

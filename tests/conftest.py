"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

from tests import interpreter

# the same examples in every run, however slow the machine is
settings.register_profile(
    "kvloom", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvloom")

# before torch is there: processes of tests share the cores, which OpenMP's workers would take from each other
# while they wait
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

interpreter.watch()

# What is imported for hundreds of tests stays, and no collection need look at it.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Tests keep sockets in their folders, and a socket's path has at most 107 bytes. pytest's own folders
    are counted for as long as the machine lives, and their paths grow with the count."""
    if config.option.basetemp is None:
        config.option.basetemp = folder = tempfile.mkdtemp(prefix="kvt-")
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()

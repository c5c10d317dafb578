"""Tests that are coroutines run on an event loop of their own."""

from __future__ import annotations

import inspect
from functools import partial

import pytest

from tests.router.fleets import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    return True

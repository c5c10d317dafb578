"""Tests that are coroutines run on an event loop of their own."""

from tests.router.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

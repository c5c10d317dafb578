"""The kernels run on a GPU here, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import interpreter

if interpreter.INSTALLED:
    interpreter.load()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with interpreter.interpreting():
        yield

"""The kernels run in Triton's interpreter here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import interpreter

if interpreter.INSTALLED:
    interpreter.load()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter.interpreting():
        yield

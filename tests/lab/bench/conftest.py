"""One demo fleet for all that is asked of it here."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.processes import fleet


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    with fleet("--kv-memory", "16MiB") as running:
        yield running.wait_until_ready()
        assert running.end(signal.SIGTERM) == 0
        assert running.errors() == ""

"""Hosts for the tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.hosts import Host, NoHosts, hosts


@contextmanager
def hosts_or_skip(count: int) -> Iterator[list[Host]]:
    """Makes so many hosts; where none can be made, the test says why and is skipped."""
    try:
        with hosts(count) as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    """Two hosts with nothing on them, for all tests of a file."""
    with hosts_or_skip(2) as made:
        yield made

"""Pairs of units, of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.kinds import KINDS, MORTAL
from tests.transfer.units import Unit, units


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Unit, Unit]]:
    """A sender and a receiver that outlive a test."""
    with units(request.param, "sender", "receiver") as (sender, receiver):
        yield sender, receiver


@pytest.fixture(params=MORTAL)
def mortal(request: pytest.FixtureRequest) -> Iterator[tuple[Unit, Unit]]:
    """A sender and a receiver for one test."""
    with units(request.param, "sender", "receiver") as (sender, receiver):
        yield sender, receiver

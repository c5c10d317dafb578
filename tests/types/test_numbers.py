"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvloom.types.numbers import show_number, show_seconds


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (3502.1, "3,502 s")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.0123, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers(value: float, shown: str) -> None:
    assert show_number(value) == shown

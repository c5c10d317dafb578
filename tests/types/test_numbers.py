"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvloom.types.numbers import show_count, show_number, show_seconds, show_size


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


@pytest.mark.parametrize(("size", "shown"), [(100, "100 bytes"), (4096, "4 KiB"), (3 << 29, "1.5 GiB")])
def test_sizes(size: int, shown: str) -> None:
    assert show_size(size) == shown


@pytest.mark.parametrize(("number", "shown"), [(0, "0 lines"), (1, "1 line"), (1234, "1,234 lines")])
def test_counts(number: int, shown: str) -> None:
    assert show_count(number, "line") == shown

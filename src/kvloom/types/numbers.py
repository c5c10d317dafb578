"""Numbers as people read them."""

from __future__ import annotations


def show_number(value: float) -> str:
    """Returns three digits, or all before the point: `1,234`, `12.3`, `0.012`."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show_seconds(seconds: float) -> str:
    """Returns three digits and a unit: `1.23 ms`, `45.6 s`."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if seconds == 0:
        return "0 s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def show_size(size: int) -> str:
    """Returns the bytes as people write them, with four digits: `1.5 GiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def show_count(number: int, what: str) -> str:
    """Returns the number with its noun: `1 line`, `9 lines`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"

"""Numbers as people read them."""

from __future__ import annotations

from kvloom.workload.results import Upheaval


def show_seconds(seconds: float) -> str:
    """`1.23 ms`, `45.6 s`: three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if seconds == 0:
        return "0 s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def show_upheaval(found: Upheaval) -> str:
    """`3 preemptions; 12 requests moved, 1 could not; 2.40 units in the mean, 1 to 4`."""
    parts = [_counted(found.preempted, "preemption")]
    if found.moved is not None:
        parts.append(f"{_counted(found.moved, 'request')} moved, {found.stayed or 0:,} could not")
    if found.least != found.most:
        parts.append(f"{found.units:.2f} units in the mean, {found.least} to {found.most}")
    return "; ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def show_number(value: float) -> str:
    """`1,234`, `12.3`, `0.012`."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"

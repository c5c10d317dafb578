"""Figures in small, played with an eye on their progress."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.lab.reproduce.report import Report, Scale, Tell


def quiet(*_: object) -> None:
    """Tells nobody."""


def played(figure: Callable[[Scale, Tell], Report], *, least: float = 1.0) -> Report:
    """The figure at its small scale, whose progress rises to the whole, or to this part of it at least."""
    told: list[float] = []
    report = figure("small", lambda _, part: told.append(part))
    assert told == sorted(told)
    assert least - 1e-9 <= told[-1] <= 1.0 + 1e-9
    return report

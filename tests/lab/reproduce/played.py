"""Figures in small, played with an eye on their progress."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom.lab.reproduce.report import Report, Scale, Tell


def quiet(*_: object) -> None:
    """Tells nobody."""


def played(figure: Callable[[Scale, Tell], Report]) -> Report:
    """The figure at its small scale, whose progress rises to the whole."""
    told: list[float] = []
    report = figure("small", lambda _, part: told.append(part))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0, abs=0.4)
    return report

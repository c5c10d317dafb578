"""The published curves of figure 11."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvloom.lab.reproduce.published import read_published

CURVES: Final = "llumnix_fig11.json"


class Curves(Struct, frozen=True):
    """Curves of (requests a second, value), by workload, measure and system."""

    figures: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}

    def at(self, traffic: str, measure: str, system: str, rate: float) -> float | None:
        """Returns the published value; None if nothing was published, or the file is not here."""
        curve = self.figures.get(traffic, {}).get(measure, {}).get(system, [])
        return next((value for at, value in curve if abs(at - rate) < 1e-6), None)


def read_curves() -> Curves:
    """Returns the published curves; empty if the variable is not set. Raises ConfigError."""
    return read_published(CURVES, Curves, "the curves of figure 11") or Curves()

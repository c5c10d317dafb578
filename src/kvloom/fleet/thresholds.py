"""From which freeness on a unit gives requests away or takes them (Llumnix, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Freeness, in decode steps: units below `out` give requests away, those above `into` take them, and keep
    at least `floor`; where that is left out `out`, so that they need not give away what they have taken.
    Raises ValueError where one unit could do both. The defaults are the artifact's 1.5 and 3 blocks a
    request."""

    out: float = 24.0
    into: float = 48.0
    floor: float | None = None

    def __post_init__(self) -> None:
        if not self.out <= self.into:
            raise ValueError(
                f"out {self.out:g} is above into {self.into:g}: a unit would give away what it has just "
                "taken; out ≤ into is right"
            )

    @property
    def kept(self) -> float:
        """By a unit that takes."""
        return self.out if self.floor is None else self.floor

"""From which freeness on a unit gives requests away or takes them (Llumnix, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Freeness, in decode steps: units below `out` give requests away, those above `into` take them. Raises
    ValueError where one unit could do both. The defaults are the artifact's 1.5 and 3 blocks a request."""

    out: float = 24.0
    into: float = 48.0

    def __post_init__(self) -> None:
        if not self.out <= self.into:
            raise ValueError(
                f"out {self.out:g} is above into {self.into:g}: a unit would give away what it has just "
                "taken; out ≤ into is right"
            )

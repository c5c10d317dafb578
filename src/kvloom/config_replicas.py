"""How many engines of a unit there are, or may be, as a config says it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from kvloom.config_fields import Seconds, Section, Steps, no_bool
from kvloom.types.service import Scale

MOST_ENGINES: Final = 64


class ReplicasConfig(Section):
    """Between `least` and `most`, by mean freeness in decode steps: see `Scale`. Short form: a number."""

    least: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=MOST_ENGINES)] = 1
    most: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MOST_ENGINES)]
    low: Steps = 160.0
    high: Steps = 960.0
    seconds: Seconds = 10.0
    idle: Seconds = 60.0

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        Scale(**self.model_dump())
        return self

    @property
    def scale(self) -> Scale | None:
        """None where their number never changes."""
        return None if self.least == self.most else Scale(**self.model_dump())

    @property
    def first(self) -> int:
        """Engines that a fleet begins with: one at least, by which it is known what its models need."""
        return max(1, self.least)


def _number(value: Any) -> Any:
    """A number is as many at least as at most."""
    if isinstance(value, bool):
        return no_bool(value)
    if not isinstance(value, int):
        return value
    if not 1 <= value <= MOST_ENGINES:
        right = "1 or more" if value < 1 else f"{MOST_ENGINES} or less"
        raise ValueError(f"{value}; {right} is right")
    return {"least": value, "most": value}


Replicas = Annotated[ReplicasConfig, BeforeValidator(_number)]

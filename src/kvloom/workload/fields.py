"""What the keys of a workload's file may hold."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LONGEST: Final = 1 << 24  # tokens of one prompt or answer

Rate = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TokenCount = Annotated[int, Field(ge=1, le=LONGEST)]


def _on_one_line(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{shown(name)}; a name of printable characters is right")
    return name


Name = Annotated[str, Field(max_length=200), AfterValidator(_on_one_line)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


def shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""The options of programs that have bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Replicas = Annotated[int, Meta(ge=1)]
Tokens = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]

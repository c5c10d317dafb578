"""Bytes and seconds as people write them."""

from __future__ import annotations

import re
from typing import Final

_FORM: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)", re.IGNORECASE)
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """`512MiB`, `2GB`, `0.5g`, `4096`: KiB and its like count in 1024s, KB in 1000s. Raises ValueError."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"{text!r} is no size; `512MiB`, `2GB` or a number of bytes is right")
    found = _FORM.fullmatch(str(text).strip())
    if found is None or len(str(text)) > 30:
        raise ValueError(f"{str(text)[:40]!r} is no size; `512MiB`, `2GB` or a number of bytes is right")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def show_size(size: int) -> str:
    """The shortest exact-enough form: `1.5 GiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def parse_seconds(text: str | int | float) -> float:
    """`30s`, `1.5min`, `200ms`, or a number of seconds. Raises ValueError."""
    found = None if isinstance(text, bool) else _SPAN.fullmatch(str(text).strip())
    if found is None or len(str(text)) > 30:
        raise ValueError(f"{str(text)[:40]!r} is no time; `30s`, `2min` or a number of seconds is right")
    number, unit = found.groups()
    return float(number) * _SECONDS[unit.lower()]

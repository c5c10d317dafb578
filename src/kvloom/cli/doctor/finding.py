"""Findings: the results of checks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "note", "problem"]


class Finding(Struct, frozen=True):
    """One thing of a machine. A note is of something that kvloom can do without; a problem keeps it from
    serving."""

    what: str
    found: str
    verdict: Verdict = "ok"
    right: str = ""
    """The state that would be right, if it is another one."""

"""Execution priority: which requests run with room to spare (Llumnix, section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class Level(Struct, frozen=True):
    """For requests whose `priority` is this number or a smaller, more urgent one. headroom: tokens that stay
    free on a unit for all of the level's requests there together."""

    priority: int
    headroom: int


def level_of(priority: int, levels: Iterable[Level]) -> Level | None:
    """The most urgent level that the priority is as urgent as; None where it is below all."""
    return min(
        (level for level in levels if priority <= level.priority),
        key=lambda level: level.priority,
        default=None,
    )

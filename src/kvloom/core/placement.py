"""Which units there are and may be, to those who change that."""

from __future__ import annotations

from msgspec import Struct

from kvloom.core.spec import EngineSpec


class Placement(Struct, frozen=True, kw_only=True):
    """units: those that have a process. away: those that have none now. scaled: names of those that
    come and go by themselves. memory: bytes that were free before the fleet was started. cores: those that it
    may use."""

    units: tuple[EngineSpec, ...]
    away: tuple[EngineSpec, ...]
    scaled: tuple[str, ...]
    memory: int
    cores: int

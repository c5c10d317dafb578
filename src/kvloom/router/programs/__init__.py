"""The programs that are shipped: what the router does with a request, one a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvloom.router.call import Frames
from kvloom.router.programs.balanced import balanced
from kvloom.router.programs.cache_aware import cache_aware
from kvloom.router.programs.cache_aware_disaggregate import cache_aware_disaggregate
from kvloom.router.programs.data_parallel import data_parallel
from kvloom.router.programs.disaggregate import disaggregate
from kvloom.router.programs.freest import freest
from kvloom.router.programs.infaas import infaas
from kvloom.router.programs.least_loaded import least_loaded
from kvloom.router.programs.migrate_context import migrate_context

MOVING: Final = frozenset({"disaggregate", "cache_aware_disaggregate", "balanced", "migrate_context"})
"""Those that move K and V from unit to unit."""

PROGRAMS: dict[str, Callable[..., Frames]] = {
    program.__name__: program
    for program in (
        data_parallel,
        least_loaded,
        freest,
        infaas,
        disaggregate,
        cache_aware_disaggregate,
        balanced,
        cache_aware,
        migrate_context,
    )
}

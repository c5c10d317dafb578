"""A line every few seconds that says how a fleet does, while something runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.load import UnitLoad

PULSE: Final = "kvloom.pulse"
"""The logger of the line."""
PULSE_SECONDS: Final = 10.0


class Counted(Protocol):
    """The router, as far as it is told of."""

    @property
    def begun(self) -> int:
        """Requests so far."""

    @property
    def busy(self) -> bool:
        """True while a request is under way."""

    async def loads(self) -> dict[str, UnitLoad]: ...


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts of a fleet since its engines began, and what there is now."""

    output: int = 0
    prompt: int = 0
    cached: int = 0

    @staticmethod
    def of(loads: Mapping[str, UnitLoad]) -> Totals:
        models = [model for load in loads.values() for model in load.models.values()]
        return Totals(
            output=sum(model.output_tokens_total for model in models),
            prompt=sum(model.prompt_tokens_total for model in models),
            cached=sum(model.cached_tokens_total for model in models),
        )


async def tell_pulse(
    router: Counted, clock: Clock, tell: Callable[[str], object], seconds: float = PULSE_SECONDS
) -> None:
    """Tells a line each `seconds` until it is cancelled; nothing, and no engine is asked, while none runs."""
    begun, last = router.begun, Totals()
    while True:
        await clock.sleep(seconds)
        new = router.begun - begun
        begun += new
        if not new and not router.busy:
            continue
        try:
            loads = await router.loads()
        except KvloomError:
            continue
        totals = Totals.of(loads)
        tell(pulse(loads, totals, last, new, seconds))
        last = totals


def pulse(loads: Mapping[str, UnitLoad], now: Totals, last: Totals, requests: int, seconds: float) -> str:
    """Returns the line. requests: those that have begun. Engines that begin anew count from 0."""
    made, computed, cached = (
        new - old if new >= old else new
        for new, old in ((now.output, last.output), (now.prompt, last.prompt), (now.cached, last.cached))
    )
    models = [model for load in loads.values() for model in load.models.values()]
    blocks, used = sum(load.total_blocks for load in loads.values()), sum(m.used_blocks for m in models)
    hits = f"{100 * cached / (cached + computed):.0f} %" if cached + computed else "none asked"
    return (
        f"{requests / seconds:.1f} requests/s, {made / seconds:.0f} tokens/s, "
        f"pool {100 * used / max(1, blocks):.0f} % used, {sum(m.waiting for m in models)} waiting, "
        f"prefix hits {hits}"
    )

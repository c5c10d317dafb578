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
    """The counts of one model of one unit since its engine began, or those of a while."""

    output: int = 0
    prompt: int = 0
    cached: int = 0

    def since(self, last: Totals) -> Totals:
        """Returns what was counted since `last`; an engine that has begun anew counts from 0."""
        if self.output < last.output or self.prompt < last.prompt or self.cached < last.cached:
            return self
        return Totals(self.output - last.output, self.prompt - last.prompt, self.cached - last.cached)


By = dict[tuple[str, str], Totals]
"""By unit and model."""


def totals(loads: Mapping[str, UnitLoad]) -> By:
    return {
        (unit, name): Totals(model.output_tokens_total, model.prompt_tokens_total, model.cached_tokens_total)
        for unit, load in loads.items()
        for name, model in load.models.items()
    }


async def tell_pulse(
    router: Counted, clock: Clock, tell: Callable[[str], object], seconds: float = PULSE_SECONDS
) -> None:
    """Tells a line each `seconds` until it is cancelled, and one more when what ran is over; nothing, and no
    engine is asked, while none runs. What cannot be told in time is in the next line."""
    begun, since, more = router.begun, clock.now(), False
    last = totals(await _loads(router) or {})
    while True:
        await clock.sleep(seconds)
        now, begun_now, busy = clock.now(), router.begun, router.busy
        if begun_now == begun and not busy and not more:
            since = now
            continue
        loads = await _loads(router)
        if loads is None:
            continue
        present = totals(loads)
        tell(pulse(loads, present, last, begun_now - begun, now - since))
        begun, since, more, last = begun_now, now, busy, present


async def _loads(router: Counted) -> dict[str, UnitLoad] | None:
    """Returns nothing if the units cannot be asked now."""
    try:
        return await router.loads()
    except KvloomError:
        return None


def pulse(loads: Mapping[str, UnitLoad], now: By, last: By, requests: int, seconds: float) -> str:
    """Returns the line. Of what is in one of the two counts only nothing is told. requests: those that have
    begun; seconds: between the two."""
    done = [now[one].since(last[one]) for one in now.keys() & last.keys()]
    made = sum(one.output for one in done)
    computed, cached = sum(one.prompt for one in done), sum(one.cached for one in done)
    models = [model for load in loads.values() for model in load.models.values()]
    blocks, used = sum(load.total_blocks for load in loads.values()), sum(m.used_blocks for m in models)
    hits = f"{100 * cached / (cached + computed):.0f} %" if cached + computed else "none asked"
    return (
        f"{requests / seconds:.1f} requests/s, {made / seconds:.0f} tokens/s, "
        f"pool {100 * used / max(1, blocks):.0f} % used, {sum(m.waiting for m in models)} waiting, "
        f"prefix hits {hits}"
    )

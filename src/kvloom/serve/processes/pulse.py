"""A line every few seconds that says how a fleet does, while something runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.load import UnitLoad
from kvloom.types.service import Service

PULSE: Final = "kvloom.pulse"
"""The logger of the line."""
PULSE_SECONDS: Final = 10.0
_TO_COME: Final[tuple[Service, ...]] = ("restarting", "starting", "away")
"""The states of units whose next answer is taken for that of a new process. If one restarts and still has
calls, it may be the old one's: then all that this one has counted is in one line."""


class Counted(Protocol):
    """The router, as far as it is told of."""

    @property
    def begun(self) -> int:
        """Requests so far."""

    @property
    def busy(self) -> bool:
        """True while a request is under way."""

    @property
    def services(self) -> Mapping[str, Service]:
        """The states of all units."""

    async def loads(self) -> dict[str, UnitLoad]: ...


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts of one model of one unit since its engine began, or those of a while."""

    began: float
    """The time when the engine began: `UnitLoad.began`."""
    output: int
    prompt: int
    cached: int

    def since(self, last: Totals | None) -> Totals:
        """Returns what was counted since `last`. Another engine than that of `last` counts from 0."""
        if last is None or self.began != last.began:
            return self
        return Totals(
            self.began, self.output - last.output, self.prompt - last.prompt, self.cached - last.cached
        )


By = dict[tuple[str, str], Totals]
"""By unit and model."""


def totals(loads: Mapping[str, UnitLoad]) -> By:
    return {
        (unit, name): Totals(
            load.began, model.output_tokens_total, model.prompt_tokens_total, model.cached_tokens_total
        )
        for unit, load in loads.items()
        for name, model in load.models.items()
    }


async def tell_pulse(
    router: Counted, clock: Clock, tell: Callable[[str], object], seconds: float = PULSE_SECONDS
) -> None:
    """Tells a line each `seconds` until it is cancelled, and one more when what ran is over; nothing, and no
    engine is asked, while none runs. What cannot be told in time is in the next line.

    A process that begins after this does counts from 0. One that was there before counts from its first
    answer on."""
    begun, since, more = router.begun, clock.now(), False
    there = {unit for unit, service in router.services.items() if service not in _TO_COME}
    heard = await _loads(router) or {}
    last, silent = totals(heard), there - heard.keys()
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
        last = {key: counts for key, counts in present.items() if key[0] in silent} | last
        tell(pulse(loads, present, last, begun_now - begun, now - since))
        begun, since, more = begun_now, now, busy
        last |= present
        silent -= loads.keys()


async def _loads(router: Counted) -> dict[str, UnitLoad] | None:
    """Returns nothing if the units cannot be asked now."""
    try:
        return await router.loads()
    except KvloomError:
        return None


def pulse(loads: Mapping[str, UnitLoad], now: By, last: By, requests: int, seconds: float) -> str:
    """Returns the line. requests: those that have begun; seconds: between the two counts."""
    done = [counts.since(last.get(key)) for key, counts in now.items()]
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

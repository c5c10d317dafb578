"""Which requests of several systems were in time, and by how much one of them is better than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tools.gpu_checks.report import Figure
from tools.gpu_checks.systems import MULTIPLEXING, SPATIAL, TEMPORAL

from kvloom.lab.workload.request import Alone, RequestResult, Scaled, WorkloadRequest

FLATTERED: Final = "spatial's engines share one process and GIL, which flatters this"


@dataclass(frozen=True, slots=True)
class Played:
    """By one system. tokens: that came while it was watched. lag: of the loop that all its engines share."""

    outcomes: list[RequestResult]
    tokens: int
    lag: str = ""


@dataclass(frozen=True, slots=True)
class Judge:
    """end: seconds after the start, when all that has not ended is late, if it is to be judged at all."""

    scale: float
    alone: Mapping[str, Alone]
    end: float

    def takes(self, ask: WorkloadRequest) -> float:
        return self.alone[ask.model].seconds(ask)

    def judged(self, ask: WorkloadRequest) -> bool:
        return ask.at + self.scale * self.takes(ask) <= self.end

    def met(self, played: Played) -> int:
        within = Scaled(self.scale, self.takes)
        return sum(self.judged(o.request) and not o.error and within(o) for o in played.outcomes)


def figures(
    where: str, asks: Sequence[WorkloadRequest], played: Played, judges: Sequence[Judge], note: str
) -> Iterator[Figure]:
    errors = sum(bool(outcome.error) for outcome in played.outcomes)
    for judge in judges:
        judged = sum(map(judge.judged, asks))
        yield Figure(
            name=f"{where}: in time, {judge.scale:g} × alone",
            value=judge.met(played),
            unit=f"of {judged}",
            note=f"that can be judged ({_by_model(judge, asks)}); {errors} failed{note}",
        )
    seconds = judges[0].end
    name, rate = f"{where}: tokens", played.tokens / seconds
    yield Figure(name=name, value=rate, unit="tokens/s", note=played.lag)


def _by_model(judge: Judge, asks: Sequence[WorkloadRequest]) -> str:
    """Who is judged, of those that were asked for: long requests are judged less often."""
    asked = Counter(ask.model for ask in asks)
    judged = Counter(ask.model for ask in asks if judge.judged(ask))
    return ", ".join(f"{model} {judged[model]} of {count}" for model, count in asked.items())


def ratios(
    alpha: float,
    found: Sequence[Mapping[str, Played]],
    judges: Sequence[Judge],
    wanted: float | None,
) -> Iterator[Figure]:
    """Of multiplexing to the better of the others, each at the rate that is best for it. Without a verdict
    where one of the others is missing, or they have nothing to compare with."""
    names = (MULTIPLEXING, TEMPORAL, SPATIAL)
    have = [name for name in names if all(name in one for one in found)]
    missing = [name for name in names if name not in have]
    if MULTIPLEXING in missing or len(have) == 1:
        return

    def ratio(name: str, of: Callable[[Played], int]) -> Figure:
        best = {system: max(of(one[system]) for one in found) for system in have}
        other = max(value for system, value in best.items() if system != MULTIPLEXING)
        if not other:
            return Figure(name=name, value=best[MULTIPLEXING], unit="to 0", note="the others: none, no ratio")
        note = f"without {', '.join(missing)}, so no verdict" if missing else FLATTERED
        least = None if missing else wanted
        return Figure(name=name, value=best[MULTIPLEXING] / other, unit="×", least=least, note=note)

    for judge in judges:
        yield ratio(f"α {alpha:g}: in time, {judge.scale:g} × alone, / the better of the others", judge.met)
    yield ratio(
        f"α {alpha:g}: tokens/s, multiplexing / the better of the others", lambda played: played.tokens
    )

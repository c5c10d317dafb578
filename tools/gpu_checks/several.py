"""Several models on one GPU: requests in time and tokens a second of multiplexing, against a static split of
the device and against turns on all of it (MuxServe, section 4), the same requests for each.

The load is in parts of what multiplexing makes of a burst, so that it is near the limit on any device. A
request is in time if it ends within `scale` times what it takes alone, counted from when it was due; it is
judged where that moment lies within the time that is watched, and one that has not ended by then is late.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from typing import Final

from tools.gpu_checks.models import LLAMA_1B, LLAMA_8B, QWEN_4B, Ground, InProcess, Lag, Shape
from tools.gpu_checks.report import Figure, reasons
from tools.gpu_checks.systems import MULTIPLEXING, SPATIAL, TEMPORAL, Serving, Stage

from kvloom.lab.bench.run import drive, fit
from kvloom.lab.workload.arrivals import power_law
from kvloom.lab.workload.make import make_requests
from kvloom.lab.workload.request import Alone, Prompts, RequestResult, Scaled, WorkloadRequest
from kvloom.lab.workload.spec import WorkloadSpec
from kvloom.types.clock import WallClock

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


MODELS: Final = {"8B": LLAMA_8B, "4B": QWEN_4B, "1B-a": LLAMA_1B, "1B-b": LLAMA_1B}
WANTED: Final = 1.5  # × the better of the others, at the steepest law
_PROBES: Final = 1 << 40  # numbers of requests that are alone, so that no prompt is another's


@dataclass(frozen=True, slots=True)
class Effort:
    """plays: for each power law the parts of a burst's rate that are asked for. window: seconds in which
    requests come; grace: for which they are watched then. longest: tokens of a request, of ShareGPT's those
    that are no longer; burst: seconds, and requests. scales: of what a request takes alone."""

    plays: tuple[tuple[float, tuple[float, ...]], ...] = ((2.1, (1.0, 0.6)), (0.9, (0.8,)))
    window: float = 4.5
    grace: float = 2.5
    burst: tuple[float, int] = (3.0, 512)
    longest: int = 256
    scales: tuple[float, ...] = (4.0, 8.0)
    kv_bytes: int = 24 << 30
    most_running: int = 32
    chunk: int = 2048

    @property
    def seconds(self) -> float:
        return self.window + self.grace


def several(
    ground: Ground, shapes: Mapping[str, Shape] = MODELS, effort: Effort | None = None
) -> Iterator[Figure]:
    effort = effort or Effort()
    form = effort.kv_bytes, effort.most_running, effort.chunk
    stage = Stage.make(shapes, ground, *form)
    try:
        yield from _several(stage, list(shapes), effort)
    finally:
        stage.close()


def _several(stage: Stage, models: list[str], effort: Effort) -> Iterator[Figure]:
    """Raises RuntimeError at the end where one of the systems has failed; the others are measured."""
    prompts = Prompts(min(model.card.vocab_size for model in stage.loaded.values()))
    alone: dict[str, Alone] = {}
    wrong: dict[str, str] = {}
    for alpha, parts in effort.plays:
        rates = dict(zip(models, power_law(len(models), alpha).tolist(), strict=True))
        with stage.systems(rates) as (systems, apart):
            if not alone:
                alone = asyncio.run(_alone(systems[MULTIPLEXING], models, prompts, effort))
                half = effort.longest // 2
                seconds = alone[models[0]].seconds(
                    WorkloadRequest(at=0, model=models[0], prompt=half, output=half)
                )
                yield Figure(name=f"{effort.longest} tokens alone, {models[0]}", value=seconds, unit="s")
            most = asyncio.run(_capacity(systems[MULTIPLEXING], models, alpha, prompts, effort))
            judges = [Judge(scale, alone, effort.seconds) for scale in effort.scales]
            found: list[dict[str, Played]] = []
            for part in parts:
                asks = _asks(models, alpha, effort, rate=most * part, seconds=effort.window)
                found.append({})
                for name, serving in systems.items():
                    if name in wrong:
                        continue
                    where = f"α {alpha:g}, {most * part:.1f} requests/s, {name}"
                    try:
                        played = asyncio.run(_play(serving, asks, prompts, effort.seconds))
                    except Exception as error:  # noqa: BLE001 -- the other systems are worth having
                        wrong[name] = f"{where}: {'; '.join(reasons(error))}"
                        continue
                    found[-1][name] = played
                    yield from figures(where, asks, played, judges, apart.note if name == SPATIAL else "")
        steepest = alpha == max(other for other, _ in effort.plays)
        yield from ratios(alpha, found, judges, WANTED if steepest else None)
    if wrong:
        raise RuntimeError(" | ".join(wrong.values()))


def _asks(
    models: list[str],
    alpha: float,
    effort: Effort,
    *,
    rate: float,
    seconds: float | None = None,
    most: int = 0,
) -> list[WorkloadRequest]:
    """The same rate, the same requests."""
    lengths = {"prompt": "sharegpt", "output": "sharegpt", "max_total": effort.longest}
    given = {"models": models, "rate": rate, "alpha": alpha, "lengths": lengths}
    end = {"requests": most} if seconds is None else {"seconds": seconds}
    return list(make_requests(WorkloadSpec.model_validate(given | end)))


async def _alone(serving: Serving, models: list[str], prompts: Prompts, effort: Effort) -> dict[str, Alone]:
    """One request at a time, the faster of two."""
    clock = WallClock()
    found = {}
    async with serving() as engines:
        endpoint = InProcess(engines, prompts, clock)
        number = _PROBES
        for name in models:
            best: list[RequestResult] = []
            for prompt in (16, effort.longest - 32):
                ask, outcomes = WorkloadRequest(at=0.0, model=name, prompt=prompt, output=32), []
                for _ in range(2):
                    number += 1
                    outcomes.append(await endpoint.ask(ask, endpoint.body(number, ask), clock.now()))
                    if outcomes[-1].error:
                        raise RuntimeError(f"{name} alone: {outcomes[-1].error}")
                best.append(min(outcomes, key=lambda outcome: outcome.end or 0.0))
            found[name] = fit(*best)
    return found


async def _capacity(
    serving: Serving, models: list[str], alpha: float, prompts: Prompts, effort: Effort
) -> float:
    """Requests a second that a burst is answered with, once it has filled the batches."""
    seconds, count = effort.burst
    asks = _asks(models, alpha, effort, rate=1e6, most=count)
    clock = WallClock()
    async with serving() as engines, asyncio.TaskGroup() as group:
        endpoint = InProcess(engines, prompts, clock)
        task = group.create_task(_until(drive(asks, endpoint, clock, lambda: None, lambda _: None), seconds))
        await asyncio.wait((task,), timeout=seconds / 3)
        first, began = endpoint.tokens, clock.now()
        await task
        tokens, took = endpoint.tokens - first, clock.now() - began
    return max(tokens, 1) / max(took, 1e-3) / mean(ask.output for ask in asks)


async def _play(
    serving: Serving, asks: Sequence[WorkloadRequest], prompts: Prompts, seconds: float
) -> Played:
    clock, outcomes = WallClock(), list[RequestResult]()
    async with serving() as engines:
        endpoint, lag = InProcess(engines, prompts, clock), Lag()
        with lag.watched():
            await _until(drive(asks, endpoint, clock, lambda: None, outcomes.append), seconds)
        return Played(outcomes, endpoint.tokens, lag.told())


async def _until(work: Coroutine[object, object, object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work

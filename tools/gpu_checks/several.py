"""Several models on one GPU: requests in time and tokens a second of multiplexing, against a static split of
the device and against turns on all of it (MuxServe, section 4), the same requests for each.

The load is in parts of what multiplexing makes of a burst, so that it is near the limit on any device. A
request is in time if it ends within `scale` times what it takes alone, counted from when it was due; it is
judged where that moment lies within the time that is watched, and one that has not ended by then is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from typing import Final

from tools.gpu_checks.asking import InProcess
from tools.gpu_checks.models import LLAMA_1B, LLAMA_8B, QWEN_4B, Ground, Shape
from tools.gpu_checks.report import Figure
from tools.gpu_checks.systems import MULTIPLEXING, SPATIAL, Serving, Stage

from kvloom.bench.alone import fit
from kvloom.bench.drive import drive
from kvloom.core.clock import WallClock
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.make import make_asks
from kvloom.workload.objectives import Alone, Scaled
from kvloom.workload.popularity import power_law
from kvloom.workload.prompts import Prompts
from kvloom.workload.spec import WorkloadSpec

MODELS: Final = {"8B": LLAMA_8B, "4B": QWEN_4B, "1B-a": LLAMA_1B, "1B-b": LLAMA_1B}
WANTED: Final = 1.5  # × the better of the others, at the steepest law
_PROBES: Final = 1 << 40  # numbers of requests that are alone, so that no prompt is another's


@dataclass(frozen=True, slots=True)
class Effort:
    """plays: for each power law the parts of a burst's rate that are asked for. window: seconds in which
    requests come; grace: for which they are watched then. longest: tokens of a request, of ShareGPT's those
    that are no longer; burst: seconds, and requests. scales: of what a request takes alone."""

    plays: tuple[tuple[float, tuple[float, ...]], ...] = ((2.1, (1.0, 0.6)), (0.9, (0.8,)))
    window: float = 6.0
    grace: float = 3.0
    burst: tuple[float, int] = (3.0, 512)
    longest: int = 384
    scales: tuple[float, ...] = (4.0, 8.0)
    kv_bytes: int = 24 << 30
    most_running: int = 64
    chunk: int = 2048

    @property
    def seconds(self) -> float:
        return self.window + self.grace


@dataclass(frozen=True, slots=True)
class Played:
    """By one system. tokens: that came while it was watched."""

    outcomes: list[Outcome]
    tokens: int


@dataclass(frozen=True, slots=True)
class Judge:
    """end: seconds after the start, when all that has not ended is late, if it is to be judged at all."""

    scale: float
    alone: Mapping[str, Alone]
    end: float

    def takes(self, ask: Ask) -> float:
        return self.alone[ask.model].seconds(ask)

    def judged(self, ask: Ask) -> bool:
        return ask.at + self.scale * self.takes(ask) <= self.end

    def met(self, played: Played) -> int:
        within = Scaled(self.scale, self.takes)
        return sum(self.judged(o.ask) and not o.error and within(o) for o in played.outcomes)


def several(
    ground: Ground, shapes: Mapping[str, Shape] = MODELS, effort: Effort | None = None
) -> Iterator[Figure]:
    effort = effort or Effort()
    form = effort.kv_bytes, effort.most_running, effort.chunk
    stage = Stage.make(shapes, ground, *form)
    prompts = Prompts(min(model.card.vocab_size for model in stage.loaded.values()))
    alone: dict[str, Alone] = {}
    for alpha, parts in effort.plays:
        rates = dict(zip(shapes, power_law(len(shapes), alpha).tolist(), strict=True))
        systems, note = stage.systems(rates)
        if not alone:
            alone = asyncio.run(_alone(systems[MULTIPLEXING], list(shapes), prompts, effort))
            longest = Ask(
                at=0, model=next(iter(shapes)), prompt=effort.longest // 2, output=effort.longest // 2
            )
            seconds = alone[longest.model].seconds(longest)
            yield Figure(name=f"{effort.longest} tokens alone, {longest.model}", value=seconds, unit="s")
        most = asyncio.run(_capacity(systems[MULTIPLEXING], list(shapes), alpha, prompts, effort))
        judges = [Judge(scale, alone, effort.seconds) for scale in effort.scales]
        found: list[dict[str, Played]] = []
        for part in parts:
            asks = _asks(list(shapes), alpha, effort, rate=most * part, seconds=effort.window)
            found.append({})
            for name, serving in systems.items():
                played = found[-1][name] = asyncio.run(_play(serving, asks, prompts, effort.seconds))
                where = f"α {alpha:g}, {most * part:.1f} requests/s, {name}"
                yield from _figures(where, asks, played, judges, effort, note if name == SPATIAL else "")
        steepest = alpha == max(other for other, _ in effort.plays)
        yield from _ratios(alpha, found, judges, WANTED if steepest else None)


def _figures(
    where: str, asks: Sequence[Ask], played: Played, judges: Sequence[Judge], effort: Effort, note: str
) -> Iterator[Figure]:
    errors = sum(bool(outcome.error) for outcome in played.outcomes)
    for judge in judges:
        judged, met = sum(map(judge.judged, asks)), judge.met(played)
        yield Figure(
            name=f"{where}: in time, {judge.scale:g} × alone",
            value=met / effort.window,
            unit="req/s",
            note=f"{met} of {judged} that can be judged, {len(asks)} asked, {errors} failed{note}",
        )
    yield Figure(name=f"{where}: tokens", value=played.tokens / effort.seconds, unit="tokens/s")


def _ratios(
    alpha: float,
    found: Sequence[Mapping[str, Played]],
    judges: Sequence[Judge],
    wanted: float | None,
) -> Iterator[Figure]:
    """Of multiplexing to the better of the others, each at the rate that is best for it."""
    others = [name for name in found[0] if name != MULTIPLEXING]

    def ratio(what: dict[str, float]) -> float:
        return what[MULTIPLEXING] / max(1.0, *(what[name] for name in others))

    for judge in judges:
        met = {name: float(max(judge.met(one[name]) for one in found)) for name in found[0]}
        name = f"α {alpha:g}: in time, {judge.scale:g} × alone, / the better of the others"
        yield Figure(name=name, value=ratio(met), unit="×", least=wanted)
    tokens = {name: float(max(one[name].tokens for one in found)) for name in found[0]}
    name = f"α {alpha:g}: tokens/s, multiplexing / the better of the others"
    yield Figure(name=name, value=ratio(tokens), unit="×", least=wanted)


def _asks(
    models: list[str],
    alpha: float,
    effort: Effort,
    *,
    rate: float,
    seconds: float | None = None,
    most: int = 0,
) -> list[Ask]:
    """The same rate, the same requests."""
    lengths = {"prompt": "sharegpt", "output": "sharegpt", "max_total": effort.longest}
    given = {"models": models, "rate": rate, "alpha": alpha, "lengths": lengths}
    end = {"requests": most} if seconds is None else {"seconds": seconds}
    return list(make_asks(WorkloadSpec.model_validate(given | end)))


async def _alone(serving: Serving, models: list[str], prompts: Prompts, effort: Effort) -> dict[str, Alone]:
    """One request at a time, the faster of two."""
    clock = WallClock()
    found = {}
    async with serving() as engines:
        endpoint = InProcess(engines, prompts, clock)
        number = _PROBES
        for name in models:
            best: list[Outcome] = []
            for prompt in (16, effort.longest - 32):
                ask, outcomes = Ask(at=0.0, model=name, prompt=prompt, output=32), []
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


async def _play(serving: Serving, asks: Sequence[Ask], prompts: Prompts, seconds: float) -> Played:
    clock, outcomes = WallClock(), list[Outcome]()
    async with serving() as engines:
        endpoint = InProcess(engines, prompts, clock)
        await _until(drive(asks, endpoint, clock, lambda: None, outcomes.append), seconds)
        return Played(outcomes, endpoint.tokens)


async def _until(work: Coroutine[object, object, object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work

"""The number of models that a GPU serves (Aegaeon's comparison), and the paper's arithmetic of active
models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvloom.lab.reproduce.aegaeon.setup import (
    BAR,
    KVLOOM,
    ONE,
    SEVERAL,
    SLO,
    STATIC,
    SYSTEMS,
    Found,
    Load,
    System,
    play_load,
    wanted_at_once,
)
from kvloom.lab.reproduce.report import Claim, Grid, Report, Scale, Tell, cells, part_of
from kvloom.lab.workload.arrivals import Steps, arrivals, poisson

PAPER_MODELS: Final = 7  # per GPU, at most, in the paper
RATES: Final = (2.0, 2.5)  # times those of request-level switching
GOODPUT: Final = (1.5, 9.0)  # times that of the others

# What the paper's own arithmetic is of: requests/s per model, seconds of one, models
ASKED: Final = 0.037
SERVICE: Final = 16.79
MARKET: Final = 100
ACTIVE: Final = 46.55  # models with a request, expected


@dataclass(frozen=True, slots=True)
class Sweep:
    """`rate` is in requests/s per model, which come for `seconds`. `counts` are numbers of models,
    ascending."""

    rate: float
    seconds: float
    counts: Sequence[int]


SWEEPS: Final[Mapping[Scale, tuple[Sweep, ...]]] = {
    "full": (
        Sweep(0.1, 200.0, (3, 5, 7, 10, 14, 18)),
        Sweep(0.5, 100.0, (2, 3, 4, 5, 6, 7)),
    ),
    "small": (Sweep(0.1, 40.0, (3, 7)),),
}

Climbed = dict[int, Found]
"""The outcomes of a system for each number of models, up to the first that is below the bar."""


def climb(system: System, sweep: Sweep, tell: Tell) -> Climbed:
    """Plays more and more models, until fewer tokens than the bar asks for are in time."""
    found: Climbed = {}
    for at, count in enumerate(sweep.counts):
        part = partial(
            part_of(tell, at, len(sweep.counts)), f"{system.name}, {count} at {sweep.rate:g} req/s"
        )
        found[count] = play_load(system, Load(count, sweep.rate, sweep.seconds), part)
        if found[count].attained < BAR:
            break
    return found


def most(found: Climbed) -> int:
    """Returns the largest number of models of which enough tokens are in time; 0 if none is."""
    return max((count for count, one in found.items() if one.attained >= BAR), default=0)


def at_most(found: Climbed, counts: Sequence[int]) -> float:
    """Returns the largest number of models that a finer grid of these counts might find."""
    return next((count - 1 for count in counts if count > most(found)), math.inf)


def pooling(scale: Scale, tell: Tell) -> Report:
    """Plays more and more models on a GPU, at the paper's rates."""
    runs = [(sweep, system) for sweep in SWEEPS[scale] for system in SYSTEMS]
    found: dict[float, dict[str, Climbed]] = {sweep.rate: {} for sweep in SWEEPS[scale]}
    for at, (sweep, system) in enumerate(runs):
        found[sweep.rate][system.name] = climb(system, sweep, part_of(tell, at, len(runs)))
    tell("the report", 1.0)
    return told(SWEEPS[scale], found)


def told(sweeps: Sequence[Sweep], found: Mapping[float, Mapping[str, Climbed]]) -> Report:
    """Returns what is told of the sweeps. `found` is by rate and by the system's name."""
    top = {rate: {name: most(one) for name, one in of.items()} for rate, of in found.items()}
    room = {sweep.rate: at_most(found[sweep.rate][KVLOOM.name], sweep.counts) for sweep in sweeps}
    return Report(
        name="models per GPU",
        title=f"tokens in time ({SLO.ttft:g} s, then {SLO.tpot * 1e3:g} ms each) of models of 6B to 14B",
        claims=(_seven(top, room), _switching(top, room), _goodput(top, room)),
        grids=(
            _most(top),
            *(grid for sweep in sweeps for grid in (_in_time(sweep, found), _waking(sweep, found))),
        ),
    )


Top = Mapping[float, Mapping[str, int]]


Room = Mapping[float, float]
"""The `at_most` of kvloom at each rate."""


def _seven(top: Top, room: Room) -> Claim:
    holds = max(of[KVLOOM.name] for of in top.values()) >= PAPER_MODELS
    text = ", ".join(f"{of[KVLOOM.name]} at {rate:g} req/s per model" for rate, of in top.items())
    return Claim(
        said=f"up to {PAPER_MODELS} models per GPU",
        holds=holds or (None if max(room.values()) >= PAPER_MODELS else False),
        found=f"{text} with {BAR:.0%} of the tokens in time",
    )


def _over(top: Top, other: System) -> dict[float, float]:
    """Returns the ratio of the largest numbers of models at each rate."""
    return {rate: of[KVLOOM.name] / max(of[other.name], 1) for rate, of in top.items()}


def _holds(top: Top, room: Room, others: Sequence[System], least: float) -> bool | None:
    """Returns whether kvloom has so many times the models of the others at each rate; None if a finer grid
    might say otherwise."""
    over = [(of[KVLOOM.name], room[rate], max(of[o.name], 1)) for rate, of in top.items() for o in others]
    if all(ours >= least * theirs for ours, _, theirs in over):
        return True
    return None if all(might >= least * theirs for _, might, theirs in over) else False


def _told(ratios: Mapping[float, float]) -> str:
    return ", ".join(f"{ratio:.1f}× at {rate:g} req/s per model" for rate, ratio in ratios.items())


def _switching(top: Top, room: Room) -> Claim:
    alone, fitting = _over(top, ONE), _over(top, SEVERAL)
    return Claim(
        said=f"{RATES[0]:g} to {RATES[1]:g}× the request rate of switching by requests (ServerlessLLM)",
        holds=_holds(top, room, (ONE, SEVERAL), RATES[0]),
        found=f"{_told(alone)} (one model at a time); {_told(fitting)} (those that fit)",
    )


def _goodput(top: Top, room: Room) -> Claim:
    others = (ONE, SEVERAL, STATIC)
    every = {other.name: _over(top, other) for other in others}
    least = min(every, key=lambda name: min(every[name].values()))
    ratios = [ratio for of in every.values() for ratio in of.values()]
    return Claim(
        said=f"{GOODPUT[0]:g} to {GOODPUT[1]:g}× the goodput of the others",
        holds=_holds(top, room, others, GOODPUT[0]),
        found=f"{min(ratios):.1f} to {max(ratios):.1f}×; the least over {least}",
    )


def _most(top: Top) -> Grid:
    return Grid(
        title=f"ours, the largest number of models per GPU with {BAR:.0%} of the tokens in time",
        heads=("", *(f"{rate:g} req/s per model" for rate in top)),
        rows=tuple((one.name, *(str(of[one.name]) for of in top.values())) for one in SYSTEMS),
    )


def _in_time(sweep: Sweep, found: Mapping[float, Mapping[str, Climbed]]) -> Grid:
    rows = [
        (name, *(f"{100 * of[count].attained:.1f}" if count in of else "–" for count in sweep.counts))
        for name, of in found[sweep.rate].items()
    ]
    return Grid(
        title=f"ours, % of the tokens in time at {sweep.rate:g} req/s per model, by models per GPU",
        heads=("", *map(str, sweep.counts)),
        rows=tuple(rows),
    )


def _waking(sweep: Sweep, found: Mapping[float, Mapping[str, Climbed]]) -> Grid:
    """Tells what switching by tokens takes."""
    rows = []
    for count, one in found[sweep.rate][KVLOOM.name].items():
        slept = one.slept
        assert slept is not None
        wait = slept.wait
        rows.append(
            (
                str(count),
                f"{slept.wakes / sweep.seconds:.2f}",
                f"{slept.waited / max(one.requests, 1):.0%}",
                f"{wait.mean:.2f} s" if wait else "–",
                f"{wait.p99:.2f} s" if wait else "–",
                f"{one.service:.2f} s",
                f"{wanted_at_once(count, sweep.rate, one.service):.1f}",
            )
        )
    heads = (
        "models",
        "wakes per second",
        "requests that wait",
        "their wait",
        "P99",
        "whole request",
        "active",
    )
    return Grid(title=f"ours, {KVLOOM.name} at {sweep.rate:g} req/s per model", heads=heads, rows=tuple(rows))


def drawn_at_once(models: int, rate: float, service: float, seconds: float) -> float:
    """Returns how many models have a request in the mean over so many seconds of drawn arrivals, if each
    request takes `service` seconds."""
    busy = 0.0
    for model in range(models):
        rng, until = np.random.default_rng([0, model]), 0.0
        for at in arrivals(poisson, Steps(np.array([rate])), rng):
            if at >= seconds:
                break
            busy += max(0.0, min(at + service, seconds) - max(at, until))
            until = max(until, at + service)
    return busy / seconds


def arithmetic(scale: Scale, tell: Tell) -> Report:
    """Computes how many of a market's models are active at once, which is why they need not all be in
    memory."""
    seconds = 2_000.0 if scale == "small" else 20_000.0
    drawn = drawn_at_once(MARKET, ASKED, SERVICE, seconds)
    tell("drawn", 1.0)
    return Report(
        name="active models",
        title=f"of {MARKET} models, each asked {ASKED:g} times a second for {SERVICE:g} s",
        cells=tuple(
            cells(
                "expected to have a request",
                ("M (1 − exp(−λT))", ACTIVE, wanted_at_once(MARKET, ASKED, SERVICE)),
                (f"drawn over {seconds:,.0f} s", ACTIVE, drawn),
            )
        ),
    )

"""The ways to find a task at the cold unit and to split operators (section 5.3, figure 7a), and times to the
first token behind GPUs that prefill (figure 7b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells, part_of
from kvloom.lab.reproduce.setup import VOCAB
from kvloom.lab.reproduce.weaver.ranks import MODEL, RANKED
from kvloom.lab.reproduce.weaver.setup import (
    AZURE,
    BARE_MUXSERVE,
    COLD,
    COLD_RATE,
    HOT,
    MUXSERVE,
    PART,
    SHARE,
    WEAVER,
    Load,
    Point,
    System,
    Trace,
    dedicated,
    play_points,
    requests,
    unit,
    weave,
)
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.workload.request import Prompts
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.router.program import load_program

# What the paper tells: figure 7a
CPU_CONTROL: Final = 175.0  # ms
GPU_CONTROL: Final = 4.83  # times as quick
SPLITTING: Final = 9.5  # % quicker again
SPLITTING_COLD: Final = 0.7  # ms of the cold model
FIRST_TOKEN: Final = 1.057  # figure 7b: Weaver's time to the first token over MuxServe's, at the most

DEVICE: Final = "A100-40"
BATCH: Final = 128  # of the hot model, all the time: chosen, because no rate is told
PROMPT: Final = 749
LONGEST: Final = 400.0  # seconds
GAIN: Final = 1.05
FINE: Final = 0.01  # of a step: a finer threshold than algorithm 1's


@dataclass(frozen=True, slots=True)
class _Setting:
    """The load of the cold model. `part` is that of its pool that it can lend, and `warm` the seconds until
    the hot model's requests come."""

    name: str
    cold: float
    part: float
    warm: float


IDLE: Final = _Setting("cold at 1 req/s", COLD_RATE, PART, 6.0)
BUSY: Final = _Setting("cold at 4.5 req/s", 4.5, 0.4, 20.0)
"""The setting in which the cold model's own step takes more than 25 ms, as the paper's does by its own words:
there 2.5 ms are less than 10 % of it."""

ANSWERS: Final = {"full": 512, "small": 24}  # tokens
SETTINGS: Final = {"full": (IDLE, BUSY), "small": (IDLE,)}


def _controlled(part: float) -> tuple[System, ...]:
    return (
        System("CPU control", dedicated(weave(SHARE, "iterations", "none", part=part))),
        System("+ GPU control", dedicated(weave(SHARE, split="none", part=part))),
        System("+ operator splitting", dedicated(weave(SHARE, part=part))),
        System("+ finer splitting", dedicated(weave(SHARE, part=part, waits=FINE))),
    )


def figure_7(scale: Scale, tell: Tell) -> Report:
    """Plays (a) and (b), one after the other."""
    trace = Trace(f"{BATCH} at once", None, PROMPT, ANSWERS[scale])
    plan = [
        (setting, system, _load(setting, trace))
        for setting in SETTINGS[scale]
        for system in _controlled(setting.part)
    ]
    points = play_points([(system, load) for _, system, load in plan], part_of(tell, 0, 2))
    found = {
        (setting.name, system.name): point for (setting, system, _), point in zip(plan, points, strict=True)
    }
    first = _first_tokens(scale, part_of(tell, 1, 2))
    told, claims = list[Cell](), list[Claim]()
    for setting in SETTINGS[scale]:
        here = [point for (name, _), point in found.items() if name == setting.name]
        told += _control_cells(setting.name, here)
        claims.append(_control_claim(setting.name, here))
    return Report(
        name="figure 7",
        title=f"(a) who looks for tasks: {BATCH} sequences of the hot model; (b) times to the first token",
        cells=(*told, *_first_cells(first)),
        claims=tuple(claims),
        grids=(_pace_grid(found), _wait_grid(found), _first_grid(first)),
    )


def _load(setting: _Setting, trace: Trace) -> Load:
    return Load(DEVICE, trace, 0.0, LONGEST, setting.cold, at_once=BATCH, warm=setting.warm)


def _control_cells(setting: str, points: Sequence[Point]) -> list[Cell]:
    cpu, gpu, split, _ = (1e3 * point.hot.tpot for point in points)
    cold = [1e3 * point.cold.tpot for point in points]
    return cells(
        f"(a) {setting}",
        ("hot, CPU control, ms", CPU_CONTROL, cpu),
        ("hot, GPU control, times as quick", GPU_CONTROL, cpu / gpu),
        ("hot, splitting, % quicker", SPLITTING, 100 * (1 - split / gpu)),
        ("cold, splitting, ms longer", SPLITTING_COLD, cold[2] - cold[1]),
    )


def _control_claim(setting: str, points: Sequence[Point]) -> Claim:
    cpu, gpu, split, fine = (1e3 * point.hot.tpot for point in points)
    return Claim(
        said=f"{setting}: each step makes the hot model quicker, by 5 % at least",
        holds=cpu > GAIN * gpu > GAIN**2 * split,
        found=f"{cpu:.0f}, {gpu:.1f}, {split:.1f} ms; split finer {fine:.1f} ms",
    )


def _pace_grid(found: dict[tuple[str, str], Point]) -> Grid:
    return Grid(
        title="(a) ms a token",
        heads=("", "who looks", "hot", "cold"),
        rows=tuple(
            (*names, f"{1e3 * point.hot.tpot:.1f}", f"{1e3 * point.cold.tpot:.1f}")
            for names, point in found.items()
        ),
    )


def _wait_grid(found: dict[tuple[str, str], Point]) -> Grid:
    """Returns a grid of the waits of all tasks, as they came, and by the formulas of the queueing model."""
    rows = []
    for names, point in found.items():
        waits = point.waits
        if waits is not None:
            times = (
                waits.ahead,
                *(waits.wait, waits.expected_wait),
                *(waits.beyond, waits.expected_beyond),
                *(waits.stall, waits.expected_stall),
            )
            rows.append((*names, *(f"{1e6 * seconds:.0f}" for seconds in times)))
    heads = ("c = K − N", "E[W]", "formula", "E[W beyond c]", "formula", "stall", "formula")
    return Grid(title="(a) µs that a task waits", heads=("", "who looks", *heads), rows=tuple(rows))


# -- times to the first token ------------------------------------------------------------------------------

FIRST_RATES: Final = {"full": (5.0, 10.0), "small": (5.0,)}  # of the hot model; its GPU prefills 14 a second
FIRST_SECONDS: Final = {"full": 40.0, "small": 4.0}
FIRST_SYSTEMS: Final = (WEAVER, MUXSERVE, BARE_MUXSERVE)

First = dict[tuple[float, str], float]
"""The mean seconds to the hot model's first token, by rate and system."""


def _first_tokens(scale: Scale, tell: Tell) -> First:
    found, plan = First(), [(rate, system) for rate in FIRST_RATES[scale] for system in FIRST_SYSTEMS]
    for at, (rate, system) in enumerate(plan):
        tell(f"first tokens, {system.name}", at / len(plan))
        found[rate, system.name] = _first_token(system, rate, FIRST_SECONDS[scale])
    tell("first tokens", 1.0)
    return found


def _first_token(system: System, rate: float, seconds: float) -> float:
    """Lets a GPU of its own prefill each model's prompts, and sends K and V to the units that decode."""
    units = [*map(_prefiller, (HOT, COLD)), *system.units(DEVICE, rate, COLD_RATE)]
    results = simulate(
        units,
        load_program("disaggregate", {"prefill": 1}),
        requests(AZURE, rate, COLD_RATE, seconds),
        Prompts(VOCAB),
        Summary(),
        title=system.name,
    )
    first = results.models[HOT].first
    if results.total.errors or first is None:
        raise RuntimeError(f"{system.name}: {results.total.errors} failed: {results.errors}")
    return first.mean


def _prefiller(model: str) -> SimulatedUnit:
    cost = Roofline(find_device(DEVICE), 1, {model: find_shape(MODEL)}, RANKED)
    return replace(unit(f"prefill-{model}", DEVICE, [model]), cost=cost)


def _first_cells(found: First) -> list[Cell]:
    told = list[Cell]()
    for over in FIRST_SYSTEMS[1:]:
        ratios = [
            seconds / found[rate, over.name] for (rate, name), seconds in found.items() if name == WEAVER.name
        ]
        told += cells("(b) first token, at the most", (f"Weaver over {over.name}", FIRST_TOKEN, max(ratios)))
    return told


def _first_grid(found: First) -> Grid:
    rates = dict.fromkeys(rate for rate, _ in found)
    return Grid(
        title="(b) ms to the first token, by requests a second",
        heads=("", *(f"{rate:g}" for rate in rates)),
        rows=tuple(
            (system.name, *(f"{1e3 * found[rate, system.name]:.0f}" for rate in rates))
            for system in FIRST_SYSTEMS
        ),
    )
